"""`gpunode plugin serve` as its own process, with the C stub of NVML and the kubelet stub."""

from __future__ import annotations

import os
import platform
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from fixtures.scenario import (
    ECC_DOUBLE,
    ECC_SINGLE,
    Event,
    Fault,
    Scenario,
    gpu_uuid,
    machine,
    mixed_layout,
    with_mig,
)
from fixtures.stubs import StubNode, have_compiler, stub_node
from gpunode.host import Host
from tests.cli import checked
from tests.plugin.kubelet_stub import KubeletStub
from tests.plugin.nodes import RESOURCE, children, eventually, texts

pytestmark = pytest.mark.skipif(not have_compiler(), reason="gcc is not installed")
_HEAP_BYTES = 64 << 20
NVML_DRIVER_NOT_LOADED, NVML_MISMATCH = 9, 18


class Serve:
    """One running `gpunode plugin serve`, its stderr in a file."""

    def __init__(self, short: Path, node: StubNode, umask: int = -1, **environ: str) -> None:
        self.log_path = short / "log"
        self.socket = short / "dp/nvidia-gpu.sock"
        command = [sys.executable, "-m", "gpunode", "plugin", "serve", "-o", "json"]
        command += ["--kubelet-socket", str(short / "dp/kubelet.sock"), "--rediscover-seconds", "0.5"]
        command += ["--state-dir", str(short / "state"), "--mps-root", str(short / "mps")]
        env = {**os.environ, **node.env, **environ}
        with self.log_path.open("a") as log:
            self.process = subprocess.Popen(
                command, env=env, stderr=log, stdout=subprocess.PIPE, text=True, umask=umask
            )

    def log(self) -> str:
        return self.log_path.read_text()

    def says(self, words: str, seconds: float = 30.0) -> bool:
        return eventually(lambda: words in self.log(), seconds)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send the signal and wait, on a busy machine longer than needed, and shorter than an NVML that
        hangs in these tests; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(15.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


class Node:
    """A kubelet, a machine, and the plugins started on it."""

    def __init__(self, short: Path) -> None:
        self.short = short
        (short / "dp").mkdir()
        self.kubelet = KubeletStub(Host(), str(short / "dp"))
        self.kubelet.start()
        self.started: list[Serve] = []

    def serve(self, scenario: Scenario, umask: int = -1, **environ: str) -> tuple[Serve, StubNode]:
        node = stub_node(self.short, scenario, libraries="nvml")
        self.started.append(Serve(self.short, node, umask, **environ))
        return self.started[-1], node

    def ready(self, count: int, seconds: float = 30.0) -> bool:
        return self.kubelet.wait_allocatable(RESOURCE, count, seconds)


@pytest.fixture
def node(short: Path) -> Iterator[Node]:
    made = Node(short)
    yield made
    for serve in made.started:
        serve.end()
        assert serve.process.stdout is not None
        serve.process.stdout.close()
    made.kubelet.stop()


def test_only_the_owner_may_connect_whatever_the_umask(node: Node) -> None:
    serve, _ = node.serve(machine(1), umask=0)
    assert node.ready(1), serve.log()
    assert stat.S_IMODE(serve.socket.stat().st_mode) == 0o600
    status = Path(f"/proc/{serve.process.pid}/status").read_text()
    assert "Umask:\t0022" in status  # between bind and chmod no other user could connect either


def test_eight_gpus_are_allocatable_and_sigterm_exits_cleanly(node: Node) -> None:
    serve, _ = node.serve(machine(8))
    assert node.ready(8), serve.log()
    given = node.kubelet.allocate(RESOURCE, 2)
    assert given.envs == {"NVIDIA_VISIBLE_DEVICES": f"{gpu_uuid(0)},{gpu_uuid(1)}"}
    assert serve.socket.is_socket()
    assert serve.end() == 0
    assert not serve.socket.exists()
    assert "Traceback" not in serve.log()
    assert node.kubelet.wait_allocatable(RESOURCE, 0, 30)
    assert node.kubelet.capacity(RESOURCE) == 8


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT])
def test_repeated_ctrl_c_exits_cleanly(node: Node, number: int) -> None:
    serve, _ = node.serve(machine(1))
    assert node.ready(1), serve.log()

    def again() -> bool:
        serve.process.send_signal(number)
        return serve.process.poll() is not None

    assert eventually(again), serve.log()
    assert serve.process.returncode == 0
    assert "Traceback" not in serve.log()
    assert not serve.socket.exists()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_signal_during_the_start_does_not_end_the_plugin(node: Node, number: int) -> None:
    """It is blocked from before the command line is parsed until the plugin has its handlers."""
    serve, _ = node.serve(machine(1))
    assert eventually(lambda: keeps(serve.process.pid, number))
    serve.process.send_signal(number)
    assert node.ready(1), serve.log()
    assert serve.process.poll() is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_termination_during_the_start_exits_cleanly(node: Node, number: int) -> None:
    serve, _ = node.serve(machine(1))
    assert eventually(lambda: keeps(serve.process.pid, signal.SIGTERM))
    assert serve.end(number) == 0, serve.log()
    assert serve.process.stdout is not None
    assert checked(serve.process.stdout.read())["status"] == "ok"
    assert "Traceback" not in serve.log()
    assert not serve.socket.exists()


