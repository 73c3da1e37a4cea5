"""Which command restarts or reloads a daemon that isn't plainly the system's."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpunode.errors import DaemonError, UsageError
from gpunode.facts.daemons import Daemon
from gpunode.facts.processes import Process
from gpunode.host import Host
from gpunode.runtime.restart import Restarter

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
