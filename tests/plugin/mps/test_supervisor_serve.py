"""MPS as a user runs it: `gpunode plugin serve --mps` as a process.

NVML, nvidia-cuda-mps-control and the kubelet are stubs."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from fixtures.scenario import Fault, gpu_uuid, machine
from gpunode.plugin.mps.daemon import Identity
from gpunode.plugin.mps.daemon import start as start_daemon
from gpunode.plugin.mps.layout import DaemonSpec, prepare
from tests.plugin.kubelet_stub import KubeletStub
from tests.plugin.mps.conftest import MpsNode
from tests.plugin.nodes import MemoryLog, eventually, texts
from tests.plugin.serving import Serving, Start, kubelet

pytestmark = pytest.mark.full

RESOURCE = "nvidia.com/gpu"
EXCLUSIVE = 3


@pytest.fixture
def cluster(node: MpsNode) -> Iterator[tuple[KubeletStub, Start]]:
    with kubelet(node.place) as both:
        yield both


def serve(node: MpsNode, start: Start, config: str, *more: str) -> Serving:
    return start("--mps", "--mps-root", node.root, "--config-file", config, *more)


def pid_of(node: MpsNode, gpu: int) -> int:
    path = Path(f"{node.root}/{RESOURCE}/GPU-{gpu:08x}/daemon.json")
    return int(json.loads(path.read_text())["pid"])


def test_devices_are_healthy_while_their_daemon_runs(
    node: MpsNode, cluster: tuple[KubeletStub, Start]
) -> None:
    stub, start = cluster
    node.gpus.write(machine(8))
    node.mps.behave(deaf=True)
    serving = serve(node, start, node.config(4))
    assert eventually(lambda: stub.capacity(RESOURCE) == 32), serving.log()
    assert stub.allocatable(RESOURCE) == 0
    assert not Path(f"{node.root}/.ready").exists()
    node.mps.behave()
    assert stub.wait_allocatable(RESOURCE, 32, 60.0), serving.log()
    assert eventually(Path(f"{node.root}/.ready").exists)
    assert node.gpus.compute_modes() == {gpu_uuid(index): EXCLUSIVE for index in range(8)}
    assert {environ["CUDA_VISIBLE_DEVICES"] for environ in node.mps.environments()} == {
        gpu_uuid(index) for index in range(8)
    }
    assert node.mps.commands("/GPU-00000005/")[:2] == [
        "set_default_device_pinned_mem_limit 0 20389M",
        "set_default_active_thread_percentage 25",
    ]

    node.mps.behave(deaf=True)  # the next daemon does not respond: the loss lasts until it has been seen
    os.kill(pid_of(node, 3), signal.SIGKILL)
    assert stub.wait_allocatable(RESOURCE, 28, 30.0), serving.log()
    node.mps.behave()
    assert stub.wait_allocatable(RESOURCE, 32, 30.0), serving.log()

    given = stub.allocate(RESOURCE, 1)
    gpu = given.ids[0].partition("::")[0]
    assert given.envs["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    assert given.envs["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=20389M"
    pipe = f"/mps/{RESOURCE}/pipe"
    assert given.envs["CUDA_MPS_PIPE_DIRECTORY"] == pipe
    assert given.mounts[pipe][0] == f"{node.root}/{RESOURCE}/{gpu[:12]}/pipe"
    assert given.mounts["/dev/shm"][0] == f"{node.root}/shm"
    with pytest.raises(grpc.RpcError) as caught:
        stub.allocate(RESOURCE, 2)
    reason = str(caught.value.details())
    assert "maximum request size for shared resources is 1; found 2" in reason
    assert "set failRequestsGreaterThanOne to false in sharing.mps " in reason

    assert serving.end() == 0
    assert set(node.gpus.compute_modes().values()) == {0}
    assert sorted(path.name for path in Path(node.root).iterdir()) == [".lock", "shm"]
    assert "Traceback" not in serving.log()


def test_limits_grow_with_the_shares_of_a_container(
    node: MpsNode, cluster: tuple[KubeletStub, Start]
) -> None:
    stub, start = cluster
    node.gpus.write(machine(1))
    serving = serve(node, start, node.config(8, "failRequestsGreaterThanOne: false"))
    assert stub.wait_allocatable(RESOURCE, 8, 60.0), serving.log()
    given = stub.allocate(RESOURCE, 3)
    assert given.envs["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "37"
    assert given.envs["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=30584M"
    assert node.mps.commands() == []  # a limit of the daemon would hold for every container


def test_restarted_plugin_adopts_the_daemons_of_a_killed_one(
    node: MpsNode, cluster: tuple[KubeletStub, Start]
) -> None:
    stub, start = cluster
    config = node.config(4)
    first = serve(node, start, config)
    assert stub.wait_allocatable(RESOURCE, 16, 60.0), first.log()
    before = [pid_of(node, gpu) for gpu in range(4)]
    first.process.kill()
    first.process.wait()
    second = serve(node, start, config)
    assert second.says("using the MPS control daemon that already runs"), second.log()
    assert stub.wait_allocatable(RESOURCE, 16, 60.0), second.log()
    assert [pid_of(node, gpu) for gpu in range(4)] == before
    assert second.end() == 0
    assert node.gpus.compute_modes() == {gpu_uuid(index): 0 for index in range(4)}
    assert [Identity.of(node.host, process, ()) for process in before] == [None] * 4


def test_leftovers_of_a_killed_plugin_are_removed_if_mps_is_disabled(
    node: MpsNode, cluster: tuple[KubeletStub, Start]
) -> None:
    stub, start = cluster
    first = serve(node, start, node.config(4))
    assert stub.wait_allocatable(RESOURCE, 16, 60.0), first.log()
    first.process.kill()
    first.process.wait()
    second = start("--mps", "--mps-root", node.root)
    assert stub.wait_allocatable(RESOURCE, 4, 60.0), second.log()
    assert eventually(lambda: set(node.gpus.compute_modes().values()) == {0}), second.log()
    assert eventually(lambda: not Path(f"{node.root}/nvidia.com").exists())
    assert "CUDA_MPS_PIPE_DIRECTORY" not in stub.allocate(RESOURCE, 1).envs


def test_mps_is_disabled_and_enabled_in_the_config_file(
    node: MpsNode, cluster: tuple[KubeletStub, Start]
) -> None:
    stub, start = cluster
    config = node.config(4)
    serving = serve(node, start, config)
    assert stub.wait_allocatable(RESOURCE, 16, 60.0), serving.log()
    Path(config).write_text("version: v1\n")
    serving.process.send_signal(signal.SIGHUP)
    assert stub.wait_allocatable(RESOURCE, 4, 30.0), serving.log()
    assert eventually(lambda: set(node.gpus.compute_modes().values()) == {0}), serving.log()
    node.config(2)
    serving.process.send_signal(signal.SIGHUP)
    assert stub.wait_allocatable(RESOURCE, 8, 30.0), serving.log()
    assert set(node.gpus.compute_modes().values()) == {EXCLUSIVE}


def test_two_plugins_with_the_same_daemons(node: MpsNode, cluster: tuple[KubeletStub, Start]) -> None:
    stub, start = cluster
    node.host.make_dirs(node.root)
    with node.host.lock(f"{node.root}/.lock", 0.0):
        serving = serve(node, start, node.config(4))
        assert serving.says("another process keeps the MPS daemons")
        assert eventually(lambda: stub.capacity(RESOURCE) == 16)
        assert stub.allocatable(RESOURCE) == 0
    assert stub.wait_allocatable(RESOURCE, 16, 60.0), serving.log()


def test_plugin_without_daemons_waits_for_those_of_another_service(
    node: MpsNode, cluster: tuple[KubeletStub, Start]
) -> None:
    """As beside NVIDIA's MPS control daemon: one daemon for a resource, in its layout."""
    stub, start = cluster
    serving = start("--mps-root", node.root, "--config-file", node.config(4))
    assert eventually(lambda: stub.capacity(RESOURCE) == 16), serving.log()
    assert serving.says("no MPS control daemon answers at")
    assert stub.allocatable(RESOURCE) == 0
    uuids = tuple(gpu_uuid(index) for index in range(4))
    spec = DaemonSpec(RESOURCE, uuids, f"{node.root}/{RESOURCE}")
    prepare(node.host, spec, node.root, MemoryLog())
    daemon = start_daemon(node.host, str(node.mps.program), spec)
    try:
        assert stub.wait_allocatable(RESOURCE, 16, 60.0), serving.log()
        given = stub.allocate(RESOURCE, 1)
        assert given.mounts[f"/mps/{RESOURCE}/pipe"][0] == f"{node.root}/{RESOURCE}/pipe"
        assert given.envs["CUDA_VISIBLE_DEVICES"] in uuids
    finally:
        daemon.signal("TERM")
        assert eventually(lambda: daemon.ended() is not None)


