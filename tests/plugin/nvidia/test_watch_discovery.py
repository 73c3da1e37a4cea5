"""The parent of the child that queries NVML: its handling of responses, silence, crashes and late drivers."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any, cast

import pytest

from gpunode.gpu.child import Note, NvmlQuestion
from gpunode.gpu.model import Inventory, Pair, Reading, Topology
from gpunode.gpu.nvml import GpuEvent
from gpunode.host import Host
from gpunode.host.files import LARGE_BYTES
from gpunode.host.process import LineChild, unnamed_file
from gpunode.output.typed import plain
from gpunode.plugin.config.settings import HealthSettings, Settings
from gpunode.plugin.logfmt import Rarely
from gpunode.plugin.nvidia.platform import nvml_library
from gpunode.plugin.nvidia.watch import ChildReader, MissedXids, Watch, WatcherEnd
from tests.plugin.nodes import MemoryLog, eventually, gpu, inventory, recorded_host, uuid


def document(seen: Inventory, topology: Topology | None = None) -> str:
    return json.dumps({"inventory": plain(seen), "topology": plain(topology or Topology())})


GOOD = document(inventory(4))
ABSENT = json.dumps({"error": {"code": 12, "message": "libnvidia-ml.so.1 was not found"}})
MISMATCH = json.dumps({"error": {"code": 18, "message": "library and module differ"}})
AGAIN = json.dumps({"again": "the traces have changed"})
SILENT, CRASH, LIVES = "silent", "crash", "lives"


class FakeChild:
    """A child that prints these lines, then stays (SILENT: prints nothing more; LIVES: nothing else) or is
    ended by SIGABRT (CRASH). A line ``asks FUNCTION INDEX`` goes into its note."""

    def __init__(self, lines: list[str], stuck: bool = False) -> None:
        self.lines = list(lines)
        self.stuck = stuck
        self.last_words = ""
        self.given: list[str] = []
        self.woken = Event()
        self.file = unnamed_file()
        self.asking: list[AbstractContextManager[None]] = []

    def ask(self, function: str, *gpus: int) -> None:
        """Query NVML without a response."""
        note = Note(self.file)
        note._count = len(self.asking)
        self.asking.append(note.asking(function, gpus))
        self.asking[-1].__enter__()

    def note(self) -> bytes:
        return os.pread(self.file, 512, 0)

    def read_line(self, timeout: float) -> str | None:
        while self.lines and self.lines[0].startswith("asks "):
            _, function, *gpus = self.lines.pop(0).split()
            self.ask(function, *map(int, gpus))
        if self.lines and self.lines[0] == CRASH:
            return ""
        if self.lines and self.lines[0] == LIVES:
            self.woken.wait(0.02)
            self.woken.clear()
            return '{"beat":1}'
        if self.lines and self.lines[0] != SILENT:
            return self.lines.pop(0)
        self.woken.wait(min(timeout, 0.02) if self.lines else timeout)
        self.woken.clear()
        return None

    def tell(self, line: str) -> None:
        self.given.append(line)

    def wake(self) -> None:
        self.woken.set()

    def ended(self) -> bool:
        return not self.stuck

    def end(self) -> int | None:
        return None if self.stuck else -signal.SIGABRT if self.lines[:1] == [CRASH] else -signal.SIGKILL


class Rooted(Host):
    """A live host whose files are in a root: the driver's traces can be created and removed."""

    @property
    def live(self) -> bool:
        return True

    def path(self, path: str | Path, *, follow: bool = True) -> Path:
        return Host(self.root, {}).path(path, follow=follow)

    def stat(self, path: str) -> os.stat_result | None:
        return Host(self.root, {}).stat(path)

    def listdir(self, path: str) -> tuple[str, ...]:
        return Host(self.root, {}).listdir(path)

    def read_text(self, path: str, limit: int = LARGE_BYTES) -> str | None:
        return Host(self.root, {}).read_text(path, limit)


class Sink:
    def __init__(self) -> None:
        self.news: list[tuple[str, Any]] = []

    def seen(self, inventory: Inventory, topology: Topology) -> None:
        self.news.append(("seen", (inventory, topology)))

    def readings(self, readings: Any) -> None:
        self.news.append(("readings", tuple(readings)))

    def event(self, event: GpuEvent) -> None:
        self.news.append(("event", event))

    def broken(self, reason: str, sure: bool) -> None:
        self.news.append(("broken", (reason, sure)))

    def of(self, kind: str) -> list[Any]:
        return [what for name, what in list(self.news) if name == kind]


