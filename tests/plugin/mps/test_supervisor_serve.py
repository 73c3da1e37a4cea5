"""MPS as a user meets it: `gpunode plugin serve --mps` and `gpunode mps serve` as processes.

NVML, nvidia-cuda-mps-control and the kubelet are stand-ins."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.scenario import Fault, gpu_uuid, machine
from gpunode.plugin.mps.daemon import Identity
from gpunode.plugin.simulate.kubelet import KubeletStub
from tests.plugin.mps.conftest import MpsNode
from tests.plugin.nodes import eventually, texts
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


def test_devices_are_healthy_while_their_daemon_is_up(
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

    node.mps.behave(deaf=True)  # the next daemon does not answer: the loss lasts until it has been seen
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


def test_who_comes_after_a_killed_plugin_goes_on_with_its_daemons(
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
    assert second.says("goes on with the MPS control daemon that was there"), second.log()
    assert stub.wait_allocatable(RESOURCE, 16, 60.0), second.log()
    assert [pid_of(node, gpu) for gpu in range(4)] == before
    assert second.end() == 0
    assert node.gpus.compute_modes() == {gpu_uuid(index): 0 for index in range(4)}
    assert [Identity.of(node.host, process, ()) for process in before] == [None] * 4


def test_what_a_killed_plugin_left_goes_when_mps_is_switched_off(
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


def test_switching_mps_off_and_on_in_the_config_file(
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


def test_two_that_keep_the_same_daemons(node: MpsNode, cluster: tuple[KubeletStub, Start]) -> None:
    stub, start = cluster
    config = node.config(4)
    with mps(node, "--config-file", config, "--mps-root", node.root) as keeper:
        assert keeper.says("MPS control daemon is up")
        serving = serve(node, start, config)
        assert serving.says("another process keeps the MPS daemons")
        assert eventually(lambda: stub.capacity(RESOURCE) == 16)
        assert stub.allocatable(RESOURCE) == 0
    assert stub.wait_allocatable(RESOURCE, 16, 60.0), serving.log()


class Mps:
    """`gpunode mps serve` as a process; it has ended when the block has."""

    def __init__(self, node: MpsNode, *given: str) -> None:
        self._log = node.place / "mps.log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gpunode", "mps", "serve", "-o", "json", *given],
                stderr=log,
                stdout=subprocess.PIPE,
                text=True,
            )

    def __enter__(self) -> Mps:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def log(self) -> str:
        return self._log.read_text()

    def says(self, words: str, seconds: float = 30.0) -> bool:
        return eventually(lambda: words in self.log(), seconds)

    def end(self) -> tuple[int, str]:
        """Exit status and what it printed."""
        if self.process.stdout is None or self.process.stdout.closed:
            return self.process.returncode, ""
        self.process.terminate()
        try:
            out, _ = self.process.communicate(timeout=30.0)
        finally:
            self.process.kill()
            self.process.wait()
        return self.process.returncode, out


def mps(node: MpsNode, *given: str) -> Mps:
    return Mps(node, *given)


def test_daemons_alone_serve_a_plugin_that_keeps_none(
    node: MpsNode, cluster: tuple[KubeletStub, Start]
) -> None:
    """As beside NVIDIA's plugin: one daemon for a resource, in its layout, with its limits."""
    stub, start = cluster
    config = node.config(4)
    serving = start("--mps-root", node.root, "--config-file", config)
    assert eventually(lambda: stub.capacity(RESOURCE) == 16), serving.log()
    assert serving.says("no MPS control daemon answers at")
    assert stub.allocatable(RESOURCE) == 0
    with mps(node, "--config-file", config, "--mps-root", node.root) as keeper:
        assert keeper.says("MPS control daemon is up")
        assert stub.wait_allocatable(RESOURCE, 16, 60.0), serving.log()
        assert eventually(Path(f"{node.root}/.ready").exists)
        assert Path(f"{node.root}/{RESOURCE}/.started").exists()
        (environ,) = node.mps.environments()
        uuids = [gpu_uuid(index) for index in range(4)]
        assert environ["CUDA_VISIBLE_DEVICES"] == ",".join(uuids)
        assert environ["CUDA_MPS_PIPE_DIRECTORY"] == f"{node.root}/{RESOURCE}/pipe"
        assert node.mps.commands() == [
            *(f"set_default_device_pinned_mem_limit {index} 20389M" for index in range(4)),
            "set_default_active_thread_percentage 25",
        ]
        given = stub.allocate(RESOURCE, 1)
        assert given.mounts[f"/mps/{RESOURCE}/pipe"][0] == f"{node.root}/{RESOURCE}/pipe"
        assert given.envs["CUDA_VISIBLE_DEVICES"] in uuids
        code, out = keeper.end()
    assert code == 0, keeper.log()
    (told,) = json.loads(out)["data"]["daemons"]
    assert told == {
        **{"resource": RESOURCE, "gpus": uuids, "pipe": f"{node.root}/{RESOURCE}/pipe", "problem": ""},
    }
    assert not Path(f"{node.root}/.ready").exists()
    assert set(node.gpus.compute_modes().values()) == {0}


def test_mps_serve_for_one_resource_without_limits(node: MpsNode) -> None:
    config = node.config(4)
    with mps(node, "--config-file", config, "--mps-root", node.root, "--container-limits") as keeper:
        assert keeper.says("MPS control daemon is up")
        assert node.mps.commands() == []
    with mps(node, "--config-file", config, "--mps-root", node.root, "--resource", "nvidia.com/b") as keeper:
        assert eventually(Path(f"{node.root}/.ready").exists), keeper.log()
        assert len(node.mps.environments()) == 1


def test_mps_serve_names_what_is_wrong_with_the_config_file(node: MpsNode) -> None:
    path = Path(node.config(4))
    path.write_text(path.read_text().replace("replicas", "replica"))
    with mps(node, "--config-file", str(path)) as keeper:
        out, _ = keeper.process.communicate(timeout=30.0)
        assert keeper.process.returncode == 1
    (error, *_) = json.loads(out)["errors"]
    assert "replica" in error["message"]


def test_mps_serve_starts_nothing_under_another_root(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gpunode", "--root", str(tmp_path), "mps", "serve"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30.0, check=False)
    assert done.returncode == 3
    assert "no daemon runs under --root" in done.stderr


def test_mps_serve_waits_for_the_driver_and_takes_an_edited_file(node: MpsNode) -> None:
    config = node.config(4)
    node.gpus.write(machine(4).with_faults(Fault("nvmlInitWithFlags", 9)))
    with mps(node, "--config-file", config, "--mps-root", node.root) as keeper:
        assert keeper.says("waiting for the NVIDIA driver")
        node.gpus.write(machine(4))
        keeper.process.send_signal(signal.SIGHUP)  # looks at once
        assert keeper.says("MPS control daemon is up")
        node.config(10)
        keeper.process.send_signal(signal.SIGHUP)
        assert eventually(lambda: "set_default_active_thread_percentage 10" in node.mps.commands())
        assert len(node.mps.environments()) == 1


def test_nothing_of_mps_runs_where_nothing_is_shared(
    node: MpsNode, cluster: tuple[KubeletStub, Start]
) -> None:
    stub, start = cluster
    serving = start()
    assert stub.wait_allocatable(RESOURCE, 4, 60.0), serving.log()
    names = texts(Path(f"/proc/{serving.process.pid}/task").glob("*/comm"))
    assert not any(name.startswith("mps") for name in names)
    assert node.mps.environments() == []
    assert node.gpus.compute_modes() == {}
    assert not Path(node.root).exists()
