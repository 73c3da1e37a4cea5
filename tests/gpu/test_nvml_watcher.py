"""The child that keeps NVML open, as its parent runs it: the C stub behind the real loader and ctypes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fixtures.scenario import (
    ECC_DOUBLE,
    Event,
    Fault,
    Scenario,
    gpu_uuid,
    machine,
    mixed_layout,
    with_mig,
    with_nvswitch,
)
from fixtures.stubs import StubNode, have_compiler, stub_node
from gpunode.gpu.child import NvmlQuestion, read_note
from gpunode.gpu.child import start as start_child
from gpunode.gpu.driver_traces import driver_traces, generation, node_traces
from gpunode.gpu.model import Inventory, Reading, Topology, inventory_from_json
from gpunode.gpu.nvml import GpuEvent
from gpunode.host import Host
from gpunode.output.typed import from_plain
from tests.waiting import PATIENCE

pytestmark = pytest.mark.skipif(not have_compiler(), reason="gcc is not installed")


def readings_from(documents: list[Any]) -> tuple[Reading, ...]:
    return tuple(from_plain(Reading, document) for document in documents)


class NvmlWatcher:
    """One child and its output."""

    def __init__(self, node: StubNode, **options: Any) -> None:
        self.node = node
        host = Host(environ={**os.environ, **node.env})
        self.child = start_child(
            host, "gpunode.gpu.nvml_watcher", {"rediscover": 0.3, "poll": 0.3, "library": "", **options}
        )
        self.said: list[dict[str, Any]] = []

    def hear(self, wanted: Callable[[dict[str, Any]], bool], seconds: float = PATIENCE) -> dict[str, Any]:
        """The first document from now on that is `wanted`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            line = self.child.read_line(deadline - time.monotonic())
            if line == "":
                raise AssertionError(f"it ended: {self.child.last_words}; {self.said}")
            if line is not None:
                self.said.append(json.loads(line))
                if wanted(self.said[-1]):
                    return self.said[-1]
        raise AssertionError(f"not heard: {self.said}")

    def inventory(self, wanted: Callable[[Inventory], bool] = lambda seen: True) -> Inventory:
        def fits(document: dict[str, Any]) -> bool:
            return "inventory" in document and wanted(inventory_from_json(document["inventory"]))

        return inventory_from_json(self.hear(fits)["inventory"])

    def watching(self, count: int) -> None:
        """Or it was printed last: two threads print, in any order."""
        counts = [document["watching"].get("count") for document in self.said if "watching" in document]
        if counts[-1:] != [count]:
            self.hear(lambda document: document.get("watching", {}).get("count") == count)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., NvmlWatcher]]:
    started: list[NvmlWatcher] = []

    def start(scenario: Scenario, **options: Any) -> NvmlWatcher:
        started.append(NvmlWatcher(stub_node(tmp_path, scenario, libraries="nvml"), **options))
        return started[-1]

    yield start
    for watcher in started:
        watcher.child.end()


Start = Callable[..., NvmlWatcher]


def test_inventory_topology_and_readings_come_first(start: Start) -> None:
    scenario = with_nvswitch(with_mig(machine(4), 1, mixed_layout(1))).with_gpu(2, recovery=2, ecc=(3, 9))
    watcher = start(scenario.with_gpu(3, remap=None, retired_pending=1, fabric=(2, 0, 0), recovery=None))
    document = watcher.hear(lambda document: "inventory" in document)
    seen = inventory_from_json(document["inventory"])
    assert [len(gpu.mig) for gpu in seen.gpus] == [0, 4, 0, 0]
    assert from_plain(Topology, document["topology"]).switch_links[gpu_uuid(0)] == 18
    changed = watcher.hear(lambda document: "readings" in document)["readings"]
    readings = {reading.uuid: reading for reading in readings_from(changed)}
    assert readings[gpu_uuid(0)].recovery_action == "none"
    assert readings[gpu_uuid(0)].generation.endswith("/535.104.05")
    second, third = readings[gpu_uuid(2)], readings[gpu_uuid(3)]
    assert (second.recovery_action, second.ecc_volatile, second.ecc_aggregate) == ("reboot", 3, 9)
    assert (second.remap_pending, second.remap_failed, second.retired_pending) == (False, False, None)
    assert (third.remap_pending, third.retired_pending, third.recovery_action) == (None, True, None)
    assert (third.fabric_state, third.fabric_error) == ("in-progress", "")
    assert (second.fabric_state, second.busy_percent, second.memory_used_bytes) == (None, None, None)