def keeps(pid: int, number: int) -> bool:
    """Whether the signal is blocked or handled."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigBlk:", "SigCgt:"))]
    return any(mask >> (number - 1) & 1 for mask in masks)


def test_xid_marks_only_its_gpu(node: Node) -> None:
    serve, stub = node.serve(machine(8))
    assert node.ready(8), serve.log()
    assert serve.says("watching health events")
    ignored = machine(8).with_event(Event(gpu_uuid(2), data=31)).with_event(Event(gpu_uuid(3), ECC_SINGLE))
    stub.write(ignored)
    assert serve.says("xid=31")
    assert node.kubelet.allocatable(RESOURCE) == 8
    stub.write(ignored.with_event(Event(gpu_uuid(5), data=79)))
    assert node.ready(7), serve.log()
    assert node.kubelet.unhealthy(RESOURCE) == (gpu_uuid(5),)
    assert serve.says("XID 79: the GPU has fallen off the bus")  # logged after the kubelet has the list


def test_double_bit_ecc_error_marks_its_gpu(node: Node) -> None:
    serve, stub = node.serve(machine(2))
    assert node.ready(2), serve.log()
    assert serve.says("watching health events")
    stub.write(machine(2).with_event(Event(gpu_uuid(1), ECC_DOUBLE)))
    assert node.ready(1), serve.log()
    assert node.kubelet.unhealthy(RESOURCE) == (gpu_uuid(1),)


def test_lost_gpu_affects_only_itself_and_recovers(node: Node) -> None:
    serve, stub = node.serve(machine(4))
    assert node.ready(4), serve.log()
    stub.write(machine(4).with_gpu(2, lost=True))
    assert node.ready(3), serve.log()
    assert node.kubelet.unhealthy(RESOURCE) == (gpu_uuid(2),)
    stub.write(machine(4))
    assert node.ready(4), serve.log()


def test_driver_loaded_later_is_waited_for(node: Node) -> None:
    unloaded = machine(2).with_faults(Fault("nvmlInitWithFlags", NVML_DRIVER_NOT_LOADED))
    serve, stub = node.serve(unloaded)
    assert serve.says("waiting for the NVIDIA driver: ")
    assert node.kubelet.registrations == []
    stub.write(machine(2))
    assert node.ready(2), serve.log()


def test_driver_library_mismatch_is_named(node: Node) -> None:
    serve, _ = node.serve(machine(2).with_faults(Fault("nvmlInitWithFlags", NVML_MISMATCH)))
    assert eventually(lambda: "library and kernel module have different versions" in serve.log(), 60), (
        serve.log()
    )
    assert serve.process.poll() is None


def test_hanging_nvml_does_not_prevent_the_exit(node: Node) -> None:
    serve, _ = node.serve(machine(2).with_faults(Fault("nvmlInitWithFlags", hang=30.0)))
    assert eventually(lambda: bool(hanging(serve.process.pid)), 60)
    assert serve.end() == 0


def test_child_in_a_hanging_nvml_does_not_outlive_the_plugin(node: Node) -> None:
    serve, _ = node.serve(machine(2).with_faults(Fault("nvmlInitWithFlags", hang=60.0)))
    assert eventually(lambda: bool(hanging(serve.process.pid)), 60)
    (child,) = hanging(serve.process.pid)
    assert serve.end(signal.SIGKILL) == -signal.SIGKILL
    assert eventually(lambda: not Path(f"/proc/{child}/maps").exists() or not maps_nvml(child), 60)


def hanging(parent: int) -> list[int]:
    """The children that have NVML loaded."""
    return [pid for pid in children(parent) if maps_nvml(pid)]


def maps_nvml(pid: int) -> bool:
    return any("libnvidia-ml" in text for text in texts([Path(f"/proc/{pid}/maps")]))


def test_gpu_partitioned_later_adds_resources_without_ending_a_stream(node: Node) -> None:
    serve, stub = node.serve(machine(2), MIG_STRATEGY="mixed")
    assert node.ready(2), serve.log()
    stub.write(with_mig(machine(2), 1, mixed_layout(1)))
    assert node.ready(1), serve.log()
    assert node.kubelet.wait_allocatable("nvidia.com/mig-3g.40gb", 1, 30), serve.log()
    stub.write(machine(2))
    assert node.ready(2), serve.log()
    assert node.kubelet.wait_allocatable("nvidia.com/mig-3g.40gb", 0, 30), serve.log()
    assert [one.resource for one in node.kubelet.registrations].count(RESOURCE) == 1
    assert serve.end() == 0
    assert not list(serve.socket.parent.glob("nvidia*"))


def test_gpu_lost_from_the_start_is_named(node: Node) -> None:
    serve, _ = node.serve(machine(3).with_gpu(1, lost=True))
    assert node.ready(2), serve.log()
    assert serve.says('msg="GPU is not advertised" index=1') or gpu_uuid(1) in serve.log(), serve.log()


def test_second_plugin_is_refused_with_exit_code_3(node: Node) -> None:
    first, _ = node.serve(machine(1))
    assert node.ready(1), first.log()
    second, _ = node.serve(machine(1))
    assert second.process.wait(30) == 3
    assert "another device plugin is serving on" in second.log()
    assert node.kubelet.allocatable(RESOURCE) == 1


def test_systemd_is_notified_of_readiness_status_watchdog_and_stop(node: Node, short: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(short / "notify"))
        systemd.settimeout(30)
        serve, _ = node.serve(machine(2), NOTIFY_SOCKET=str(short / "notify"), WATCHDOG_USEC="500000")
        received: list[str] = []
        while "STATUS=2 of 2 nvidia.com/gpu healthy, registered with the kubelet" not in received:
            received.append(systemd.recv(4096).decode())
        assert serve.end() == 0
        while received[-1] != "STOPPING=1":
            received.append(systemd.recv(4096).decode())
    assert "READY=1" in received
    assert "WATCHDOG=1" in received


@pytest.mark.full
def test_idle_plugin_uses_little_cpu_and_memory(node: Node) -> None:
    """The unit grants 256 MiB, half of it for a child that queries NVML.

    Rediscovery runs here sixty times as often as it does by default.
    """
    serve, _ = node.serve(machine(8))
    assert node.ready(8), serve.log()
    status = Path(f"/proc/{serve.process.pid}/status").read_text()
    resident = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) // 1024
    before, started = cpu_seconds(serve.process.pid), time.monotonic()
    assert not eventually(lambda: serve.process.poll() is not None, 4.0)
    used = (cpu_seconds(serve.process.pid) - before) / (time.monotonic() - started)
    assert resident < 100, f"{resident} MiB"
    assert used < 0.2, f"{used:.1%} of one processor, children not counted"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has a heap for each thread")
def test_all_threads_share_one_heap(node: Node) -> None:
    """glibc aligns a thread's own heap to 64 MiB, and reserves the rest of these without access (arena.c)."""
    serve, _ = node.serve(machine(1))
    assert node.ready(1), serve.log()
    maps = Path(f"/proc/{serve.process.pid}/maps").read_text()
    areas = [
        (int(start, 16), int(end, 16), rights)
        for start, end, rights in re.findall(r"^(\w+)-(\w+) (\S+)", maps, re.MULTILINE)
    ]
    heaps = [
        start
        for (start, _, rights), (_, end, reserved) in pairwise(areas)
        if (rights, reserved, end) == ("rw-p", "---p", start + _HEAP_BYTES) and start % _HEAP_BYTES == 0
    ]
    assert len(list(Path(f"/proc/{serve.process.pid}/task").iterdir())) > 5
    assert not heaps


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
