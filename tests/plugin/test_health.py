"""Which events condemn a GPU, and the watcher's manners when NVML misbehaves."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread
from typing import cast

import pytest

from gpunode.errors import GpunodeError
from gpunode.gpu.nvml import GpuEvent, Nvml, NvmlError
from gpunode.plugin.devices import DeviceTable
from gpunode.plugin.health import HealthMonitor, condemning
from tests.plugin.nodes import MemoryLog, eventually, table, uuid


@pytest.mark.parametrize("xid", [13, 31, 43, 45, 68, 109])
def test_an_application_fault_condemns_nothing(xid: int) -> None:
    assert condemning(GpuEvent("xid", uuid(0), xid)) == ""


@pytest.mark.parametrize("xid", [48, 62, 63, 64, 74, 79, 92, 94, 95, 119, 143, 1])
def test_every_other_xid_condemns_and_is_named(xid: int) -> None:
    assert condemning(GpuEvent("xid", uuid(0), xid)).startswith(f"XID {xid}")


def test_of_the_ecc_errors_only_the_double_bit_ones_condemn() -> None:
    assert condemning(GpuEvent("ecc-double", uuid(0))) == "double-bit ECC error"
    assert condemning(GpuEvent("ecc-single", uuid(0))) == ""


class FakeEvents:
    """Stands in for an NVML event set, to give errors between waits at exact moments."""

    def __init__(self, script: list[GpuEvent | NvmlError], stop: Event) -> None:
        self.script = script
        self.stop = stop
        self.unsupported: tuple[str, ...] = ()
        self.failed: dict[str, NvmlError] = {}

    def wait(self, timeout_seconds: float) -> GpuEvent | None:
        if not self.script:
            self.stop.wait(0.01)
            return None
        step = self.script.pop(0)
        if isinstance(step, NvmlError):
            raise step
        return step

    def close(self) -> None:
        pass


class FakeNvml:
    def __init__(self, events: FakeEvents) -> None:
        self.events = events

    def __enter__(self) -> FakeNvml:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def watch_events(self, uuids: tuple[str, ...]) -> FakeEvents:
        return self.events


def watch(made: DeviceTable, script: list[GpuEvent | NvmlError], until: Callable[[int], bool]) -> list[str]:
    """Run a monitor over `script` until `until(times NVML was opened)`; returns who was asked to hurry."""
    stop = Event()
    opened: list[int] = []
    hurried: list[str] = []

    def open_nvml() -> FakeNvml:
        opened.append(1)
        return FakeNvml(FakeEvents(script, stop))

    open_fake = cast("Callable[[], Nvml]", open_nvml)
    monitor = HealthMonitor(
        made, MemoryLog(), lambda: hurried.append("discovery"), open_fake, retry_seconds=0.01
    )
    thread = Thread(target=monitor.run, args=(stop,))
    thread.start()
    try:
        assert eventually(lambda: until(len(opened)))
    finally:
        stop.set()
        thread.join(5)
    assert not thread.is_alive()
    return hurried


def bad(made: DeviceTable) -> list[str]:
    return [device.id for device in made.snapshot().devices if not device.healthy]


def test_an_error_while_waiting_marks_nothing_opens_nvml_again_and_later_events_count() -> None:
    made = table(4)
    script: list[GpuEvent | NvmlError] = [NvmlError(15), NvmlError(999), GpuEvent("xid", uuid(2), 79)]
    hurried = watch(made, script, lambda opened: opened == 3 and bad(made) == [uuid(2)])
    assert hurried == ["discovery", "discovery"]


def test_an_event_of_no_known_gpu_condemns_none_and_makes_discovery_look() -> None:
    made = table(4)
    script: list[GpuEvent | NvmlError] = [GpuEvent("xid", "", 79)]
    assert watch(made, script, lambda opened: opened == 1 and not script) == ["discovery"]
    assert bad(made) == []


def test_nothing_is_watched_while_there_are_no_gpus() -> None:
    stop = Event()
    asked: list[str] = []

    def open_nvml() -> Nvml:
        asked.append("opened")
        raise NvmlError(9)

    monitor = HealthMonitor(DeviceTable(), MemoryLog(), lambda: None, open_nvml)
    thread = Thread(target=monitor.run, args=(stop,))
    thread.start()
    stop.set()
    thread.join(5)
    assert asked == []


def test_a_driver_that_was_replaced_under_the_plugin_ends_it() -> None:
    """Discovery's fresh processes see the GPUs, this process's library is of the driver before."""

    def open_nvml() -> Nvml:
        raise NvmlError(18)

    asked: list[str] = []
    monitor = HealthMonitor(table(2), MemoryLog(), lambda: asked.append("look"), open_nvml, 0.01)
    with pytest.raises(GpunodeError, match="the driver was replaced"):
        monitor.run(Event())
    assert len(asked) == 3


def test_an_nvml_that_fails_every_time_is_tried_ever_more_rarely() -> None:
    monitor = HealthMonitor(table(2), MemoryLog(), lambda: None)
    pauses = [monitor._pause_after(NvmlError(15)) for _ in range(6)]
    assert pauses == [5, 10, 20, 40, 60, 60]


def test_a_storm_of_equal_events_is_one_line_and_one_look() -> None:
    log = MemoryLog()
    asked: list[str] = []
    monitor = HealthMonitor(table(2), log, lambda: asked.append("look"))
    for _ in range(1000):
        monitor.take(GpuEvent("ecc-single", uuid(0)))
        monitor.take(GpuEvent("xid", "", 79))
    assert log.messages() == ["ignored GPU event", "health event of an unknown GPU"]
    assert asked == ["look"]


def test_an_nvml_that_opens_and_fails_again_and_again_fills_no_log() -> None:
    log = MemoryLog()
    stop = Event()
    opened: list[int] = []

    def open_nvml() -> FakeNvml:
        opened.append(1)
        return FakeNvml(FakeEvents([NvmlError(15)], stop))

    open_fake = cast("Callable[[], Nvml]", open_nvml)
    monitor = HealthMonitor(table(2), log, lambda: None, open_fake, retry_seconds=0.0)
    thread = Thread(target=monitor.run, args=(stop,))
    thread.start()
    assert eventually(lambda: len(opened) > 20)
    stop.set()
    thread.join(5)
    assert log.messages() == [
        "watching health events",
        "health events can't be watched, trying again",
    ]
