"""Resources of AMD GPUs, and the devices of a container."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.amd import MI210, MI300X, MI300X_CPX, AmdMachine, amd_machine
from gpunode.gpu.amd import read_inventory
from gpunode.gpu.model import Inventory, Topology
from gpunode.host import Host
from gpunode.plugin.amd import AmdBackend, plan
from gpunode.plugin.config.settings import NameRule, Settings, SharedResource, Sharing
from gpunode.plugin.model import (
    AllocationError,
    KubeletDevice,
    Problem,
    ResourcePlan,
    Snapshot,
    complete_inventory,
)
from gpunode.plugin.placement import prefer
from tests.plugin.nodes import MemoryLog

AMD = Settings(vendor="amd")
MIXED = replace(AMD, resource_naming_strategy="mixed")


def inventory(root: Path) -> Inventory:
    return read_inventory(Host(root, {}))


def counts(made: ResourcePlan) -> dict[str, int]:
    return {resource.name: len(resource.devices) for resource in made.resources}


@pytest.mark.parametrize(
    ("boards", "settings", "want"),
    [
        ([MI300X] * 8, AMD, {"amd.com/gpu": 8}),
        ([MI300X] * 8, MIXED, {"amd.com/spx_nps1": 8}),
        ([MI300X_CPX] * 2, AMD, {"amd.com/gpu": 16}),
        ([MI300X_CPX] * 2, MIXED, {"amd.com/cpx_nps4": 16}),
        ([MI210] * 4, MIXED, {"amd.com/gpu": 4}),
        ([MI300X, MI300X_CPX], MIXED, {"amd.com/spx_nps1": 1, "amd.com/cpx_nps4": 8}),
        ([MI300X, MI300X, MI300X_CPX], AMD, {"amd.com/gpu": 2}),
        ([MI300X, MI300X_CPX, MI210], AMD, {"amd.com/gpu": 2}),
        ([MI210] * 2, replace(AMD, resource_name="example.com/mi210"), {"example.com/mi210": 2}),
    ],
)
def test_naming_strategies(tmp_path: Path, boards, settings: Settings, want: dict[str, int]) -> None:
    AmdMachine(tmp_path, boards, [0] * len(boards))
    assert counts(plan(settings, inventory(tmp_path))) == want


def test_mixed_layouts_under_one_name_leave_out_the_minority_with_a_reason(tmp_path: Path) -> None:
    AmdMachine(tmp_path, [MI300X_CPX, MI300X, MI300X], [0, 0, 0])
    made = plan(AMD, inventory(tmp_path))
    assert Counter(one.index.partition(":")[0] for one in made.left_out) == {"0": 8}
    assert "means spx_nps1 here, this is cpx_nps4; mixed gives each" in made.left_out[0].reason


def test_selection_rules_and_shares_work_as_for_nvidia(tmp_path: Path) -> None:
    amd_machine(tmp_path, "desktop")
    settings = replace(
        AMD,
        exclude=("AMD GPU 164e",),
        rules=(NameRule("gpu", "*7900*", "amd.com/radeon"),),
        sharing=Sharing("time-slicing", (SharedResource("amd.com/radeon", 3),)),
    )
    made = plan(settings, inventory(tmp_path))
    assert counts(made) == {"amd.com/radeon": 3}
    assert [one.reason for one in made.left_out] == ["exclude names it"]
    idle = replace(settings, rules=(*settings.rules, NameRule("gpu", "MI210", "amd.com/mi210")))
    assert (
        "MI210: no model here is called so; there is AMD Radeon"
        in plan(idle, inventory(tmp_path)).warnings[0]
    )
    mps = replace(settings, sharing=Sharing("mps", (SharedResource("amd.com/radeon", 3),)))
    assert "MPS is NVIDIA's" in plan(mps, inventory(tmp_path)).left_out[-1].reason


def test_unknown_gpu_is_left_out_and_a_known_one_is_kept(tmp_path: Path) -> None:
    machine = AmdMachine(tmp_path, [MI300X_CPX] * 2, [0, 1])
    whole = inventory(tmp_path)
    machine.remove(f"/sys/class/kfd/kfd/topology/nodes/{machine.first_node(1)}")
    assert counts(plan(AMD, inventory(tmp_path))) == {"amd.com/gpu": 8}
    assert counts(plan(AMD, complete_inventory(inventory(tmp_path), whole))) == {"amd.com/gpu": 16}


def answering(root: Path, settings: Settings = AMD) -> tuple[AmdBackend, Snapshot]:
    backend = AmdBackend(Host(root, {}), settings, MemoryLog())
    return backend, Snapshot(1, backend.plan(settings, inventory(root)).resources[0])


def test_container_gets_kfd_once_and_the_dri_nodes_of_its_devices(tmp_path: Path) -> None:
    AmdMachine(tmp_path, [MI300X_CPX], [0])
    backend, snapshot = answering(tmp_path)
    answer = backend.answer(AMD, snapshot, ["amdgpu_xcp_1", "0000:05:00.0"])
    assert [node.host for node in answer.nodes] == [
        "/dev/kfd",
        *("/dev/dri/card3", "/dev/dri/renderD130", "/dev/dri/card1", "/dev/dri/renderD128"),
    ]
    assert {(node.host == node.container, node.permissions) for node in answer.nodes} == {(True, "rw")}
    assert (answer.envs, answer.mounts, answer.annotations, answer.cdi) == ({}, (), {}, ())


def test_two_shares_of_a_gpu_add_its_nodes_once(tmp_path: Path) -> None:
    AmdMachine(tmp_path, [MI210], [0])
    settings = replace(AMD, sharing=Sharing("time-slicing", (SharedResource("amd.com/gpu", 4),)))
    backend, snapshot = answering(tmp_path, settings)
    answer = backend.answer(settings, snapshot, ["0000:05:00.0::0", "0000:05:00.0::3"])
    assert [node.host for node in answer.nodes] == ["/dev/kfd", "/dev/dri/card1", "/dev/dri/renderD128"]


def test_unknown_or_unhealthy_device_is_refused(tmp_path: Path) -> None:
    AmdMachine(tmp_path, [MI210] * 2, [0, 0])
    backend, snapshot = answering(tmp_path)
    with pytest.raises(AllocationError, match="unknown device 'nonsense'"):
        backend.answer(AMD, snapshot, ["nonsense"])
    with pytest.raises(AllocationError, match="names no device"):
        backend.answer(AMD, snapshot, [])
    sick = KubeletDevice(
        snapshot.devices[0].id, snapshot.devices[0].unit, Problem("ecc", "two errors", mend="reset")
    )
    ill = Snapshot(2, replace(snapshot.resource, devices=(sick, *snapshot.devices[1:])))
    with pytest.raises(
        AllocationError, match="two errors; drain the node, then amd-smi reset --gpureset -g 0"
    ) as caught:
        backend.answer(AMD, ill, [sick.id])
    assert caught.value.code == "unhealthy"


def test_unknown_id_causes_no_error_in_placement(tmp_path: Path) -> None:
    AmdMachine(tmp_path, [MI210] * 2, [0, 0])
    _, snapshot = answering(tmp_path)
    chosen = prefer(AMD, snapshot, Topology(), ["x", "0000:05:00.0"], ["y"], 2)
    assert len(chosen) <= 2
