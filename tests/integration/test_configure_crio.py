"""configure-runtime against a running stub of CRI-O: found by its process, restarted, queried, undone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fixtures.crio import pod_problem, shown_handlers, start_crio
from fixtures.crio_stub import effective
from fixtures.engines import Engine
from gpunode.host import Host
from tests.integration.configuring import Cli
from tests.integration.conftest import require
from tests.integration.systemd_stand_in import Node, require_namespace
from tests.waiting import eventually


@contextmanager
def crio(case: str, directory: Path, **options: str) -> Iterator[Cli]:
    """The command line on a running stub with a private copy of the case."""
    require("gcc")
    with start_crio(case, **options) as engine:
        program = engine.directory / "programs/usr/bin/nvidia-container-runtime"
        yield Cli(engine, directory, program)


def drop_in(engine: Engine) -> Path:
    return engine.directory / "etc/crio.conf.d/99-nvidia.toml"


def meaning(engine: Engine) -> object:
    return effective(str(engine.config), str(engine.directory / "etc/crio.conf.d"))


def test_pods_find_the_handler_once_it_is_configured(tmp_path: Path) -> None:
    with crio("packaged", tmp_path) as cli:
        pid, before = cli.engine.pid, meaning(cli.engine)
        data = cli.data("configure-runtime")
        assert (data["engine"], data["engineVersion"], data["restart"]["verb"]) == (
            "crio",
            "1.32.4",
            "restart",
        )
        assert [change["path"] for change in data["changes"]] == [str(drop_in(cli.engine))]
        assert "nvidia" in data["active"]["handler"] and data["active"]["default"] == "crun"
        assert pod_problem(cli.engine, "nvidia") == "" and cli.engine.pid != pid
        again = cli.data("configure-runtime")
        assert [change["action"] for change in again["changes"]] == ["unchanged"]
        assert again["restart"]["verb"] == "none"
        undone = cli.data("unconfigure-runtime")
        assert "nvidia" not in undone["active"]["handler"] and meaning(cli.engine) == before
        assert "failed to find runtime handler" in pod_problem(cli.engine, "nvidia")
        assert not drop_in(cli.engine).exists()


@pytest.mark.full
def test_reload_lists_a_handler_that_pods_cannot_use(tmp_path: Path) -> None:
    """Why the verb is restart: the stub does on SIGHUP what CRI-O up to 1.37 does."""
    with crio("packaged", tmp_path) as cli:
        cli.data("configure-runtime", "--no-restart")
        os.kill(cli.engine.pid, signal.SIGHUP)
        assert eventually(lambda: "nvidia" in shown_handlers(cli.engine))
        assert "failed to find runtime handler" in pod_problem(cli.engine, "nvidia")


@pytest.mark.full
def test_handler_that_was_only_reloaded_is_restarted(tmp_path: Path) -> None:
    with crio("packaged", tmp_path) as cli:
        started = Host().monotonic()
        Host().wait_until(lambda: Host().monotonic() > started + 2.6, 5.0)
        cli.data("configure-runtime", "--no-restart")
        os.kill(cli.engine.pid, signal.SIGHUP)
        assert eventually(lambda: "nvidia" in shown_handlers(cli.engine))
        data = cli.data("configure-runtime")
        assert (data["restart"]["verb"], data["restart"]["performed"]) == ("restart", True)
        assert pod_problem(cli.engine, "nvidia") == ""


def test_default_is_set_and_restored(tmp_path: Path) -> None:
    with crio("single-file", tmp_path) as cli:
        before = cli.engine.config.read_bytes()
        assert cli.data("configure-runtime", "--set-as-default")["active"]["default"] == "nvidia"
        assert cli.data("unconfigure-runtime")["active"]["default"] == "runc"
        assert cli.engine.config.read_bytes() == before and not drop_in(cli.engine).exists()


@pytest.mark.full
def test_operator_file_is_replaced_by_ours_with_all_its_handlers(tmp_path: Path) -> None:
    with crio("operator-conf", tmp_path) as cli:
        data = cli.data("configure-runtime")
        old = cli.engine.directory / "etc/crio.conf.d/99-nvidia.conf"
        assert {change["path"]: change["action"] for change in data["changes"]} == {
            str(old): "removed",
            str(drop_in(cli.engine)): "created",
        }
        assert {"nvidia", "nvidia-cdi", "nvidia-legacy"} <= set(shown_handlers(cli.engine))
        assert data["active"]["default"] == "nvidia"
        rolled = cli.run("rollback")
        assert rolled.returncode == 0, rolled.stderr
        assert old.exists() and not drop_in(cli.engine).exists()


def test_daemon_that_fails_to_restart_is_rolled_back(tmp_path: Path) -> None:
    """A monitor removed since the start: ``crio config`` doesn't search it, the start does."""
    with crio("single-file", tmp_path) as cli:
        before = cli.engine.config.read_bytes()
        conmon = cli.engine.directory / "programs/usr/libexec/crio/conmon"
        again, restart = cli.engine.restart_command, cli.state / "restart"
        restart.write_text(
            f"#!/bin/sh\n[ -e {cli.state}/once ] && exec {again}\ntouch {cli.state}/once\n"
            f"mv {conmon} {conmon}.away\n{again}; code=$?\nmv {conmon}.away {conmon}; exit $code\n"
        )
        restart.chmod(0o755)
        done = cli.run("configure-runtime", restart=str(restart))
        assert done.returncode == 4, done.stdout + done.stderr
        assert "invalid conmon path" in done.stderr and "runs with them" in done.stderr
        assert cli.engine.config.read_bytes() == before and not drop_in(cli.engine).exists()
        assert cli.engine.running


