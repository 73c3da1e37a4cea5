"""The ledger: after any events in any order, the feeds equal a fresh computation."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from threading import Event, Thread
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpunode.errors import ConfigError
from gpunode.gpu.model import Inventory, Reading, Topology
from gpunode.gpu.nvml import GpuEvent
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.ledger import Feed, Ledger
from gpunode.plugin.model import Problem, Resource, ResourcePlan, Snapshot, Unit
from tests.plugin.fakes import FakeBackend, FakeChecker
from tests.plugin.nodes import MemoryLog, eventually, feed, inventory, resource
from tests.waiting import PATIENCE

A, B = "nvidia.com/a", "nvidia.com/b"


def made(backend: FakeBackend | None = None) -> tuple[Ledger, FakeBackend, FakeChecker, MemoryLog]:
    backend, checker, log = backend or FakeBackend({A: 2}), FakeChecker(), MemoryLog()
    ledger = Ledger(backend, Settings(), checker, log, time.time)
    backend.sink = ledger
    return ledger, backend, checker, log


@pytest.mark.parametrize("resources", [{A: 2}, {}])
def test_empty_plan_is_not_active_before_the_first_one_is_made(resources: dict[str, int]) -> None:
    """Without MPS resources in it, the daemons of a killed plugin would be ended, and pods' programs too."""
    planned: list[bool] = []

    class Planning(FakeBackend):
        def plan(self, settings: Settings, seen: Inventory) -> ResourcePlan:
            planned.append(ledger.planned)
            return super().plan(settings, seen)

    ledger, backend, _, _ = made(Planning(resources))
    backend.look()
    assert planned == [False]
    assert ledger.planned


class Condemns:
    """Like MPS while its daemon is down."""

    def __init__(self) -> None:
        self.names: frozenset[str] = frozenset()

    def problem(self, resource: Resource, unit: Unit) -> Problem | None:
        return Problem("mps", "no daemon") if resource.name in self.names else None


class Simulation:
    """A ledger and what can change its feeds. Each method below `__init__` is one event with its value."""

    def __init__(self) -> None:
        self.ledger, self.backend, self.checker, _ = made(FakeBackend({}))
        self.veto = Condemns()
        self.ledger.vetoes.append(self.veto)

    def show(self, resources: dict[str, int]) -> None:
        self.backend.resources = resources
        self.backend.look()

    def share(self, shares: int) -> None:
        self.backend.shares = shares
        self.backend.look()

    def refuse(self, refuses: bool) -> None:
        self.backend.refuses = "no" if refuses else ""
        self.backend.look()

    def report_xid(self, error: tuple[str, int, int]) -> None:
        name, index, xid = error
        self.ledger.event(GpuEvent("xid", f"{name}-{index}", xid))

    def condemn(self, names: frozenset[str]) -> None:
        self.veto.names = names
        self.ledger.tick()

    def tick(self, _: None) -> None:
        self.ledger.tick()

    def read_sensors(self, _: None) -> None:
        self.ledger.readings([Reading("GPU-1")])

    def configure(self, pass_device_specs: bool) -> None:
        before = self.ledger.settings
        after = replace(before, pass_device_specs=pass_device_specs)
        try:
            self.ledger.configure(after)
        except ConfigError:
            assert self.ledger.settings is before
        else:
            assert self.ledger.settings == after


RESOURCE = st.sampled_from([A, B])
VALUES: dict[Callable[[Simulation, Any], None], st.SearchStrategy[Any]] = {
    Simulation.show: st.dictionaries(RESOURCE, st.integers(0, 3)),
    Simulation.refuse: st.booleans(),
    Simulation.share: st.sampled_from([1, 3]),
    Simulation.report_xid: st.tuples(RESOURCE, st.integers(0, 2), st.sampled_from([0, 13, 79])),
    Simulation.condemn: st.frozensets(RESOURCE),
    Simulation.tick: st.none(),
    Simulation.read_sensors: st.none(),
    Simulation.configure: st.booleans(),
}
EVENT = st.one_of(*(st.tuples(st.just(event), values) for event, values in VALUES.items()))


@settings(max_examples=150, deadline=None)
@given(st.lists(EVENT, max_size=25))
def test_feeds_always_equal_a_fresh_computation(
    events: list[tuple[Callable[[Simulation, Any], None], Any]],
) -> None:
    simulation = Simulation()
    ledger, backend = simulation.ledger, simulation.backend
    last_good = ResourcePlan()
    versions: dict[str, int] = {}

    for event, value in events:
        event(simulation, value)

        check_feeds(simulation)
        if ledger.inventory is not None and not backend.refuses:
            last_good = backend.plan(Settings(), ledger.inventory)
        if not backend.refuses and event in (Simulation.show, Simulation.share):
            assert ledger.plan == last_good
            assert ledger.trouble == ""
        for name, one in ledger.feeds.items():
            assert one.snapshot().version >= versions.get(name, 1)
            versions[name] = one.snapshot().version


def check_feeds(simulation: Simulation) -> None:
    """Every resource of the plan has its devices with their present problems. A feed of a resource that left
    the plan stays, without devices."""
    ledger = simulation.ledger
    planned = {one.name: one.devices for one in ledger.plan.resources}
    assert set(planned) <= set(ledger.feeds)
    for name, one in ledger.feeds.items():
        shown = one.snapshot()
        assert [device.id for device in shown.devices] == [device.id for device in planned.get(name, ())]
        for device in shown.devices:
            health = simulation.checker.problem(device.unit)
            assert device.problem == (health or simulation.veto.problem(shown.resource, device.unit))
        assert shown.healthy == sum(device.healthy for device in shown.devices)


