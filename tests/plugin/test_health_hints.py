"""Hints for users, and the places where they are printed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpunode.gpu.model import Topology
from gpunode.gpu.nvml import GpuEvent
from gpunode.host import Host
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.health import HealthChecker
from gpunode.plugin.ledger import Ledger
from gpunode.plugin.model import Problem, how_to_fix
from gpunode.plugin.nvidia.backend import NvidiaBackend
from tests.plugin.nodes import MemoryLog, inventory, recorded_host, uuid


@pytest.mark.parametrize(
    ("mend", "gpu", "index", "expected"),
    [
        ("reset", "GPU-1", "1:4", "nvidia-smi --gpu-reset -i 1"),
        ("reset", "GPU-1", "1:4", "kill -USR1 77 (closes NVML for 2 min)"),
        ("reset", "0000:03:00.0", "1", "drain the node, then amd-smi reset --gpureset -g 1"),
        ("reboot", "GPU-1", "1", "reboot the node"),
        ("replace", "GPU-1", "1", "replaced"),
    ],
)
def test_hint_is_a_command_if_there_is_one(mend: str, gpu: str, index: str, expected: str) -> None:
    assert expected in how_to_fix(mend, gpu, index, 77)


def test_self_clearing_problem_has_no_hint() -> None:
    assert how_to_fix("", "GPU-1", "1", 77) == ""
    assert "USR1" not in how_to_fix("reset", "GPU-1", "1")


class Starting:
    """A process that becomes ready on request."""

    problem_now: Problem | None = Problem("mps", "not up yet", starting=True)

    def problem(self, resource: object, unit: object) -> Problem | None:
        return self.problem_now


def test_hint_is_logged_and_a_normal_start_logs_no_error(tmp_path: Path) -> None:
    host: Host = recorded_host(tmp_path, 2)
    log = MemoryLog()
    settings = Settings()
    ledger = Ledger(
        NvidiaBackend(host, settings, log), settings, HealthChecker(settings.health, log), log, lambda: 1e9
    )
    starting = Starting()
    ledger.vetoes.append(starting)
    ledger.seen(inventory(2), Topology())
    assert log.messages("error") == []
    assert log.messages("info").count("GPU is not ready yet") == 2
    starting.problem_now = None
    ledger.tick()
    assert log.messages("info").count("GPU is ready") == 2
    ledger.event(GpuEvent("xid", uuid(1), 119))
    (fields,) = [fields for level, _, fields in log.lines if level == "error"]
    assert fields["mend"] == "reset"
    assert f"kill -USR1 {os.getpid()} " in str(fields["hint"])
