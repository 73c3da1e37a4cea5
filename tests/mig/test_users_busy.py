"""Blocking processes, from /proc and NVML's lists: only users of removed instances, each by its name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gpunode.commands.mig_plan import remarks
from gpunode.daemons.pod_resources import Holding
from gpunode.errors import DaemonError, UsageError
from gpunode.facts.node import Node
from gpunode.host import Host
from gpunode.host.process import Completed
from gpunode.mig.config import DesiredLayout
from gpunode.mig.model import GpuLayout
from gpunode.mig.plan import plan_gpu
from gpunode.mig.session import MigProcess
from gpunode.mig.users import GpusInUseError, Obstacle, bring_back, drain, obstacles, untold
from tests.files import write
from tests.mig.test_placement import board, instance
from tests.silent import SilentProgress

CAPS = """\
config 1
monitor 2
gpu3/gi1/access 30
gpu3/gi1/ci0/access 31
gpu3/gi2/access 39
gpu3/gi2/ci0/access 40
"""
CONTAINER = "4" * 64


class Machine:
    """A tree with processes that have files open."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.put("proc/stat", "btime 1000\n")
        self.put("proc/driver/nvidia-caps/mig-minors", CAPS)

    def put(self, path: str, text: str) -> None:
        write(self.root, path, text)

    def process(self, pid: int, name: str, *files: str, cgroup: str = "/") -> None:
        self.put(f"proc/{pid}/cmdline", f"/usr/bin/{name}\0-x\0")
        self.put(f"proc/{pid}/stat", f"{pid} ({name}) S " + " ".join(["1"] * 40))
        self.put(f"proc/{pid}/cgroup", f"0::{cgroup}\n")
        for number, file in enumerate(files):
            link = self.root / f"proc/{pid}/fd/{number}"
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(file)

    def ask(
        self, gpu: GpuLayout, wish: DesiredLayout, *processes: MigProcess, ours: int = 0
    ) -> tuple[Obstacle, ...]:
        node = Node(Host(root=self.root))
        return obstacles(node, [plan_gpu(wish)], {gpu.uuid: processes}, frozenset({ours}))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def gpu_of(name: str, *, architecture: int = 9, cut: bool = True, on: bool = True) -> GpuLayout:
    bare = board(name)
    instances = (instance(bare, 1, "3g.40gb", 0), instance(bare, 2, "3g.40gb", 4)) if cut else ()
    return replace(bare, minor=3, architecture=architecture, instances=instances, current=on, pending=on)


def test_only_processes_using_removed_instances_are_listed(machine: Machine) -> None:
    gpu = gpu_of("h100")
    machine.process(
        41, "train", "/dev/nvidia3", "/dev/nvidia-caps/nvidia-cap30", "/dev/nvidia-caps/nvidia-cap31"
    )
    machine.process(
        42, "serve", "/dev/nvidia3", "/dev/nvidia-caps/nvidia-cap39", "/dev/nvidia-caps/nvidia-cap40"
    )
    machine.process(43, "nvidia-persistenced", "/dev/nvidia3")
    machine.process(44, "other", "/dev/nvidia1", "/etc/hosts")
    # 4g at slot 0 displaces the instance there
    (found,) = machine.ask(gpu, DesiredLayout(gpu, True, {"4g.40gb": 1, "3g.40gb": 1}, 1))
    assert (found.name, found.pid) == ("train", 41)
    assert found.text == "train (process 41) uses the 3g.40gb at 0:4 of GPU 0"
    assert found.drain == "41"


def test_processes_listed_by_nvml_count_as_well(machine: Machine) -> None:
    gpu = gpu_of("h100")
    machine.process(41, "train")
    wish = DesiredLayout(gpu, True, {"1g.10gb": 7}, 1)
    found = machine.ask(gpu, wish, MigProcess(41, 1, 0), MigProcess(77, 2, 0), MigProcess(9, 2, 0), ours=9)
    assert [(one.pid, one.name) for one in found] == [(41, "train"), (77, "a process")]