def test_container_files_are_prepared_before_a_plan_is_advertised() -> None:
    ledger, backend, _, _ = made()
    order = []

    def prepare(*given: object) -> None:
        order.append(("prepare", {name: len(one.snapshot().devices) for name, one in ledger.feeds.items()}))

    backend.prepare = prepare  # type: ignore[method-assign, assignment]
    backend.show(a=2)
    backend.show(a=3)
    assert order == [("prepare", {}), ("prepare", {A: 2})]
    assert len(ledger.feeds[A].snapshot().devices) == 3


def test_failed_plan_keeps_the_last_valid_one_and_logs_the_reason_once() -> None:
    ledger, backend, _, log = made()
    backend.look()
    backend.refuses = "one reason"
    for _ in range(3):
        backend.look()
    assert ledger.trouble == "one reason"
    assert len(ledger.feeds[A].snapshot().devices) == 2
    backend.refuses = "another"
    backend.look()
    assert log.reasons() == ["one reason", "another"]
    backend.refuses = ""
    backend.look()
    assert ledger.trouble == ""


def test_unhealthy_state_does_not_wait_for_the_preparation() -> None:
    ledger, backend, _, _ = made()
    backend.look()
    begun, go_on = Event(), Event()

    def slow(*given: object) -> None:
        begun.set()
        assert go_on.wait(PATIENCE)

    backend.prepare = slow  # type: ignore[method-assign, assignment]
    writer = Thread(target=lambda: backend.show(a=3))
    writer.start()
    try:
        assert begun.wait(PATIENCE)
        ledger.event(GpuEvent("xid", f"{A}-0", 79))
        ledger.tick()
        assert ledger.feeds[A].snapshot().healthy == 1
    finally:
        go_on.set()
        writer.join(30)
    assert (ledger.feeds[A].snapshot().healthy, len(ledger.feeds[A].snapshot().devices)) == (2, 3)


def test_unchanged_state_notifies_no_waiter_and_keeps_the_version() -> None:
    ledger, backend, _, _ = made()
    backend.look()
    before = ledger.feeds[A].snapshot()
    notified = []
    ledger.changed.append(lambda: notified.append(1))
    for _ in range(5):
        ledger.tick()
    assert notified == []
    backend.look()
    assert ledger.feeds[A].snapshot() is before


def test_changed_reason_is_visible_without_a_kubelet_update() -> None:
    ledger, backend, _, log = made()
    backend.look()
    for xid in (79, 48):
        ledger.event(GpuEvent("xid", f"{A}-0", xid))
    shown = ledger.feeds[A].snapshot()
    assert shown.version == 2
    assert shown.devices[0].problem is not None
    assert shown.devices[0].problem.code == "xid-48"
    ledger.event(GpuEvent("xid", f"{A}-0", 0))
    assert log.messages() == ["GPU is unhealthy", "GPU is unhealthy", "GPU is healthy again"]


def test_idle_tick_is_cheap_with_a_thousand_shares() -> None:
    backend = FakeBackend({A: 8})
    backend.shares = 128
    ledger, _, _, _ = made(backend)
    backend.look()
    assert len(ledger.feeds[A].snapshot().devices) == 1024
    best = min(timed(ledger) for _ in range(20))
    assert best < 0.001, f"{best * 1e6:.0f} us"


def timed(ledger: Ledger) -> float:
    started = time.thread_time()
    ledger.tick()
    return time.thread_time() - started


def test_every_waiter_sees_the_last_of_many_changes() -> None:
    """Concurrent writers and readers: no reader may miss a wake-up or see a version decrease."""
    one = feed(4)
    seen: list[list[int]] = [[] for _ in range(4)]
    going = [True]

    def follow(mine: list[int]) -> None:
        version = -1
        while (snapshot := one.wait_newer(version, lambda: going[0])) is not None:
            version = snapshot.version
            mine.append(version)

    readers = [Thread(target=follow, args=(mine,)) for mine in seen]
    for reader in readers:
        reader.start()
    for turn in range(500):
        one.publish(resource(4, sick={turn % 4: "XID 79"}))
    last = one.snapshot().version
    assert last == 501
    assert eventually(lambda: all(mine and mine[-1] == last for mine in seen))
    going[0] = False
    one.wake()
    for reader in readers:
        reader.join(30)
        assert not reader.is_alive()
    assert all(mine == sorted(set(mine)) for mine in seen)


@pytest.mark.parametrize("first", [True, False])
def test_stopped_waiter_gets_no_update(first: bool) -> None:
    one: Feed = feed(1)
    answer: list[Snapshot | None] = []
    wanted = [not first]
    waiter = Thread(target=lambda: answer.append(one.wait_newer(1, lambda: wanted[0])))
    waiter.start()
    wanted[0] = False
    one.wake()
    waiter.join(30)
    assert not waiter.is_alive()
    assert answer == [None]


def test_inventory_is_merged_with_known_devices() -> None:
    ledger, _, _, _ = made()
    ledger.seen(inventory(2), Topology())
    ledger.seen(inventory(1), Topology())
    assert ledger.inventory is not None
    assert [bool(gpu.error) for gpu in ledger.inventory.gpus] == [False, True]


def test_problem_already_logged_is_not_logged_for_each_device() -> None:
    ledger, backend, _, log = made(FakeBackend({A: 8}))

    class WithoutFiles:
        problems = True

        def problem(self, resource: Resource, unit: Unit) -> Problem | None:
            return Problem("cdi", "no CDI specification", logged=True) if self.problems else None

    condemner = WithoutFiles()
    ledger.vetoes.append(condemner)
    backend.look()
    assert [bool(device.problem) for device in ledger.feeds[A].snapshot().devices] == [True] * 8
    assert log.messages("error") == []
    condemner.problems = False
    ledger.tick()
    assert not any(device.problem for device in ledger.feeds[A].snapshot().devices)
