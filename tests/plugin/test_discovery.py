"""Rediscovery: waiting for the driver, broken NVML, and probes that don't come back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

from gpunode.gpu.isolated import NvmlProbe
from gpunode.gpu.model import Inventory
from gpunode.host import Host
from gpunode.plugin.devices import DeviceTable
from gpunode.plugin.discovery import Discovery
from gpunode.plugin.settings import Settings
from tests.plugin.nodes import MemoryLog, eventually, gpu, inventory, uuid

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


def test_a_gpu_without_a_uuid_from_the_start_is_named_once(tmp_path: Path) -> None:
    dead = NvmlProbe(Inventory("550", gpus=(gpu(0), replace(gpu(1), uuid="", error="GPU is lost"))))
    node = Node(tmp_path, dead).look(3)
    assert node.healthy == 1
    assert (
        node.log.lines.count(("error", "GPU is not advertised", {"index": 1, "reason": "GPU is lost"})) == 1
    )


def test_a_node_whose_only_gpu_is_dead_does_not_count_as_one_without(tmp_path: Path) -> None:
    dead = NvmlProbe(Inventory("550", gpus=(replace(gpu(0), uuid="", error="GPU is lost"),)))
    assert (
        Node(tmp_path, dead).look().discovery.waiting == "waiting for the NVIDIA driver: GPU 0: GPU is lost"
    )


def test_the_second_of_two_gpus_with_one_uuid_is_named(tmp_path: Path) -> None:
    twins = NvmlProbe(Inventory("550", gpus=(gpu(0), replace(gpu(1), uuid=uuid(0)))))
    node = Node(tmp_path, twins).look(2)
    assert node.healthy == 1
    assert node.log.reasons() == [f"NVML gives it the UUID of GPU 0, {uuid(0)}"]


def test_a_gpu_known_before_and_lost_is_not_told_twice(tmp_path: Path) -> None:
    lost = NvmlProbe(Inventory("550", gpus=(gpu(0), replace(gpu(1), uuid="", pci="", error="GPU is lost"))))
    node = Node(tmp_path, NvmlProbe(inventory(2)), lost).look(3)
    assert node.healthy == 1
    assert node.log.messages("error") == ["GPU is unhealthy"]


def test_what_stays_missing_is_looked_for_at_the_regular_pace_in_the_end(tmp_path: Path) -> None:
    node = Node(tmp_path, GOOD, NvmlProbe(inventory(3)), NvmlProbe(inventory(3)), GOOD, GOOD, rediscover=30)
    waits = []
    for number in range(7):
        if number == 5:
            node.answers = [GOOD]
        elif number == 2:
            node.answers = [NvmlProbe(inventory(3))]
        node.look()
        waits.append(node.discovery._interval())
    assert waits == [30, 5, 10, 20, 30, 5, 30]
