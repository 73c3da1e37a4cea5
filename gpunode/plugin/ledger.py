"""The ledger: the state of the node's GPUs, and per resource the list that is sent to the kubelet. It
receives all events.

`backend -> seen/readings/event/broken -> (plan, health) -> one Feed per resource -> ListAndWatch`. A plan is
made again when the inventory or the settings change, and what containers will need is prepared before it is
published; health only changes the problems of its devices. A feed is never removed: a resource that has no
devices any more is published as empty, because ending its stream would make the kubelet mark all devices
unhealthy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from threading import Condition, Lock
from typing import Protocol

from gpunode.errors import GpunodeError
from gpunode.gpu.model import Inventory, Reading, Topology
from gpunode.gpu.nvml import GpuEvent
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.health import HealthChecker
from gpunode.plugin.logfmt import Log, OnChange
from gpunode.plugin.model import (
    Backend,
    KubeletDevice,
    Problem,
    Resource,
    ResourcePlan,
    Snapshot,
    Unit,
    complete_inventory,
    how_to_fix,
)

Problems = Mapping[tuple[str, str], Problem]
"""By resource name and unit id; healthy units are not in it."""


class Veto(Protocol):
    """An additional veto on a device's allocation: MPS while its daemon is down."""

    def problem(self, resource: Resource, unit: Unit) -> Problem | None: ...


class Feed:
    """One resource's snapshots. Any number of streams may wait for the next one."""

    def __init__(self, resource: Resource) -> None:
        self._changed = Condition()
        self._snapshot = Snapshot(1, resource)

    def snapshot(self) -> Snapshot:
        return self._snapshot  # one reference, replaced as a whole

    def wait_newer(self, version: int, desired: Callable[[], bool]) -> Snapshot | None:
        """Block until there is something newer than `version`; None once `desired` returns False (see
        `wake`)."""
        with self._changed:
            self._changed.wait_for(lambda: self._snapshot.version > version or not desired())
            return self._snapshot if desired() else None

    def wake(self) -> None:
        """Make every waiter call its `desired` again."""
        with self._changed:
            self._changed.notify_all()

    def publish(self, resource: Resource) -> None:
        """Publish this from now on; an equal snapshot wakes no stream."""
        with self._changed:
            before = self._snapshot
            if resource == before.resource:
                return
            visible = _visible(resource) != _visible(before.resource)
            self._snapshot = Snapshot(before.version + visible, resource)
            if visible:
                self._changed.notify_all()