def test_missing_monitor_is_refused_before_any_write(tmp_path: Path) -> None:
    with crio("packaged", tmp_path) as cli:
        (cli.engine.directory / "programs/usr/libexec/crio/conmon").unlink()
        pid = cli.engine.pid
        done = cli.run("configure-runtime")
        assert done.returncode == 1 and "has no monitor" in done.stderr, done.stderr
        assert cli.engine.pid == pid and not drop_in(cli.engine).exists()


def test_file_that_crio_refuses_is_named_before_any_write(tmp_path: Path) -> None:
    with crio("packaged", tmp_path) as cli:
        broken = cli.engine.directory / "etc/crio.conf.d/50-site.conf"
        # a type that only CRI-O's own reader looks at
        broken.write_text('[crio.runtime]\nhooks_dir = "/usr/share/containers/oci/hooks.d"\n')
        pid = cli.engine.pid
        done = cli.run("configure-runtime")
        assert done.returncode == 1, done.stdout + done.stderr
        assert str(broken) in done.stderr and "nothing was written" in done.stderr
        assert cli.engine.pid == pid and not drop_in(cli.engine).exists()


def test_drop_in_that_crio_does_not_read_is_refused(tmp_path: Path) -> None:
    with crio("packaged", tmp_path) as cli:
        elsewhere = cli.engine.directory / "etc/conf.d/99-nvidia.toml"
        done = cli.run("configure-runtime", "--drop-in-config", str(elsewhere))
        assert done.returncode == 2 and f"not {elsewhere}" in done.stderr
        assert str(drop_in(cli.engine)) in done.stderr


@pytest.mark.full
@pytest.mark.parametrize("version", ["1.29.1", "1.37.0"])
def test_version_is_that_of_the_running_program(tmp_path: Path, version: str) -> None:
    with crio("packaged", tmp_path, version=version) as cli:
        assert cli.data("configure-runtime", "--dry-run")["engineVersion"] == version


def test_engine_is_found_by_its_process(tmp_path: Path) -> None:
    with crio("packaged", tmp_path) as cli:
        data = cli.data("configure-runtime", "--dry-run", "--runtime", "auto")
        assert data["engine"] == "crio" and f"process {cli.engine.pid}" in data["configSource"]


@pytest.mark.full
def test_unit_is_restarted_if_systemd_runs(tmp_path: Path) -> None:
    require("gcc")
    require_namespace()
    with start_crio("packaged") as engine:
        node = Node(engine, tmp_path)
        node.prepare()
        done = node.gpunode("configure-runtime")
        assert done.returncode == 0, done.stderr
        assert node.calls() == ["systemctl restart crio.service"]
        assert pod_problem(engine, "nvidia") == ""
        # the monitor of another handler ends the next start if it is missing, and the unit's log says so
        packaged = engine.directory / "etc/crio.conf.d/10-crio.conf"
        start, _, rest = packaged.read_text().partition("[crio.runtime.runtimes.runc]")
        packaged.write_text(f"{start}[crio.runtime.runtimes.runc]{rest.replace('conmon', 'absent')}")
        failed = node.gpunode("configure-runtime", "--set-as-default")
        # not 4: the daemon does not start with the old files either
        assert failed.returncode == 1 and "invalid conmon path" in failed.stderr
        assert "default_runtime" not in drop_in(engine).read_text()


@pytest.mark.full
def test_handler_uses_the_monitor_of_crios_own_handlers(tmp_path: Path) -> None:
    """nvidia-ctk leaves one without a monitor (toolkit issue 681); it gets that of CRI-O's own handlers."""
    with crio("nvidia-ctk", tmp_path) as cli:
        before = drop_in(cli.engine).read_text()
        assert "monitor_path" not in before
        cli.data("configure-runtime")
        conmon = cli.engine.directory / "programs/usr/libexec/crio/conmon"
        assert shown_handlers(cli.engine)["nvidia"]["monitor_path"] == str(conmon)
        assert set(before.splitlines()) <= set(drop_in(cli.engine).read_text().splitlines())