def test_plugin_waits_for_the_driver_and_applies_an_edited_file(
    node: MpsNode, cluster: tuple[KubeletStub, Start]
) -> None:
    stub, start = cluster
    node.gpus.write(machine(4).with_faults(Fault("nvmlInitWithFlags", 9)))
    serving = serve(node, start, node.config(4, "failRequestsGreaterThanOne: true"))
    assert serving.says("waiting")
    node.gpus.write(machine(4))
    serving.process.send_signal(signal.SIGHUP)  # polls at once
    assert stub.wait_allocatable(RESOURCE, 16, 60.0), serving.log()
    node.config(10, "failRequestsGreaterThanOne: true")
    serving.process.send_signal(signal.SIGHUP)
    assert eventually(lambda: "set_default_active_thread_percentage 10" in node.mps.commands())
    assert len(node.mps.environments()) == 4


def test_no_mps_process_runs_without_shared_gpus(node: MpsNode, cluster: tuple[KubeletStub, Start]) -> None:
    stub, start = cluster
    serving = start()
    assert stub.wait_allocatable(RESOURCE, 4, 60.0), serving.log()
    names = texts(Path(f"/proc/{serving.process.pid}/task").glob("*/comm"))
    assert not any(name.startswith("mps") for name in names)
    assert node.mps.environments() == []
    assert node.gpus.compute_modes() == {}
    assert not Path(node.root).exists()