class Node:
    """A watch with prepared children; the last one is used again and again."""

    def __init__(self, root: Path, *children: list[str], probe: float = 15.0, rediscover: float = 30.0):
        self.children = [list(lines) for lines in children]
        self.started: list[tuple[Mapping[str, Any], FakeChild]] = []
        self.stuck = False
        self.sink = Sink()
        self.log = MemoryLog()
        self.settings = Settings(probe_seconds=probe, rediscover_seconds=rediscover, container_driver_root="")
        start = cast("Callable[[Mapping[str, Any]], LineChild]", self.start)
        self.watch = Watch(Rooted(root, {}), self.settings, self.log, start)

    def start(self, options: Mapping[str, Any]) -> FakeChild:
        lines = self.children.pop(0) if len(self.children) > 1 else self.children[0]
        child = FakeChild(lines, self.stuck)
        self.started.append((options, child))
        return child

    @contextmanager
    def running(self) -> Any:
        stop = Event()
        thread = Thread(target=self.watch.run, args=(self.sink, stop))
        thread.start()
        try:
            yield self
        finally:
            stop.set()
            self.watch.hurry()
            thread.join(30)
            assert not thread.is_alive()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll ten times as often as normally."""
    monkeypatch.setattr("gpunode.plugin.nvidia.watch._LOOK_SECONDS", 0.1)
    monkeypatch.setattr("gpunode.plugin.nvidia.watch._CHECK_SECONDS", 0.2)


def test_child_output_is_passed_on(tmp_path: Path) -> None:
    topology = Topology((Pair(uuid(0), uuid(1), 10, 4),), {uuid(0): 18})
    first, second = Reading(uuid(0), ecc_volatile=1), Reading(uuid(1), error="lost")
    event = GpuEvent("xid", uuid(3), 79, 1, 0)
    lines = [document(inventory(4), topology), json.dumps({"readings": [plain(first)]})]
    lines += [json.dumps({"readings": [plain(second)]}), json.dumps({"event": plain(event)}), '{"beat":1}']
    with Node(tmp_path, lines).running() as node:
        assert eventually(lambda: node.sink.of("event") == [event])
        assert node.sink.of("seen") == [(inventory(4), topology)]
        assert node.sink.of("readings") == [(first,), (first, second)]
        assert node.watch.waiting == ""
    assert node.log.lines == [("info", "GPUs found", {"count": 4, "readable": 4})]


def test_missing_driver_is_waited_for_and_named_once(tmp_path: Path) -> None:
    with Node(tmp_path, [ABSENT], [ABSENT], [MISMATCH], [GOOD], rediscover=0.05).running() as node:
        assert eventually(lambda: bool(node.sink.of("seen")))
    assert node.log.messages("warning") == [
        "waiting for the NVIDIA driver: libnvidia-ml.so.1 was not found",
        "waiting for the NVIDIA driver: library and module differ",
    ]
    assert node.sink.of("broken")[0] == ("libnvidia-ml.so.1 was not found", True)


def test_driver_without_gpus_is_waited_for(tmp_path: Path) -> None:
    with Node(tmp_path, [document(Inventory("550.54.15"))]).running() as node:
        assert eventually(lambda: "NVML lists no GPU" in node.watch.waiting)


def test_node_with_one_dead_gpu_is_not_a_node_without_gpus(tmp_path: Path) -> None:
    dead = Inventory("550", gpus=(replace(gpu(0), uuid="", error="GPU is lost"),))
    with Node(tmp_path, [document(dead)]).running() as node:
        assert eventually(lambda: node.watch.waiting == "waiting for the NVIDIA driver: GPU 0: GPU is lost")


@pytest.mark.parametrize("failure", [SILENT, CRASH])
def test_second_unnamed_failure_is_certain(tmp_path: Path, failure: str) -> None:
    with Node(tmp_path, [GOOD, failure], [failure], [GOOD], probe=0.1).running() as node:
        assert eventually(lambda: len(node.sink.of("broken")) == 2)
        assert [sure for _, sure in node.sink.of("broken")] == [False, True]
        # set after the sink has been called
        assert eventually(lambda: node.watch.waiting.startswith("NVML is broken: ")), node.watch.waiting


@pytest.mark.parametrize("failure", [SILENT, CRASH])
def test_gpu_that_hangs_nvml_is_excluded_and_the_others_continue(tmp_path: Path, failure: str) -> None:
    sick = ["asks nvmlDeviceGetName 2", failure]
    with Node(tmp_path, sick, sick, [GOOD, LIVES], probe=0.1).running() as node:
        assert eventually(lambda: bool(node.sink.of("seen")))
        assert node.started[2][0]["without"] == [("gpu", 2)]
    assert [sure for _, sure in node.sink.of("broken")] == [False]
    (fields,) = [fields for _, message, fields in node.log.lines if message == "GPU is left out"]
    assert (fields["index"], fields["function"]) == (2, "nvmlDeviceGetName")
    assert "nvmlDeviceGetName of GPU 2" in str(fields["reason"])


@pytest.mark.parametrize("failure", [SILENT, CRASH])
@pytest.mark.parametrize(
    ("function", "part"), [("nvmlDeviceGetNvLinkState", "links"), ("nvmlDeviceRegisterEvents", "events")]
)
def test_links_or_events_are_excluded_at_once_and_the_gpu_stays(
    tmp_path: Path, failure: str, function: str, part: str
) -> None:
    sick = [GOOD, f"asks {function} 3", failure]
    with Node(tmp_path, sick, [GOOD, LIVES], probe=0.1).running() as node:
        assert eventually(lambda: len(node.sink.of("seen")) == 2)
        assert node.started[1][0]["without"] == [(part, 3)]
    assert node.sink.of("broken") == []
    ((_, fields),) = [(message, fields) for level, message, fields in node.log.lines if level == "warning"]
    assert (fields["index"], fields["device"], fields["function"]) == (3, uuid(3), function)


def test_crashing_event_wait_is_excluded_for_all_gpus(tmp_path: Path) -> None:
    sick = [GOOD, "asks nvmlEventSetWait", CRASH]
    with Node(tmp_path, sick, sick, [GOOD, LIVES]).running() as node:
        assert eventually(lambda: len(node.sink.of("seen")) == 3)
        assert node.started[2][0]["without"] == [("events", None)]
    assert [sure for _, sure in node.sink.of("broken")] == [False]


def test_excluded_gpu_is_retried_once_no_process_is_stuck_in_it(tmp_path: Path) -> None:
    sick = ["asks nvmlDeviceGetName 2", SILENT]
    node = Node(tmp_path, sick, sick, [GOOD, LIVES], probe=0.1)
    node.stuck = True
    with node.running():
        assert eventually(lambda: bool(node.sink.of("seen")))
        assert node.watch._stuck == [], "stuck children of an excluded GPU block no other"
        given_up = node.watch._given_up[("gpu", 2)]
        node.watch._given_up[("gpu", 2)] = given_up._replace(until=0.0)
        assert not eventually(lambda: len(node.started) > 3, 0.3)
        for _, child in node.started:
            child.stuck = False
        assert eventually(lambda: len(node.started) == 4)
        assert not node.started[3][0]["without"]


def test_other_gpus_reset_the_exclusions(tmp_path: Path) -> None:
    sick = ["asks nvmlDeviceGetName 1", CRASH]
    gpus = tmp_path / "proc/driver/nvidia/gpus"
    (gpus / "0000:3b:00.0").mkdir(parents=True)
    with Node(tmp_path, sick, sick, [GOOD, LIVES, AGAIN]).running() as node:
        assert eventually(lambda: bool(node.sink.of("seen")))
        assert node.started[2][0]["without"]
        (gpus / "0000:3b:00.0").rmdir()
        node.started[2][1].lines.pop(0)
        assert eventually(lambda: len(node.started) == 4)
        assert not node.started[3][0]["without"]


def test_slow_nvml_with_regular_responses_does_not_hang(tmp_path: Path) -> None:
    """In total it takes longer than one response may; it hangs once a query has no response."""
    clock, log = 0.0, MemoryLog()

    class SlowChild(FakeChild):
        def read_line(self, timeout: float) -> str | None:
            nonlocal clock
            clock += timeout
            if len(self.asking) < 20:
                self.ask("nvmlDeviceGetName", len(self.asking))
            return None

    child, missed = cast("LineChild", SlowChild([])), MissedXids(Rooted(tmp_path, {}), log)
    reader = ChildReader(child, Sink(), log, 2.0, lambda _: None, lambda: clock, Rarely(), missed)
    outcome = reader.run(lambda: False)
    assert (outcome.kind, outcome.question) == ("hung", NvmlQuestion("nvmlDeviceGetName", (19,)))
    assert clock > 5.0


def test_invalid_child_output_counts_as_a_crash(tmp_path: Path) -> None:
    for line in ("nonsense", "[1]", '{"inventory": {}}', '{"event": 1}', '{"readings": [{}]}'):
        with Node(tmp_path, [line], [GOOD]).running() as node:
            assert eventually(lambda node=node: bool(node.sink.of("seen")))  # type: ignore[misc]
        assert node.sink.of("broken") == [(f"the NVML process printed {line!r}", False)]


def test_hanging_nvml_is_queried_at_increasing_intervals(tmp_path: Path) -> None:
    node = Node(tmp_path, [GOOD], rediscover=10)
    waits = [
        node.watch._handle_end(WatcherEnd("hung", "no answer"), cast("Any", node.sink), 15) for _ in range(9)
    ]
    assert waits == [0, 20, 40, 80, 160, 320, 600, 600, 600]


def test_missing_driver_is_finally_polled_at_the_regular_interval(tmp_path: Path) -> None:
    node = Node(tmp_path, [GOOD])
    waits = [
        node.watch._handle_end(WatcherEnd("error", "absent"), cast("Any", node.sink), 1) for _ in range(5)
    ]
    assert waits == [5, 10, 20, 30, 30]


def test_at_most_two_children_get_stuck_in_the_driver(tmp_path: Path) -> None:
    node = Node(tmp_path, [SILENT], probe=0.05, rediscover=0.05)
    node.stuck = True
    with node.running():
        for _ in range(4):
            node.watch._timeouts = 0
            node.watch.hurry()
            assert eventually(lambda: len(node.sink.of("broken")) >= 2)
        assert eventually(lambda: len(node.started) == 2)
        node.watch.hurry()
        assert not eventually(lambda: len(node.started) > 2, 0.3)
        assert eventually(lambda: "stuck inside the driver" in str(node.sink.of("broken")[-1]))


def test_changed_traces_reopen_nvml_without_an_error(tmp_path: Path) -> None:
    with Node(tmp_path, [GOOD, AGAIN], [GOOD]).running() as node:
        assert eventually(lambda: len(node.sink.of("seen")) == 2)
    assert node.sink.of("broken") == []
    assert "reopening NVML" in node.log.messages()


def test_newly_loaded_driver_is_detected_by_its_traces(tmp_path: Path) -> None:
    with Node(tmp_path, [ABSENT], [GOOD], rediscover=3600).running() as node:
        assert eventually(lambda: bool(node.sink.of("broken")))
        (tmp_path / "proc/driver/nvidia/gpus/0000:3b:00.0").mkdir(parents=True)
        assert eventually(lambda: bool(node.sink.of("seen")))


def test_hurry_makes_the_child_poll(tmp_path: Path) -> None:
    with Node(tmp_path, [GOOD]).running() as node:
        assert eventually(lambda: bool(node.sink.of("seen")))
        node.watch.hurry()
        assert node.started[0][1].given == ["look"]


def test_new_poll_interval_starts_a_new_child(tmp_path: Path) -> None:
    with Node(tmp_path, [GOOD]).running() as node:
        assert eventually(lambda: bool(node.sink.of("seen")))
        node.watch.configure(node.settings)
        node.watch.configure(replace(node.settings, health=HealthSettings(poll_seconds=2.0)))
        assert eventually(lambda: len(node.started) == 2)
        assert node.started[1][0]["poll"] == 2.0


def test_let_go_closes_nvml_until_a_driver_is_loaded_again(tmp_path: Path) -> None:
    module = tmp_path / "sys/module/nvidia"
    module.mkdir(parents=True)
    with Node(tmp_path, [GOOD]).running() as node:
        assert eventually(lambda: bool(node.sink.of("seen")))
        node.watch.let_go()
        assert eventually(lambda: "NVML is closed temporarily, on request" in node.log.messages())
        assert len(node.started) == 1
        module.rename(module.with_name("nvidia_old"))  # so that the new one has another inode
        module.mkdir()
        assert eventually(lambda: len(node.started) == 2)
    assert node.sink.of("broken") == []


def test_hurry_ends_the_time_with_nvml_closed(tmp_path: Path) -> None:
    with Node(tmp_path, [GOOD]).running() as node:
        assert eventually(lambda: bool(node.sink.of("seen")))
        node.watch.let_go()
        assert eventually(lambda: "NVML is closed temporarily, on request" in node.log.messages())
        # other settings alone don't open it: its closing was requested for work that continues
        node.watch.configure(replace(node.settings, health=HealthSettings(poll_seconds=2.0)))
        assert not eventually(lambda: len(node.started) > 1, 0.2)
        node.watch.hurry()
        assert eventually(lambda: len(node.started) == 2)


def test_recorded_machine_responds_once(tmp_path: Path) -> None:
    log = MemoryLog()
    sink, stop = Sink(), Event()
    watch = Watch(recorded_host(tmp_path, 2), Settings(), log)
    thread = Thread(target=watch.run, args=(sink, stop))
    thread.start()
    assert eventually(lambda: bool(sink.of("seen")))
    stop.set()
    thread.join(30)
    assert (len(sink.news), watch.waiting) == (1, "")


def test_library_is_searched_in_the_container_driver_root(tmp_path: Path) -> None:
    settings = Settings(container_driver_root="/driver-root")
    assert nvml_library(Host(tmp_path, {}), settings) == ""
    for directory in ("lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"):
        (tmp_path / "driver-root" / directory).mkdir(parents=True)
        (tmp_path / "driver-root" / directory / "libnvidia-ml.so.1").touch()
    found = nvml_library(Host(tmp_path, {}), settings)
    assert found == "/driver-root/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"
    assert nvml_library(Host(tmp_path, {}), Settings(container_driver_root="/")) == ""
    unmounted = Settings(driver_root="/driver-root", container_driver_root="/nowhere")
    assert nvml_library(Host(tmp_path, {}), unmounted) == found