def test_process_names_cannot_inject_lines_or_commands(machine: Machine) -> None:
    machine.process(41, "x\nerror:reboot")
    gpu = gpu_of("h100")
    (found,) = machine.ask(gpu, DesiredLayout(gpu, True, {"1g.10gb": 7}, 1), MigProcess(41, 1, 0))
    assert found.text.startswith("x error:reboot (process 41) uses")
    pod = Obstacle("pod", 0, "GPU 0", "default/a;reboot")
    unit = Obstacle("unit", 0, "GPU 0", "x", unit="a b.service")
    rootless = Obstacle("process", 0, "GPU 0", "train", 43, container="0123456789abcdef")
    assert GpusInUseError([rootless]).hint == "end first: train (process 43)"
    stop, end = GpusInUseError([pod, unit]).hint.split("; ", 1)
    assert stop == "stop them with: --drain 'a b.service'"
    assert end == "end first: kubectl delete pod -n default 'a;reboot'"


def test_containers_and_units_are_named(machine: Machine) -> None:
    gpu = gpu_of("h100")
    cap = "/dev/nvidia-caps/nvidia-cap31"
    machine.process(41, "train", cap, cgroup=f"/system.slice/docker-{CONTAINER}.scope")
    machine.process(42, "jupyter", cap, cgroup="/system.slice/jupyter.service")
    machine.process(43, "serve", cap, cgroup=f"/machine.slice/libpod-{CONTAINER}.scope/container")
    rootless = f"/user.slice/user-1000.slice/user@1000.service/app.slice/docker-{CONTAINER}.scope"
    machine.process(44, "mine", cap, cgroup=rootless)
    machine.process(
        45, "pod", cap, cgroup=f"/kubepods.slice/kubepods-pod1.slice/cri-containerd-{CONTAINER}.scope"
    )
    found = machine.ask(gpu, DesiredLayout(gpu, True, {}, 1))
    assert all(one.container == CONTAINER for one in found if one.name != "jupyter")
    assert f"in container {CONTAINER[:12]}" in found[0].text
    assert found[1].unit == "jupyter.service" and "of jupyter.service" in found[1].text
    # a process that root's engine doesn't run is only stopped by its owner
    drains = ["docker:444444444444", "jupyter.service", "podman:444444444444", "", ""]
    assert [one.drain for one in found] == drains


class Engine(Host):
    """A node that records the commands to run."""

    def run(self, argv: Sequence[str], **_: object) -> Completed:
        ran.append(" ".join(argv))
        return Completed(tuple(argv), 1 if "start" in argv else 0, "", "no such container\n")


ran: list[str] = []


def test_named_container_is_stopped_and_started_again() -> None:
    ran.clear()
    train = Obstacle("process", 0, "GPU 0", "train", 41, CONTAINER, engine="docker")
    host, word = Engine(), train.drain
    with pytest.raises(UsageError, match="container podman:444444444444 does not block the change"):
        drain(host, (word, "podman:444444444444"), (train,), SilentProgress())
    assert ran == [], "all names are checked before the first is stopped"
    done = drain(host, (word, word), (train,), SilentProgress())
    assert ran == ["docker stop -t 30 444444444444"] and done.names == (word,)
    (trouble,), still = bring_back(host, done, SilentProgress())
    assert still.restart_commands == (), "a missing one isn't waited for"
    assert ran[1:] == ["docker start 444444444444"] and "no such container" in trouble