def test_failed_fabric_is_named(start: Start) -> None:
    watcher = start(machine(2).with_gpu(0, fabric=(3, 999, 0)).with_gpu(1, fabric=(3, 0, 1 << 4)))
    changed = readings_from(watcher.hear(lambda document: "readings" in document)["readings"])
    assert [reading.fabric_error for reading in changed] == [
        "unknown NVML error (NVML 999)",
        "a route through the NVLink fabric is unhealthy",
    ]


def test_utilization_is_reported_on_request(start: Start) -> None:
    watcher = start(machine(1).with_gpu(0, busy=40, used=5 << 30), use=True)
    (reading,) = readings_from(watcher.hear(lambda document: "readings" in document)["readings"])
    assert (reading.busy_percent, reading.memory_used_bytes) == (40, 5 << 30)


def test_only_changes_are_reported(start: Start) -> None:
    watcher = start(machine(4))
    watcher.inventory()
    watcher.inventory()  # once more, so that the recovered GPU is seen twice
    before = len(watcher.said)
    watcher.node.write(machine(4).with_gpu(2, remap=(1, 0)))
    changed = watcher.hear(lambda document: "readings" in document)
    assert [item["uuid"] for item in changed["readings"]] == [gpu_uuid(2)]
    news = [document for document in watcher.said[before:] if "beat" not in document]
    assert len(news) <= 2, watcher.said  # and no further inventory


def test_events_are_reported_at_once_with_a_new_reading(start: Start) -> None:
    scenario = with_mig(machine(2), 1, mixed_layout(1))
    watcher = start(scenario, poll=3600, rediscover=3600)  # longer than anything here waits
    watcher.watching(2)
    if not any("readings" in document for document in watcher.said):  # two threads print, in any order
        watcher.hear(lambda document: "readings" in document)
    scenario_with_event = scenario.with_event(Event(gpu_uuid(1), data=94, gi=3, ci=0)).with_gpu(1, recovery=1)
    watcher.node.write(scenario_with_event)
    event = from_plain(GpuEvent, watcher.hear(lambda document: "event" in document)["event"])
    assert (event.kind, event.uuid, event.xid, event.gi, event.ci) == ("xid", gpu_uuid(1), 94, 3, 0)
    (reading,) = readings_from(
        watcher.hear(lambda document: "readings" in document and len(document["readings"]) == 1)["readings"]
    )
    assert (reading.uuid, reading.recovery_action) == (gpu_uuid(1), "reset")
    watcher.node.write(scenario_with_event.with_event(Event(gpu_uuid(0), ECC_DOUBLE)))
    assert watcher.hear(lambda document: "event" in document)["event"]["kind"] == "ecc-double"


def test_every_event_of_a_storm_is_reported(start: Start) -> None:
    watcher = start(machine(2))
    watcher.watching(2)
    watcher.node.write(replace(machine(2), events=tuple(Event(gpu_uuid(1), data=i) for i in range(1000))))
    heard = [watcher.hear(lambda document: "event" in document)["event"]["xid"] for _ in range(1000)]
    assert heard == list(range(1000))


