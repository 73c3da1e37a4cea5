"""Units whose last run failed: the finding quotes the log, and its fix prints the log first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fixtures.machines import machine
from gpunode.checks.catalogue import BY_ID
from gpunode.checks.model import Verdict
from gpunode.commands.demo import build_machine
from gpunode.facts.node import Node
from gpunode.host import Host

UNIT = "Id={}\nLoadState=loaded\nActiveState={}\nSubState=x\nUnitFileState=enabled\nResult={}\n"
ROCKY, INFINIBAND = "healthy-docker-rocky9", "peermem-wanted-and-not-loaded"
MODULES = "systemd-modules-load.service"


def judged(root: Path, identifier: str, spec: Any, unit: str, active: str = "failed") -> Verdict:
    """The check's verdict where `unit` is in this state and its processes logged one line."""
    result = "success" if active == "inactive" else "exit-code"
    commands = spec["recording"].setdefault("commands", {})
    commands[f"systemctl show {unit}"] = {"stdout": UNIT.format(unit, active, result)}
    log = f"journalctl -b -q -n 1 --no-pager -o cat _SYSTEMD_UNIT={unit}"
    commands[log] = {"stdout": "bad setting: why\n"}
    return BY_ID[identifier].run(Node(Host(build_machine(spec, root), environ={})))


@pytest.mark.parametrize(
    ("identifier", "name", "unit", "command"),
    [
        ("cdi-refresh-inactive", ROCKY, "nvidia-cdi-refresh.service", "systemctl restart {}"),
        ("clock-skew", "time-service-failed", "chronyd.service", "systemctl restart {}"),
        ("peermem", INFINIBAND, MODULES, "modprobe nvidia-peermem"),
    ],
)
def test_fix_for_a_failed_unit_prints_its_log_first(
    tmp_path: Path, identifier: str, name: str, unit: str, command: str
) -> None:
    verdict = judged(tmp_path, identifier, machine(name), unit)
    assert verdict.status.value == "warn" and verdict.fix is not None
    shown = f"journalctl -b -u {unit} -n 30 --no-pager && {command.format(unit)}"
    assert verdict.fix.command == shown
    assert [one.value for one in verdict.evidence if one.source == f"journalctl -u {unit}"] == [
        "bad setting: why"
    ]


def test_module_without_a_failed_unit_is_loaded_at_once(tmp_path: Path) -> None:
    verdict = judged(tmp_path, "peermem", machine(INFINIBAND), MODULES, active="inactive")
    assert (verdict.status.value, verdict.fix) == ("warn", None)
    assert BY_ID["peermem"].fix_for("other").command == "modprobe nvidia-peermem"


@pytest.mark.parametrize(
    ("active", "status"), [("failed", "fail"), ("activating", "fail"), ("inactive", "skip")]
)
def test_docker_that_failed_behind_its_socket_is_reported(tmp_path: Path, active: str, status: str) -> None:
    spec: Any = machine(ROCKY)
    for path in [one for one in spec["files"] if one.startswith("/proc/1210/")]:
        del spec["files"][path]
    del spec["recording"]["daemons"]["/run/docker.sock"]
    spec["files"]["/proc/net/unix"] = (
        "Num       RefCount Protocol Flags    Type St Inode Path\n"
        "0000000000000000: 00000002 00000000 00010000 0001 01 21547 /run/docker.sock\n"
    )
    verdict = judged(tmp_path, "docker-not-running", spec, "docker.service", active)
    assert verdict.status.value == status
    if status == "fail":
        assert [one.value for one in verdict.evidence][1:] == ["bad setting: why"]
        assert verdict.fix is not None
        assert verdict.fix.command == (
            "journalctl -b -u docker.service -n 30 --no-pager && systemctl restart docker"
        )