class Kubelet:
    """A kubelet that lists the devices of pods, or doesn't respond."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ids: str, silent: bool = False) -> None:
        held = Holding("ml", "train-0", "main", "nvidia.com/gpu", ids)

        def holdings(_: object) -> tuple[Holding, ...]:
            if silent:
                raise DaemonError("the kubelet did not answer List within 2 s")
            return (held,)

        monkeypatch.setattr(Node, "kubelet", object())
        monkeypatch.setattr(Node, "gpu_holdings", property(holdings))
        monkeypatch.setattr(Host, "live", True)


def test_idle_pods_holding_a_removed_device_block(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = gpu_of("h100")
    first, second = (ci.uuid for gi in gpu.instances for ci in gi.compute)
    wish = DesiredLayout(gpu, True, {"4g.40gb": 1, "3g.40gb": 1}, 1)  # the instance at slot 0 is removed
    for ids, counts in (((first,), 1), ((f"{first}::0",), 1), ((second,), 0), ((gpu.uuid,), 1)):
        Kubelet(monkeypatch, *ids)
        found = [one for one in machine.ask(gpu, wish) if one.kind == "pod"]
        assert [one.name for one in found] == ["ml/train-0"] * counts, ids
        assert all(one.drain == "" for one in found)
    assert machine.ask(gpu, DesiredLayout(gpu, True, {"3g.40gb": 2}, 1)) == (), "nothing is removed"


def test_unresponsive_kubelet_is_reported(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = gpu_of("h100")
    Kubelet(monkeypatch, silent=True)
    node = Node(Host(root=machine.root))
    message = untold(node, [plan_gpu(DesiredLayout(gpu, True, {}, 1))])
    assert (
        message == "can't list the pods that hold the devices to be destroyed: "
        "the kubelet did not answer List within 2 s"
    )
    assert untold(node, [plan_gpu(DesiredLayout(gpu, True, {"3g.40gb": 2}, 1))]) == ""


def test_reset_needs_a_gpu_without_any_process(machine: Machine) -> None:
    gpu = gpu_of("h100", architecture=7, cut=False, on=False)
    machine.process(
        43, "nvidia-persistenced", "/dev/nvidia3", cgroup="/system.slice/nvidia-persistenced.service"
    )
    machine.process(44, "nv-hostengine", "/dev/nvidia3 (deleted)", cgroup="/system.slice/nvidia-dcgm.service")
    machine.process(45, "elsewhere", "/dev/nvidia2")
    machine.put("sys/module/nvidia_drm/parameters/modeset", "Y\n")
    found = machine.ask(gpu, DesiredLayout(gpu, True, {"7g.80gb": 1}, 1))
    assert [one.drain for one in found] == [
        "nvidia-persistenced.service",
        "nvidia-dcgm.service",
        "nvidia_drm",
    ]
    assert "GPU 0, which must be reset" in found[0].text
    machine.put("sys/module/nvidia_drm/parameters/modeset", "N\n")
    assert len(machine.ask(gpu, DesiredLayout(gpu, True, {}, 1))) == 2


def test_other_mig_managers_are_reported(machine: Machine) -> None:
    gpu = gpu_of("h100", architecture=7, cut=False, on=False)
    machine.process(50, "nvidia-mig-manager")
    machine.put("sys/bus/pci/devices/0000:05:00.0/class", "0x068000\n")
    machine.put("sys/bus/pci/devices/0000:05:00.0/vendor", "0x10de\n")
    machine.put("sys/bus/pci/devices/0000:19:00.0/class", "0x030200\n")
    machine.put("sys/bus/pci/devices/0000:19:00.0/vendor", "0x10de\n")
    machine.put("sys/bus/pci/devices/0000:19:00.0/device", "0x20b0\n")
    plans = [plan_gpu(DesiredLayout(gpu, True, {}, 1))]
    other, board_ = remarks(Host(root=machine.root), plans)
    assert other == "process 50, nvidia-mig-manager, cuts GPUs on this node as well, and may do it again"
    assert "the fabric manager doesn't run" in board_
    machine.process(51, "nv-fabricmanager")
    assert len(remarks(Host(root=machine.root), plans)) == 1


def test_hopper_needs_no_reset_and_only_workloads_block(machine: Machine) -> None:
    gpu = gpu_of("h100", cut=False, on=False)
    machine.process(43, "nvidia-persistenced", "/dev/nvidia3")
    machine.process(44, "train", "/dev/nvidia3")
    machine.put("sys/module/nvidia_drm/parameters/modeset", "Y\n")
    (found,) = machine.ask(gpu, DesiredLayout(gpu, True, {}, 1), MigProcess(44))
    assert found.text == "train (process 44) uses GPU 0"


def test_unchanged_layout_is_not_blocked(machine: Machine) -> None:
    gpu = gpu_of("h100")
    machine.process(41, "train", "/dev/nvidia3", "/dev/nvidia-caps/nvidia-cap31")
    assert machine.ask(gpu, DesiredLayout(gpu, True, {"3g.40gb": 2}, 1), MigProcess(41, 1, 0)) == ()


def test_removed_compute_instance_does_not_affect_its_neighbour(machine: Machine) -> None:
    bare = board("h100")
    parts = instance(bare, 1, "3g.40gb", 0, 1, 1, 1)
    gpu = replace(bare, minor=3, architecture=9, instances=(parts,))
    wish = DesiredLayout(gpu, True, {"1c.3g.40gb": 2}, 1)
    lost = plan_gpu(wish).lost
    assert [one.ci for one in lost] == [2]
    assert machine.ask(gpu, wish, MigProcess(41, 1, 0), MigProcess(42, 1, 1)) == ()
    assert [one.pid for one in machine.ask(gpu, wish, MigProcess(43, 1, 2))] == [43]
