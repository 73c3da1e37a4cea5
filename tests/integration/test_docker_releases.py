"""CDI, flags and used runtimes on real dockerds of several releases."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fixtures.engines import start_dockerd
from fixtures.images import load
from gpunode.daemons.docker import DockerApi
from gpunode.facts.daemons import parse_version
from gpunode.facts.docker import _KEYS, _UNKNOWN, WHOLE, wrong_types
from gpunode.host import Host
from tests.cli import checked
from tests.integration.configuring import Cli, configuring
from tests.integration.conftest import path_of
from tests.waiting import PATIENCE, eventually

pytestmark = [pytest.mark.full, pytest.mark.docker]
IMAGE = "gpunode.test/sleeper:1"


@pytest.fixture(params=["trixie", "forky"])
def release(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, ...]:
    """A newer dockerd than the machine's own comes first on PATH."""
    monkeypatch.setenv("PATH", path_of(request.param))
    argv = [shutil.which("dockerd") or "", "--version"]
    said = subprocess.run(argv, capture_output=True, text=True, check=True)
    return parse_version(said.stdout)


def cdi_directories(cli: Cli) -> Any:
    return DockerApi(Host(), cli.engine.socket).info().get("CDISpecDirs")


def without_specification(cli: Cli, verb: str, *options: str) -> Any:
    """`data` of a run with a specification of another owner: there is no GPU here to describe."""
    program = (
        "import sys; from gpunode.cdi import engines as c; c.engine_files = lambda *a, **k: c.EngineFiles();"
        " from gpunode.cli import main; sys.argv[0] = 'gpunode'; main()"
    )
    argv = cli.argv(verb, *options, "-o", "json")
    done = subprocess.run(
        [argv[0], "-c", program, *argv[3:]],
        env=cli.environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return checked(done.stdout)["data"]


def test_cdi_key_is_written_only_for_releases_that_need_it(release: tuple[int, ...], tmp_path: Path) -> None:
    with configuring(start_dockerd({"features": {"time-namespaces": False}}), tmp_path) as cli:
        before = cli.engine.config.read_text()
        by_default = release >= (28, 2)
        assert bool(cdi_directories(cli)) == by_default
        data = without_specification(cli, "configure-runtime", "--cdi")
        assert data["restart"]["verb"] == ("reload" if by_default else "restart")
        features = json.loads(cli.engine.config.read_text())["features"]
        assert features == {"time-namespaces": False} | ({} if by_default else {"cdi": True})
        assert cdi_directories(cli)
        assert without_specification(cli, "configure-runtime", "--cdi")["restart"]["verb"] == "none"
        cli.data("unconfigure-runtime")
        assert cli.engine.config.read_text() == before and bool(cdi_directories(cli)) == by_default


def test_disabled_cdi_is_enabled_and_rollback_disables_it(release: tuple[int, ...], tmp_path: Path) -> None:
    text = '{"features": {"cdi": false}}'
    with configuring(start_dockerd(text), tmp_path) as cli:
        assert not cdi_directories(cli)
        without_specification(cli, "configure-runtime", "--cdi")
        assert cdi_directories(cli)
        cli.data("rollback")
        assert cli.engine.config.read_text() == text and not cdi_directories(cli)


@pytest.mark.parametrize("source", ["installed", "forky"])
def test_runtime_added_by_a_flag_stays_available(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if source != "installed":
        monkeypatch.setenv("PATH", path_of(source))
    engine = start_dockerd({}, arguments=["--add-runtime", "other=/usr/sbin/runc"])
    with configuring(engine, tmp_path) as cli:
        data = cli.data("configure-runtime")
        assert data["restart"]["verb"] == "restart"  # a reload would drop it
        assert {"nvidia", "other"} <= set(data["active"]["handler"])
        gone = cli.data("unconfigure-runtime")["active"]["handler"]
        assert "other" in gone and "nvidia" not in gone


def test_runtime_added_by_a_flag_cannot_be_removed_through_the_file(tmp_path: Path) -> None:
    engine = start_dockerd({}, arguments=["--add-runtime", "nvidia=/usr/sbin/runc"])
    with configuring(engine, tmp_path) as cli:
        done = cli.run("unconfigure-runtime")
        assert done.returncode == 1 and "--add-runtime for the runtime nvidia" in done.stderr
        assert cli.engine.config.read_text() == "{}\n"


def test_stopped_dockerd_is_started_only_by_configure(tmp_path: Path) -> None:
    with configuring(start_dockerd({}), tmp_path) as cli:
        os.kill(cli.engine.pid, 15)
        assert eventually(lambda: not cli.engine.running)
        data = cli.data("configure-runtime", "--socket", cli.engine.socket)
        assert data["restart"]["verb"] == "restart" and "nvidia" in data["active"]["handler"]
        os.kill(cli.engine.pid, 15)
        assert eventually(lambda: not cli.engine.running)
        data = cli.data("unconfigure-runtime", "--socket", cli.engine.socket)
        assert (data["restart"]["verb"], cli.engine.config.read_text()) == ("none", "{}\n")
        assert not cli.engine.running


@pytest.mark.containers
def test_containers_using_the_runtime_are_named_before_its_removal(tmp_path: Path) -> None:
    with configuring(start_dockerd({}), tmp_path) as cli:
        cli.data("configure-runtime")
        load(cli.engine, IMAGE, ("/bin/sleep", "1000"))
        argv = ["docker", "-H", f"unix://{cli.engine.socket}", "run", "-d", "--network=none"]
        argv += ["--stop-signal=KILL", "--runtime=nvidia", "--name=trainer", IMAGE]
        subprocess.run(argv, check=True, capture_output=True, timeout=PATIENCE)
        before = cli.engine.config.read_text()
        shown = cli.run("unconfigure-runtime", "--dry-run")
        assert shown.returncode == 3 and "trainer" in shown.stderr
        refused = cli.run("unconfigure-runtime")
        assert refused.returncode == 3, refused.stderr
        assert "1 running container can't be restarted" in refused.stderr and "trainer" in refused.stderr
        assert cli.engine.config.read_text() == before
        for typed, expected in ((b"n\n", 3), (b"\n", 3), (b"\x04", 3), (b"\x03", 130)):  # Ctrl-D, Ctrl-C
            code, screen = cli.on_terminal(typed, "unconfigure-runtime")
            assert code == expected and "trainer. Continue? [y/N]" in screen, screen
            assert cli.engine.config.read_text() == before
        code, screen = cli.on_terminal(b"y\n", "unconfigure-runtime")
        assert code == 0 and cli.engine.config.read_text() == "{}\n", screen
        cli.engine.config.write_text(before)
        cli.data("configure-runtime")
        done = cli.run("unconfigure-runtime", "--yes")
        assert done.returncode == 0 and "can't be started again" in done.stderr
        assert cli.engine.config.read_text() == "{}\n"


def test_dockerd_refuses_each_type_that_the_doctor_calls_wrong(
    release: tuple[int, ...], tmp_path: Path
) -> None:
    file = tmp_path / "daemon.json"
    for key in " ".join(_KEYS.values()).split():
        # an object only where dockerd reads one: elsewhere it takes the names in it for unknown settings
        values = (*([{"x": 5}] if key in WHOLE else []), [5], "x", 5)
        wrong = [value for value in values if any(wrong_types({key: value}))]
        for value in wrong[:2]:
            file.write_text(json.dumps({key: value}))
            argv = ["dockerd", "--validate", f"--config-file={file}"]
            done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE, check=False)
            unknown = done.stderr.partition(_UNKNOWN)[2]
            assert "cannot unmarshal" in done.stderr or key in unknown, (key, value, done)
