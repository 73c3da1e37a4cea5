"""Which command restarts or reloads a daemon, also after a run that was killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpunode.errors import DaemonError, PreconditionError, UsageError
from gpunode.facts.daemons import Daemon
from gpunode.facts.processes import Process
from gpunode.host import Host
from gpunode.host.journal import Entry
from gpunode.runtime import find
from gpunode.runtime.engine import Request
from gpunode.runtime.restart import Restarter, engine_restart
from tests.runtime.test_apply import BEFORE, DAEMON, FakeEngine
from tests.silent import SilentProgress

DOCKERD = Process(40, ("dockerd",), 0.0)


def restarter(root: Path, unit: str, *, manager: str = "", process: Process | None = DOCKERD) -> Restarter:
    (root / "run/systemd/system").mkdir(parents=True)
    daemon = Daemon(
        "docker", None, (29,), "/d.json", "", "/d.sock", unit, ("dockerd",), process, manager=manager
    )
    return Restarter(Host(root, environ={}), daemon, lambda: daemon)


def test_snap_unit_is_restarted_and_its_dockerd_reloaded_by_a_signal(tmp_path: Path) -> None:
    snap = restarter(tmp_path, "snap.docker.dockerd.service", manager="snap")
    assert snap.shown("restart") == "systemctl restart snap.docker.dockerd.service"
    assert snap.shown("reload") == "kill -HUP 40"  # the unit has no ExecReload


def test_system_unit_is_restarted_and_reloaded(tmp_path: Path) -> None:
    system = restarter(tmp_path, "docker.service")
    commands = [system.shown(verb) for verb in ("restart", "reload")]
    assert commands == ["systemctl restart docker.service", "systemctl reload docker.service"]


@pytest.mark.parametrize("running", [True, False])
def test_user_unit_needs_the_users_systemd(tmp_path: Path, running: bool) -> None:
    runtime = tmp_path / "user"
    if running:
        (runtime / "systemd").mkdir(parents=True)
    daemon = Daemon(
        "docker", None, (29,), "/d.json", "", "/d.sock", "docker.service", (), DOCKERD, user="alice"
    )
    alone = Restarter(Host(environ={"XDG_RUNTIME_DIR": str(runtime)}), daemon, lambda: daemon)
    assert alone.shown("restart") == ("systemctl --user restart docker.service" if running else "")
    assert alone.shown("reload") == "kill -HUP 40"  # the unit's ExecReload would hit RootlessKit


def test_every_failure_names_the_log() -> None:
    daemon = Daemon("containerd", None, (2, 1), "/etc/containerd/config.toml", "test", "/none", None)
    host = Host()
    for found, said in ((daemon, "log of containerd"), (daemon._replace(log="/var/log/x"), "/var/log/x")):
        failing = Restarter(host, found, lambda: None, "false")
        with pytest.raises(DaemonError, match="failed with status 1") as caught:
            failing.perform("restart")
        assert said in caught.value.hint
    with pytest.raises(UsageError) as unbalanced:
        Restarter(host, daemon, lambda: daemon, "'").perform("restart")
    assert unbalanced.value.hint


def test_without_systemd_and_restart_command_it_is_refused_before_writing(tmp_path: Path) -> None:
    restarter = Restarter(Host(tmp_path), DAEMON, lambda: DAEMON)
    with pytest.raises(PreconditionError, match="must be restarted") as caught:
        restarter.require("restart")
    assert "--restart-command" in caught.value.hint


def test_systemd_restarts_the_unit_and_a_plain_process_reloads_by_signal(tmp_path: Path) -> None:
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    unit = Daemon("docker", None, (), "/c", "", "/s", "docker.service", (), Process(7, ("dockerd",), 0.0))
    assert Restarter(Host(tmp_path), unit, lambda: unit).shown("reload") == "systemctl reload docker.service"
    alone = Daemon("docker", None, (), "/c", "", "/s", None, (), Process(7, ("dockerd",), 0.0))
    assert Restarter(Host(tmp_path), alone, lambda: alone).shown("reload") == "kill -HUP 7"
    assert (
        Restarter(Host(tmp_path), alone, lambda: alone, "sv restart 'a b'").shown("restart")
        == "sv restart 'a b'"
    )


@pytest.mark.parametrize(
    ("named", "command"), [("/etc/docker/daemon.json", "sv restart docker"), ("/etc/crio/crio.conf", "mine")]
)
def test_restart_command_is_used_only_for_the_named_engine(
    monkeypatch: pytest.MonkeyPatch, named: str, command: str
) -> None:
    """A killed run of another engine is recovered with the command in its entry."""
    host = Host()
    crio = FakeEngine(host, DAEMON._replace(config_path=named), answers=[BEFORE])
    used: list[str] = []

    def engines(_host: Host, _request: Request) -> tuple[FakeEngine, ...]:
        return (crio,)

    def perform(self: Restarter, _verb: str) -> float:
        used.append(self.command)
        return 0.0

    monkeypatch.setattr(find, "engine", lambda *_: FakeEngine(host, DAEMON, answers=[BEFORE]))
    monkeypatch.setattr(find, "engines", engines)
    monkeypatch.setattr(Restarter, "perform", perform)
    manifest = {"state": "applied", "engine": "docker", "verb": "restart", "restartCommand": "mine"}
    request = Request(("docker",), restart_command="sv restart docker")
    engine_restart(host, SilentProgress(), request)(Entry.of("1", "/none", manifest))
    assert used == [command]


def test_engine_that_does_not_restart_after_a_recovery_is_an_error_with_a_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Host()
    monkeypatch.setattr(find, "engine", lambda *_: FakeEngine(host, DAEMON, answers=[BEFORE]))
    manifest = {"state": "applied", "engine": "docker", "verb": "restart", "restartCommand": "false"}
    with pytest.raises(DaemonError, match="docker could not be restarted: false failed") as caught:
        engine_restart(host, SilentProgress())(Entry.of("1", "/none", manifest))
    assert caught.value.hint.startswith("see why")
