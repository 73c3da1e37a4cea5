"""Rediscovery: waiting for the driver, broken NVML, and probes that don't come back."""

from __future__ import annotations

from pathlib import Path
from threading import Event, Thread

from gpunode.gpu.isolated import NvmlProbe
from gpunode.gpu.model import Inventory
from gpunode.host import Host
from gpunode.plugin.devices import DeviceTable
from gpunode.plugin.discovery import Discovery
from gpunode.plugin.settings import Settings
from tests.plugin.nodes import MemoryLog, eventually, inventory

GOOD = NvmlProbe(inventory(4))
ABSENT = NvmlProbe(None, 12, "Shared Library Not Found")
MISMATCH = NvmlProbe(None, 18, "Driver/library version mismatch")
HUNG = NvmlProbe(None, timed_out=True, seconds=15.0)
CRASHED = NvmlProbe(None, message="killed by SIGABRT")


class Node:
    """A discovery whose probe, a stand-in for the child process, answers from a list."""

    def __init__(self, root: Path, *answers: NvmlProbe, rediscover: float = 30.0) -> None:
        self.answers = list(answers)
        self.table = DeviceTable()
        self.log = MemoryLog()
        self.asked = 0
        settings = Settings(rediscover_seconds=rediscover)
        self.discovery = Discovery(Host(root, {}), settings, self.table, self.log, self.probe)

    def probe(self, host: Host, timeout: float) -> NvmlProbe:
        self.asked += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def look(self, times: int = 1) -> Node:
        for _ in range(times):
            self.discovery.look()
        return self

    @property
    def healthy(self) -> int:
        return sum(device.healthy for device in self.table.snapshot().devices)


def test_a_missing_driver_is_waited_for_and_named_once(tmp_path: Path) -> None:
    node = Node(tmp_path, ABSENT, ABSENT, MISMATCH, GOOD).look(4)
    assert node.log.messages("warning") == [
        "waiting for the NVIDIA driver: Shared Library Not Found",
        "waiting for the NVIDIA driver: Driver/library version mismatch",
    ]
    assert node.log.lines[-1] == ("info", "GPUs found", {"count": 4, "healthy": 4})
    assert node.discovery.waiting == ""


def test_a_driver_without_gpus_is_waited_for(tmp_path: Path) -> None:
    node = Node(tmp_path, NvmlProbe(Inventory("550.54.15"))).look()
    assert node.discovery.waiting == "waiting for the NVIDIA driver: NVML lists no GPU"


def test_an_error_that_nvml_names_makes_all_gpus_unhealthy_until_it_answers_again(tmp_path: Path) -> None:
    node = Node(tmp_path, GOOD, MISMATCH, GOOD, GOOD).look(2)
    assert node.healthy == 0
    assert "NVML is broken: Driver/library version mismatch" in node.log.messages("warning")
    assert node.look(2).healthy == 4


def test_one_probe_without_an_answer_is_no_verdict_and_two_are(tmp_path: Path) -> None:
    for failure in (HUNG, CRASHED):
        node = Node(tmp_path, GOOD, failure).look(2)
        assert node.healthy == 4
        assert node.look().healthy == 0


def test_a_hanging_nvml_is_asked_ever_more_rarely(tmp_path: Path) -> None:
    node = Node(tmp_path, HUNG, rediscover=10)
    waits = []
    for _ in range(8):
        node.look()
        waits.append(node.discovery._interval())
    assert waits[:3] == [20, 40, 80]
    assert waits[-1] == 600


def test_the_driver_is_looked_for_again_soon_and_stopping_does_not_wait(tmp_path: Path) -> None:
    node = Node(tmp_path, ABSENT, GOOD, rediscover=0.1)
    stop = Event()
    thread = Thread(target=node.discovery.run, args=(stop,))
    thread.start()
    try:
        assert eventually(lambda: node.healthy == 4)
    finally:
        stop.set()
        node.discovery.hurry()
        thread.join(1)
    assert not thread.is_alive()


def test_a_driver_that_was_just_loaded_is_noticed_by_its_traces(tmp_path: Path) -> None:
    node = Node(tmp_path, ABSENT, GOOD, rediscover=3600)
    stop = Event()
    thread = Thread(target=node.discovery.run, args=(stop,))
    thread.start()
    try:
        assert eventually(lambda: node.asked == 1)
        (tmp_path / "dev").mkdir()
        (tmp_path / "dev/nvidiactl").touch()
        assert eventually(lambda: node.healthy == 4, 4)
    finally:
        stop.set()
        node.discovery.hurry()
        thread.join(1)