def test_lost_gpu_affects_only_itself_and_is_watched_again_after_recovery(start: Start) -> None:
    watcher = start(machine(3))
    watcher.watching(3)
    watcher.node.write(machine(3).with_gpu(1, lost=True))
    lost = watcher.inventory(lambda seen: bool(seen.gpus[1].error))
    assert [bool(gpu.error) for gpu in lost.gpus] == [False, True, False]
    assert lost.gpus[1].uuid == gpu_uuid(1)
    watcher.watching(2)
    watcher.node.write(machine(3).with_event(Event(gpu_uuid(2), data=48)))
    watcher.hear(lambda document: "event" in document)
    watcher.watching(3)


def test_dead_link_is_reported_even_if_nothing_else_changes(start: Start) -> None:
    whole = with_nvswitch(machine(2))
    watcher = start(whole, rediscover=0.05)
    watcher.hear(lambda document: "inventory" in document)
    fewer = {place: pci for place, pci in whole.nvlinks.items() if place != (1, 5)}
    for scenario, count in ((replace(whole, nvlinks=fewer), 17), (whole, 18)):
        watcher.node.write(scenario)
        changed = watcher.hear(partial(_has_switch_links, count))
        assert from_plain(Topology, changed["topology"]).switch_links[gpu_uuid(0)] == 18


def _has_switch_links(count: int, document: dict[str, Any]) -> bool:
    if "topology" not in document:
        return False
    return from_plain(Topology, document["topology"]).switch_links.get(gpu_uuid(1)) == count


@pytest.mark.full
def test_gpus_and_mig_devices_appear_and_disappear(start: Start) -> None:
    watcher = start(machine(1))
    watcher.inventory()
    watcher.node.write(machine(3))
    watcher.inventory(lambda seen: len(seen.gpus) == 3)
    watcher.watching(3)
    watcher.node.write(with_mig(machine(3), 2, mixed_layout(2)[:2]))
    cut = watcher.inventory(lambda seen: len(seen.gpus[2].mig) == 2)
    assert [device.uuid for device in cut.gpus[2].mig] == [device.uuid for device in mixed_layout(2)[:2]]


@pytest.mark.full
def test_line_on_stdin_triggers_a_poll_and_end_of_file_ends_it(start: Start) -> None:
    watcher = start(machine(1), poll=60, rediscover=60)
    watcher.inventory()
    watcher.inventory()
    watcher.node.write(machine(2))
    watcher.child.tell("look")
    seen = watcher.inventory(lambda seen: len(seen.gpus) == 2)
    assert [gpu.uuid for gpu in seen.gpus] == [gpu_uuid(0), gpu_uuid(1)]


@pytest.mark.parametrize("code", [9, 18])
def test_nvml_error_is_reported_and_ends_the_process(start: Start, code: int) -> None:
    watcher = start(machine(1).with_faults(Fault("nvmlInitWithFlags", code)))
    assert watcher.hear(lambda document: "error" in document)["error"]["code"] == code
    assert watcher.child.read_line(PATIENCE) == ""
    assert watcher.child.end() == 0


def test_missing_library_is_reported(start: Start) -> None:
    watcher = start(machine(1), library="/nowhere/libnvidia-ml.so.1")
    assert "/nowhere" in watcher.hear(lambda document: "error" in document)["error"]["message"]


def test_library_path_from_the_options_is_used(start: Start, tmp_path: Path) -> None:
    node = stub_node(tmp_path, machine(2), libraries="nvml")
    path = node.libraries / "libnvidia-ml.so.1"
    bare = StubNode(node.scenario_path, Path("/nowhere"))
    host = Host(environ={**os.environ, **bare.env})
    child = start_child(host, "gpunode.gpu.nvml_watcher", {"library": str(path)})
    try:
        first = [child.read_line(PATIENCE) or "" for _ in range(2)]  # events are watched by another thread
        assert any('"inventory"' in line for line in first)
    finally:
        child.end()