class Ledger:
    """Thread-safe. `changed` are called, outside the locks, after every change that a reader might need.

    Two locks: `_planning` is held while a plan is made and prepared, which may be slow; `_lock` protects the
    state and the feeds, always briefly, so that a GPU's failure is published without delay. Public attributes
    are replaced as a whole and may be read at any time.
    """

    def __init__(
        self,
        backend: Backend,
        settings: Settings,
        checker: HealthChecker,
        log: Log,
        clock: Callable[[], float],
    ) -> None:
        self._backend = backend
        self._checker = checker
        self._log = log
        self._say = OnChange(log)
        self._clock = clock
        self._planning = Lock()
        self._lock = Lock()
        self._reported: dict[str, Problem] = {}
        self._known: set[str] = set()
        self._left_out: dict[str, str] = {}
        self._shown: tuple[ResourcePlan, Problems] | None = None
        self.settings = settings
        self.inventory: Inventory | None = None
        self.topology = Topology()
        self.plan = ResourcePlan()
        self.planned = False  # the first plan is made: until then the empty one says nothing
        self.trouble = ""  # why the present GPUs can't be advertised with these settings
        self.config_trouble = ""  # why the present config file isn't the active one; see config/watch.py
        self.readings_now: dict[str, Reading] = {}
        self.feeds: dict[str, Feed] = {}
        self.vetoes: list[Veto] = []
        self.changed: list[Callable[[], None]] = []
        self.event_observers: list[Callable[[GpuEvent], None]] = []  # called by the backend's thread

    # --- events -----------------------------------------------------------------------------------------

    def seen(self, inventory: Inventory, topology: Topology) -> None:
        with self._planning:
            known = complete_inventory(inventory, self.inventory)
            with self._lock:
                self.inventory = known
                self.topology = topology
                self._checker.seen(known, self._clock())
                self._publish()  # a lost GPU is published as lost before anything else is done
            self._replan_or_say(known)
        self._notify()

    def replan(self) -> None:
        """Plan again for the known GPUs: another input of the plan has changed."""
        with self._planning:
            if self.inventory is not None:
                self._replan_or_say(self.inventory)
        self._notify()

    def readings(self, readings: Sequence[Reading]) -> None:
        with self._lock:
            self.readings_now = {reading.uuid: reading for reading in readings}
            self._checker.readings(readings, self._clock())
            self._publish()
        self._notify()

    def event(self, event: GpuEvent) -> None:
        with self._lock:
            self._checker.event(event, self._clock())
            self._publish()
        for observe in self.event_observers:
            observe(event)
        self._notify()

    def broken(self, reason: str, sure: bool) -> None:
        with self._lock:
            self._checker.broken(reason, sure, self._clock())
            self._publish()
        self._notify()

    def tick(self) -> None:
        """Advance the clock: hold-down times end, and vetoes are evaluated again."""
        with self._lock:
            self._checker.tick(self._clock())
            changed = self._publish()
        if changed:
            self._notify()

    def configure(self, settings: Settings) -> None:
        """Apply other settings. `GpunodeError` if they aren't valid for this node; then nothing has
        changed."""
        with self._planning:
            if self.inventory is not None:
                self._replan(settings, self.inventory)
            with self._lock:
                self.settings = settings
                self._checker.configure(settings.health)
                self._publish()
        self._notify()

    # --- planning and publishing ------------------------------------------------------------------------

    def _replan_or_say(self, inventory: Inventory) -> None:
        try:
            self._replan(self.settings, inventory)
        except GpunodeError as error:  # the advertised resources stay as they are
            self.trouble = error.message
            self._say.warning("the GPUs can't be advertised", reason=error.message, hint=error.hint)

    def _replan(self, settings: Settings, inventory: Inventory) -> None:
        plan = self._backend.plan(settings, inventory)
        self._backend.prepare(settings, inventory, plan)
        with self._lock:
            self.settings = settings
            self.trouble = ""
            self._say.reset()
            if plan == self.plan:
                self.planned = True
                return
            self.plan, self.planned = plan, True
            self._publish()
            self._report_left_out()

    def _publish(self) -> bool:
        """Publish the present state; return whether it has changed."""
        problems = {
            (resource.name, unit.id): problem
            for resource in self.plan.resources
            for unit in resource.units
            if (problem := self._problem(resource, unit))
        }
        if self._shown is not None and self._shown[0] is self.plan and self._shown[1] == problems:
            return False  # with a thousand shares the rest is slow, and health calls this every second
        self._shown = (self.plan, problems)
        planned = {resource.name: _with_problems(resource, problems) for resource in self.plan.resources}
        feeds = self.feeds
        for name in feeds.keys() - planned.keys():
            feeds[name].publish(replace(feeds[name].snapshot().resource, devices=()))
        # publish resources that lose devices first: a GPU that moves between resources is never in both
        for name in sorted(
            feeds.keys() & planned.keys(), key=lambda name: _gains(feeds[name], planned[name])
        ):
            feeds[name].publish(planned[name])
        new = {name: Feed(resource) for name, resource in planned.items() if name not in feeds}
        if new:
            self.feeds = {**feeds, **new}
        self._report_health(planned.values())  # last: a blocked log must not delay the kubelet
        return True

    def _problem(self, resource: Resource, unit: Unit) -> Problem | None:
        if problem := self._checker.problem(unit):
            return problem
        for veto in self.vetoes:
            if problem := veto.problem(resource, unit):
                return problem
        return None

    # --- reporting --------------------------------------------------------------------------------------

    def _report_health(self, resources: Iterable[Resource]) -> None:
        """Log one line for each unit that failed or recovered, however many shares it has."""
        devices = {device.unit.id: device for resource in resources for device in resource.devices}
        reported, self._reported = self._reported, {}
        for unit_id, device in devices.items():
            before, now = reported.get(unit_id), device.problem
            if now:
                self._reported[unit_id] = now
            where = {"device": unit_id, "index": device.unit.index}
            if now and (before is None or before.reason != now.reason):
                self._report_problem(now, device.unit)
            elif before and not now:
                self._log.info("GPU is ready" if before.starting else "GPU is healthy again", **where)

    def _report_problem(self, problem: Problem, unit: Unit) -> None:
        if problem.logged:
            return
        fields = {"device": unit.id, "index": unit.index, "code": problem.code, "reason": problem.reason}
        if problem.starting:
            self._log.info("GPU is not ready yet", **fields)
            return
        hint = how_to_fix(problem.mend, unit.gpu, unit.index, os.getpid())
        more = {"mend": problem.mend, "hint": hint} if problem.mend else {}
        self._log.error("GPU is unhealthy", **fields, **more)

    def _report_left_out(self) -> None:
        reasons = {item.id or item.index: item.reason for item in self.plan.left_out}
        for item in self.plan.left_out:
            if self._left_out.get(item.id or item.index) != item.reason:
                self._log.warning(
                    "GPU is not advertised", index=item.index, device=item.id, reason=item.reason
                )
        self._left_out = reasons
        for warning in self.plan.warnings:
            if warning not in self._known:
                self._log.warning(warning)
        self._known = set(self.plan.warnings)

    def _notify(self) -> None:
        for call in self.changed:
            call()


def _with_problems(resource: Resource, problems: Problems) -> Resource:
    """The planned resource with the present problems; a device without a problem is used unchanged."""
    unit_problems = {
        unit_id: problem for (name, unit_id), problem in problems.items() if name == resource.name
    }
    if not unit_problems:
        return resource
    return replace(
        resource,
        devices=tuple(
            KubeletDevice(item.id, item.unit, unit_problems[item.unit.id])
            if item.problem is None and item.unit.id in unit_problems
            else item
            for item in resource.devices
        ),
    )


def _gains(feed: Feed, resource: Resource) -> bool:
    known_devices = feed.snapshot().by_id
    return any(device.id not in known_devices for device in resource.devices)


def _visible(resource: Resource) -> list[tuple[str, bool, int | None]]:
    return [(device.id, device.healthy, device.unit.numa) for device in resource.devices]
