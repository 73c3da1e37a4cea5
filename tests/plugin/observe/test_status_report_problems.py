"""Problems as `plugin status` prints them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures.machines import recorded_host
from gpunode.commands.plugin_status import troubles
from gpunode.plugin.model import LeftOut
from gpunode.plugin.observe.status_file import OwnStatus
from gpunode.plugin.observe.status_report import DeviceProblem, Known, UnitStatus, make_report
from tests.cli import gpunode

SINCE = "2026-05-01T13:37:00Z"


def unit(index: str, problem: DeviceProblem | None, resource: str = "nvidia.com/gpu") -> UnitStatus:
    health = "unhealthy" if problem else "healthy"
    return UnitStatus(resource, f"GPU-{index}", f"GPU-{index}", index, "T4", "", 1, 0, health, problem)


def test_cause_shared_by_gpus_is_printed_once_and_others_separately() -> None:
    gone, fell = (
        DeviceProblem("driver", "the driver is not loaded", SINCE),
        DeviceProblem("xid-79", "XID 79", SINCE),
    )
    units = (
        unit("0", gone),
        unit("1", fell),
        unit("2", gone),
        unit("3", None),
        unit("2", gone, "other.com/a"),
    )
    indices = {problem: [one.index for one in shared] for (problem, _), shared in troubles(units).items()}
    assert indices == {gone: ["0", "2"], fell: ["1"]}


@pytest.mark.parametrize(("state", "reported"), [("serving", True), ("ended", False), ("gone", False)])
def test_reasons_of_a_plugin_that_no_longer_runs_are_not_reported(state: str, reported: bool) -> None:
    left_out = LeftOut("2", "GPU-2", "no include pattern matches")
    own = OwnStatus(state, "0.1.0", 1, 0.0, 0.0, 0.0, True, "", "", {}, (), (left_out,))
    assert make_report(Known(own)).left_out == ((left_out,) if reported else ())


def test_gpus_are_unknown_where_the_kubelet_was_not_queried(tmp_path: Path) -> None:
    reason = f"pods: no socket is contacted under --root {recorded_host('healthy-h100', tmp_path).root}"
    ran = gpunode("plugin", "status", "--root", str(tmp_path))
    assert ran.out.count(" unknown ") == 8 and "not advertised" not in ran.out
    assert ran.out.splitlines()[-1] == reason
    units = gpunode("plugin", "status", "--root", str(tmp_path), "-o", "json").document["data"]["units"]
    assert {(one["health"], one["allocatable"]) for one in units} == {("unknown", None)}
    empty = gpunode("plugin", "status", "--no-nvml", "--root", str(tmp_path)).out
    assert reason in empty and "no GPU resource is registered" not in empty