@pytest.mark.full
def test_library_replaced_on_disk_is_opened_by_a_new_process(tmp_path: Path) -> None:
    node = stub_node(tmp_path, machine(1), libraries="nvml")
    path = tmp_path / "libnvidia-ml.so.1"
    shutil.copy(node.libraries / path.name, path)
    host = Host(environ={**os.environ, **node.env})
    child = start_child(host, "gpunode.gpu.nvml_watcher", {"library": str(path)})
    try:
        first = [child.read_line(PATIENCE) or "" for _ in range(2)]  # events are watched by another thread
        assert any('"inventory"' in line for line in first)
        shutil.copy(path, tmp_path / "new")  # as a package manager does: another file under the same name
        (tmp_path / "new").replace(path)
        heard = [child.read_line(PATIENCE) or ""]
        while heard[-1]:
            heard.append(child.read_line(PATIENCE) or "")
        assert "again" in json.loads(heard[-2])
        assert child.end() == 0
    finally:
        child.end()


def test_excluded_gpu_is_not_queried(start: Start) -> None:
    hangs = Fault("nvmlDeviceGetHandleByIndex", uuid=gpu_uuid(1), hang=60.0)
    watcher = start(machine(3).with_faults(hangs), without=[("gpu", 1)])
    seen = watcher.inventory()
    assert [bool(gpu.error) for gpu in seen.gpus] == [False, True, False]


def test_excluded_links_and_events_are_not_queried(start: Start) -> None:
    links = Fault("nvmlDeviceGetNvLinkState", uuid=gpu_uuid(1), hang=60.0)
    events = Fault("nvmlDeviceRegisterEvents", uuid=gpu_uuid(2), hang=60.0)
    scenario = with_nvswitch(machine(4)).with_faults(links, events)
    watcher = start(scenario, without=[("links", 1), ("events", 2)])
    document = watcher.hear(lambda document: "inventory" in document)
    assert not any(gpu.error for gpu in inventory_from_json(document["inventory"]).gpus)
    topology = from_plain(Topology, document["topology"])
    assert sorted(topology.switch_links) == [gpu_uuid(0), gpu_uuid(2), gpu_uuid(3)]
    watcher.watching(3)


def test_note_names_the_query_that_crashed_nvml(start: Start) -> None:
    watcher = start(machine(2).with_faults(Fault("nvmlDeviceGetName", uuid=gpu_uuid(1), abort=True)))
    while watcher.child.read_line(PATIENCE):
        pass
    count, question, waiting = read_note(watcher.child.note())
    assert (question, waiting) == (NvmlQuestion("nvmlDeviceGetName", (1,)), None)
    assert count > 8, "the queries of GPU 0 were counted"
    assert watcher.child.end() == -signal.SIGABRT


def test_traces_change_with_module_version_gpus_instances_and_library(tmp_path: Path) -> None:
    host = Host(tmp_path, {})
    nvidia = tmp_path / "proc/driver/nvidia"
    library = tmp_path / "libnvidia-ml.so.1"
    (tmp_path / "sys/module").mkdir(parents=True)
    before = driver_traces(host, "/libnvidia-ml.so.1")
    seen = {before}
    steps: list[Callable[[], object]] = [
        lambda: (tmp_path / "sys/module/nvidia").mkdir(),
        lambda: (nvidia / "gpus/0000:3b:00.0").mkdir(parents=True),
        lambda: (nvidia / "version").write_text("NVRM version: 550"),
        lambda: (nvidia / "version").write_text("NVRM version: 570"),
        lambda: (nvidia / "capabilities/gpu0/mig/gi3").mkdir(parents=True),
        lambda: (nvidia / "capabilities/gpu0/mig/gi3/ci0").mkdir(),
        lambda: library.touch(),
    ]
    for number, step in enumerate(steps, start=2):
        step()
        assert driver_traces(host, "/libnvidia-ml.so.1") == driver_traces(host, "/libnvidia-ml.so.1")
        seen.add(driver_traces(host, "/libnvidia-ml.so.1"))
        assert len(seen) == number
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert node_traces(host)[-1] == ("nvidiactl",)
    assert generation(host, "570").endswith("/570")
