"""`gpunode plugin serve --vendor amd` as a process, with sysfs trees."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from fixtures.amd import KFD, MI300X, MI300X_CPX, AmdMachine, amd_machine
from tests.plugin.kubelet_stub import KubeletStub
from tests.plugin.nodes import eventually
from tests.plugin.serving import Start, kubelet

GPU = "amd.com/gpu"
AMD = ("--vendor", "amd", "--rediscover-seconds", "0.2", "--health-hold-down", "0s")


@pytest.fixture
def node(short: Path) -> Iterator[tuple[Path, KubeletStub, Start]]:
    root = short / "r"
    root.mkdir()
    with kubelet(short, root) as (stub, start):
        yield root, stub, start


def test_eight_gpus_are_allocatable_with_their_device_nodes(node) -> None:
    root, stub, start = node
    machine = amd_machine(root, "mi300x")
    serving = start(*AMD)
    assert stub.wait_allocatable(GPU, 8, 60), serving.log()
    assert stub.numa_nodes(GPU) == {machine.address(index): index // 4 for index in range(8)}
    given = serving.allocate(GPU, [machine.address(1), machine.address(0)])
    assert [(one.host_path, one.container_path, one.permissions) for one in given.devices] == [
        (path, path, "rw")
        for path in (
            "/dev/kfd",
            *("/dev/dri/card2", "/dev/dri/renderD129", "/dev/dri/card1", "/dev/dri/renderD128"),
        )
    ]
    assert not given.envs and not given.mounts and not given.annotations and not given.cdi_devices
    with pytest.raises(grpc.RpcError) as refused:
        serving.allocate(GPU, ["0000:ff:00.0"])
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND
    assert serving.end() == 0
    assert "Traceback" not in serving.log()


def test_partitions_have_their_own_name_with_mixed(node) -> None:
    root, stub, start = node
    AmdMachine(root, [MI300X_CPX, MI300X], [-1, -1])
    serving = start(*AMD, "-resource_naming_strategy=mixed")
    assert stub.wait_allocatable("amd.com/cpx_nps4", 8, 60), serving.log()
    assert stub.wait_allocatable("amd.com/spx_nps1", 1, 30), serving.log()
    assert stub.numa_nodes("amd.com/cpx_nps4") == {}


def test_driver_loaded_later_is_waited_for(node) -> None:
    root, stub, start = node
    machine = amd_machine(root, "mi210", loaded=False)
    serving = start(*AMD)
    assert serving.says("waiting for the AMD GPUs: the amdgpu driver is not loaded")
    machine.load()
    assert stub.wait_allocatable(GPU, 8, 30), serving.log()


def test_only_the_failing_gpu_is_marked_and_recovers(node) -> None:
    root, stub, start = node
    machine = amd_machine(root, "mi300x")
    serving = start(*AMD, "--health-poll-interval", "1s")
    assert stub.wait_allocatable(GPU, 8, 60), serving.log()
    nodes = f"{KFD}/nodes/{machine.first_node(3)}"
    (root / nodes.lstrip("/")).rename(root / "kept")
    assert stub.wait_allocatable(GPU, 7, 30), serving.log()
    assert stub.unhealthy(GPU) == (machine.address(3),)
    with pytest.raises(grpc.RpcError, match="does not know this GPU"):
        serving.allocate(GPU, [machine.address(3)])
    (root / "kept").rename(root / nodes.lstrip("/"))
    assert stub.wait_allocatable(GPU, 8, 30), serving.log()


def test_repartitioned_gpu_is_advertised_with_its_new_partitions(node) -> None:
    root, stub, start = node
    AmdMachine(root, [MI300X, MI300X], [0, 1])
    serving = start(*AMD)
    assert stub.wait_allocatable(GPU, 2, 60), serving.log()
    registrations = len(stub.registrations)
    for path in ("/sys/module", "/sys/class/kfd", "/sys/devices"):
        (root / path.lstrip("/")).rename(root / f"old{path.count('/')}{path[-1]}")
    AmdMachine(root, [MI300X_CPX, MI300X_CPX], [0, 1])
    assert stub.wait_allocatable(GPU, 16, 60), serving.log()
    assert len(stub.registrations) == registrations


@pytest.mark.full
def test_uncorrectable_errors_mark_exactly_the_partitions_of_their_gpu(node) -> None:
    root, stub, start = node
    machine = AmdMachine(root, [MI300X_CPX, MI300X], [0, 1])
    staying = ("--health-hold-down", "1h", "--health-poll-interval", "1s")  # until it has been looked at
    serving = start(*AMD, *staying, "--resource-naming-strategy", "mixed")
    assert stub.wait_allocatable("amd.com/cpx_nps4", 8, 60), serving.log()
    assert stub.wait_allocatable("amd.com/spx_nps1", 1, 30), serving.log()
    machine.errors(0, 2)
    assert stub.wait_allocatable("amd.com/cpx_nps4", 0, 30), serving.log()
    assert eventually(lambda: stub.allocatable("amd.com/spx_nps1") == 1)
    machine.errors(1, 1)  # a change reaches every resource, not the first one's server alone
    assert stub.wait_allocatable("amd.com/spx_nps1", 0, 30), serving.log()


def test_xgmi_neighbours_are_preferred(node) -> None:
    root, stub, start = node
    machine = amd_machine(root, "mi210")
    serving = start(*AMD)
    assert stub.wait_allocatable(GPU, 8, 60), serving.log()
    one_hive = {machine.address(index) for index in (4, 5, 6, 7)}
    available = [machine.address(index) for index in (0, 1, 4, 5, 6, 7)]
    assert set(serving.prefer(GPU, available, 4)) == one_hive


def test_partitions_of_one_gpu_go_together_and_the_smallest_remainder_first(node) -> None:
    root, stub, start = node
    AmdMachine(root, [MI300X_CPX] * 3, [0, 0, 0])
    serving = start(*AMD)
    assert stub.wait_allocatable(GPU, 24, 60), serving.log()
    third = ["0000:49:00.0", "amdgpu_xcp_14", "amdgpu_xcp_15", "amdgpu_xcp_16"]
    available = [*(f"amdgpu_xcp_{number}" for number in range(2, 14)), *third]
    assert set(serving.prefer(GPU, available, 4)) == set(third)
    assert set(serving.prefer(GPU, available, 6)) <= {f"amdgpu_xcp_{number}" for number in range(7, 14)}
