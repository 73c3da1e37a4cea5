"""configure-runtime against a real dockerd: reloaded or restarted, active afterwards, or unchanged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fixtures.engines import start_dockerd
from gpunode.daemons.docker import DockerApi
from gpunode.host import Host
from tests.integration.configuring import Cli, configuring

pytestmark = pytest.mark.docker

EDITED = '{\n\t"log-driver": "json-file",\n\t"log-opts": {"max-size": "10m"},\n\t"debug": true\n}\n'


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    with configuring(start_dockerd(EDITED), tmp_path) as started:
        yield started


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def info(cli: Cli) -> dict[str, Any]:
    return DockerApi(Host(), cli.engine.socket).info()


def test_runtime_is_added_by_a_reload_without_a_restart(cli: Cli) -> None:
    pid = cli.engine.pid
    data = cli.data("configure-runtime", restart="false")  # a reload needs no restart command
    assert data["restart"]["verb"] == "reload" and data["restart"]["performed"]
    assert "nvidia" in data["active"]["handler"] and cli.engine.pid == pid
    written = json.loads(cli.engine.config.read_text())
    assert written.pop("runtimes") == {"nvidia": {"path": str(cli.program), "runtimeArgs": []}}
    assert written == json.loads(EDITED)
    assert cli.engine.config.read_text().startswith(EDITED.removesuffix("\n}\n"))


def test_second_run_is_unchanged(cli: Cli) -> None:
    cli.data("configure-runtime")
    before = cli.engine.config.stat().st_mtime_ns
    data = cli.data("configure-runtime")
    assert (data["changes"][0]["action"], data["restart"]["verb"]) == ("unchanged", "none")
    assert cli.engine.config.stat().st_mtime_ns == before


def test_default_runtime_is_set_and_restored_without_a_restart(cli: Cli) -> None:
    pid, before = cli.engine.pid, digest(cli.engine.config)
    assert cli.data("configure-runtime", "--set-as-default")["active"]["default"] == "nvidia"
    data = cli.data("unconfigure-runtime")
    assert data["active"]["default"] == "runc" and "nvidia" not in data["active"]["handler"]
    assert digest(cli.engine.config) == before
    assert cli.engine.running and cli.engine.pid == pid
    assert "panic" not in cli.engine.log_text()


def test_file_edited_since_loses_only_the_runtime(cli: Cli) -> None:
    cli.data("configure-runtime", "--set-as-default")
    edited = json.loads(cli.engine.config.read_text()) | {"shutdown-timeout": 20}
    cli.engine.config.write_text(json.dumps(edited))
    cli.data("unconfigure-runtime")
    assert json.loads(cli.engine.config.read_text()) == json.loads(EDITED) | {"shutdown-timeout": 20}
    assert cli.engine.running and info(cli)["DefaultRuntime"] == "runc"


@pytest.mark.full
def test_reload_without_effect_is_rolled_back(tmp_path: Path) -> None:
    # a number below zero, written since dockerd started: it logs the error and ignores the whole file
    with configuring(start_dockerd({}), tmp_path) as cli:
        cli.engine.config.write_text('{"max-concurrent-downloads": -1}')
        before, pid = digest(cli.engine.config), cli.engine.pid
        done = cli.run("configure-runtime")
        assert done.returncode == 4, done.stderr
        assert digest(cli.engine.config) == before
        assert cli.engine.pid == pid and "nvidia" not in info(cli)["Runtimes"]


def test_key_unknown_to_this_dockerd_is_reported_and_the_file_not_changed(cli: Cli) -> None:
    cli.engine.config.write_text('{\n  "debug": true,\n  "no-such-directive": 1\n}')
    before = digest(cli.engine.config)
    done = cli.run("configure-runtime")
    assert done.returncode == 1 and f"as it is: {cli.engine.config}:3: " in done.stderr
    assert digest(cli.engine.config) == before


def test_flag_for_the_default_runtime_is_refused_before_writing(tmp_path: Path) -> None:
    engine = start_dockerd({}, arguments=["--default-runtime", "runc"])
    with configuring(engine, tmp_path) as cli:
        before = digest(cli.engine.config)
        done = cli.run("configure-runtime", "--set-as-default")
        assert done.returncode == 1 and "default-runtime" in done.stderr
        assert digest(cli.engine.config) == before


def test_broken_json_names_line_and_column(cli: Cli) -> None:
    cli.engine.config.write_text('{\n  "debug": true,\n}\n')
    done = cli.run("configure-runtime")
    assert done.returncode == 1 and f"{cli.engine.config}:3:1: " in done.stderr
    assert cli.engine.config.read_text() == '{\n  "debug": true,\n}\n'


def test_rollback_restores_the_bytes_by_a_reload(cli: Cli) -> None:
    before, pid = digest(cli.engine.config), cli.engine.pid
    cli.data("configure-runtime")
    cli.data("configure-runtime", "--set-as-default")
    # the report has the daemon's state after it has read the file, not before
    assert cli.data("rollback")["active"]["default"] == "runc"
    assert "nvidia" in info(cli)["Runtimes"]
    assert "nvidia" not in cli.data("rollback")["active"]["handler"]
    assert digest(cli.engine.config) == before and cli.engine.pid == pid


def test_missing_socket_is_reported_before_any_write(cli: Cli) -> None:
    before = cli.engine.config.read_bytes()
    done = cli.run("configure-runtime", "--socket", "/run/nowhere/docker.sock")
    assert done.returncode == 3 and "/run/nowhere/docker.sock does not exist" in done.stderr
    assert cli.engine.config.read_bytes() == before


def test_old_docker_has_no_cdi(cli: Cli) -> None:
    done = cli.run("configure-runtime", "--cdi")
    assert done.returncode == 3 and "CDI" in done.stderr


def test_killed_after_a_reload_is_recovered_without_a_restart(cli: Cli) -> None:
    before, pid = digest(cli.engine.config), cli.engine.pid
    cli.data("configure-runtime", "--set-as-default")
    manifest = next((cli.state / "journal").glob("*/manifest.json"))
    # as if it had been killed after the reload and before the commit, a moment that can't be hit from outside
    manifest.write_text(manifest.read_text().replace('"committed"', '"applied"'))
    data = cli.data("unconfigure-runtime", restart="false")
    assert data["changes"][0]["action"] == "unchanged"
    assert digest(cli.engine.config) == before and cli.engine.pid == pid
    assert info(cli)["DefaultRuntime"] == "runc" and "nvidia" not in info(cli)["Runtimes"]
    assert "panic" not in cli.engine.log_text()


def test_default_removed_from_the_file_does_not_end_the_daemon(tmp_path: Path) -> None:
    # dockerd 20.10 dies on reloading a file that neither has its present default runtime nor names another
    config = {"default-runtime": "other", "runtimes": {"other": {"path": "/usr/bin/runc"}}}
    with configuring(start_dockerd(config), tmp_path) as cli:
        pid = cli.engine.pid
        cli.engine.config.write_text("{}")
        active = cli.data("configure-runtime")["active"]
        assert "nvidia" in active["handler"] and active["default"] == "runc"
        assert cli.engine.pid == pid and "default-runtime" not in json.loads(cli.engine.config.read_text())
        assert "nvidia" not in cli.data("rollback")["active"]["handler"]
        assert cli.engine.config.read_text() == "{}" and cli.engine.pid == pid


def test_rollback_if_the_daemon_had_not_read_its_file_before(cli: Cli) -> None:
    cli.data("configure-runtime")
    cli.engine.config.write_text(EDITED)  # removed by hand, not reloaded
    data = cli.data("configure-runtime", "--set-as-default")
    assert data["active"]["default"] == "nvidia"
    assert "nvidia" not in cli.data("rollback")["active"]["handler"]
    assert cli.engine.config.read_text() == EDITED
