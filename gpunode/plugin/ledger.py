"""The ledger: what is known of the node's GPUs, and per resource what the kubelet is told. All news comes
here.

`backend -> seen/readings/event/broken -> (plan, health) -> one Feed per resource -> ListAndWatch`. A plan is
made anew when the inventory or the settings change, and what containers will need is prepared before it is
shown; health only changes the problems of its devices. A feed, once there, stays: a resource that has no
devices any more is shown empty, as ending its stream would make the kubelet doubt everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from threading import Condition, Lock
from typing import Protocol

from gpunode.errors import GpunodeError
from gpunode.gpu.events import GpuEvent
from gpunode.gpu.model import Inventory, Reading, Topology
from gpunode.plugin.backend import Backend
from gpunode.plugin.logfmt import Log, OnChange
from gpunode.plugin.model import Device, Plan, Problem, Resource, Snapshot, Unit
from gpunode.plugin.remember import remembered
from gpunode.plugin.settings import HealthSettings, Settings


class Judge(Protocol):
    """Health: takes the same news and tells each unit's problem. `now` is seconds since the epoch.

    The ledger calls it under its own lock, one call at a time. Methods return nothing; what changed is seen
    by asking `problem` again, which is cheap.
    """

    def configure(self, settings: HealthSettings) -> None: ...

    def seen(self, inventory: Inventory, now: float) -> None: ...

    def readings(self, readings: Sequence[Reading], now: float) -> None: ...

    def event(self, event: GpuEvent, now: float) -> None: ...

    def broken(self, reason: str, sure: bool, now: float) -> None: ...

    def tick(self, now: float) -> None: ...

    def problem(self, unit: Unit) -> Problem | None: ...


class Condemner(Protocol):
    """Somebody else who can keep a device from being handed out: MPS while its daemon is down."""

    def problem(self, resource: Resource, unit: Unit) -> Problem | None: ...


class Feed:
    """One resource's snapshots. Any number of streams may wait for the next one."""

    def __init__(self, resource: Resource) -> None:
        self._changed = Condition()
        self._snapshot = Snapshot(1, resource)

    def snapshot(self) -> Snapshot:
        return self._snapshot  # one reference, replaced as a whole

    def wait_newer(self, version: int, wanted: Callable[[], bool]) -> Snapshot | None:
        """Block until there is something newer than `version`; None once `wanted` says no (see `wake`)."""
        with self._changed:
            self._changed.wait_for(lambda: self._snapshot.version > version or not wanted())
            return self._snapshot if wanted() else None

    def wake(self) -> None:
        """Let every waiter ask its `wanted` again."""
        with self._changed:
            self._changed.notify_all()

    def publish(self, resource: Resource) -> None:
        """Show this from now on; the same again wakes nobody."""
        with self._changed:
            visible = _visible(resource) != _visible(self._snapshot.resource)
            self._snapshot = Snapshot(self._snapshot.version + visible, resource)
            if visible:
                self._changed.notify_all()


class Ledger:
    """Thread-safe. `changed` are called, outside the lock, after anything that a reader might want to
    know."""

    def __init__(
        self, backend: Backend, settings: Settings, judge: Judge, log: Log, clock: Callable[[], float]
    ) -> None:
        self._backend = backend
        self._judge = judge
        self._log = log
        self._say = OnChange(log)
        self._clock = clock
        self._lock = Lock()
        self._told: dict[str, Problem] = {}
        self._known: set[str] = set()
        self._left_out: dict[str, str] = {}
        self.settings = settings
        self.inventory: Inventory | None = None
        self.topology = Topology()
        self.plan = Plan()
        self.trouble = ""  # why the GPUs seen last can't be advertised as the settings ask
        self._shown: object = None
        self.readings_now: dict[str, Reading] = {}
        self.feeds: dict[str, Feed] = {}
        self.condemners: list[Condemner] = []
        self.changed: list[Callable[[], None]] = []

    # --- news ------------------------------------------------------------------------------------------

    def seen(self, inventory: Inventory, topology: Topology) -> None:
        with self._lock:
            self.inventory = remembered(inventory, self.inventory)
            self.topology = topology
            self._judge.seen(self.inventory, self._clock())
            try:
                self._replan(self.settings)
            except GpunodeError as error:  # what is advertised stays as it is
                self.trouble = error.message
                self._say.warning("these GPUs can't be advertised", reason=error.message, hint=error.hint)
                self._publish()
        self._tell()

    def readings(self, readings: Sequence[Reading]) -> None:
        with self._lock:
            self.readings_now = {reading.uuid: reading for reading in readings}
            self._judge.readings(readings, self._clock())
            self._publish()
        self._tell()

    def event(self, event: GpuEvent) -> None:
        with self._lock:
            self._judge.event(event, self._clock())
            self._publish()
        self._tell()

    def broken(self, reason: str, sure: bool) -> None:
        with self._lock:
            self._judge.broken(reason, sure, self._clock())
            self._publish()
        self._tell()

    def tick(self) -> None:
        """Let time pass: hold-down times end."""
        with self._lock:
            self._judge.tick(self._clock())
            self._publish()
        self._tell()

    def configure(self, settings: Settings) -> None:
        """Take other settings. `ConfigError` if they can't hold for this node; then nothing has changed."""
        with self._lock:
            if self.inventory is None:
                self.settings = settings
            else:
                self._replan(settings)
            self._judge.configure(settings.health)
            self._publish()
        self._tell()

    # --- what follows from it --------------------------------------------------------------------------

    def _replan(self, settings: Settings) -> None:
        assert self.inventory is not None
        plan = self._backend.plan(settings, self.inventory)
        self._backend.prepare(settings, self.inventory, plan)
        self.settings = settings
        self.plan = plan
        self.trouble = ""
        self._report_left_out()
        self._publish()

    def _publish(self) -> None:
        problems = {
            (resource.name, unit.id): self._problem(resource, unit)
            for resource in self.plan.resources
            for unit in resource.units
        }
        if self._shown == (self.plan, problems):
            return  # with a thousand shares the rest is dear, and health asks every second
        self._shown = (self.plan, problems)
        planned = {resource.name: _judged(resource, problems) for resource in self.plan.resources}
        self._report_health(planned.values())
        for name, feed in self.feeds.items():
            feed.publish(
                planned.pop(name) if name in planned else replace(feed.snapshot().resource, devices=())
            )
        self.feeds |= {name: Feed(resource) for name, resource in planned.items()}

    def _problem(self, resource: Resource, unit: Unit) -> Problem | None:
        found = (condemner.problem(resource, unit) for condemner in self.condemners)
        return self._judge.problem(unit) or next((problem for problem in found if problem), None)

    # --- saying it -------------------------------------------------------------------------------------

    def _report_health(self, resources: Iterable[Resource]) -> None:
        """One line for each unit that failed or healed, however many shares it has."""
        devices = {device.unit.id: device for resource in resources for device in resource.devices}
        for unit_id, device in devices.items():
            before, now = self._told.pop(unit_id, None), device.problem
            if now:
                self._told[unit_id] = now
            where = {"device": unit_id, "index": device.unit.index}
            if now and (before is None or before.reason != now.reason):
                more = {"mend": now.mend} if now.mend else {}
                self._log.error("GPU is unhealthy", **where, code=now.code, reason=now.reason, **more)
            elif before and not now:
                self._log.info("GPU is healthy again", **where)

    def _report_left_out(self) -> None:
        found = {item.id or item.index: item.reason for item in self.plan.left_out}
        for item in self.plan.left_out:
            if self._left_out.get(item.id or item.index) != item.reason:
                self._log.warning(
                    "GPU is not advertised", index=item.index, device=item.id, reason=item.reason
                )
        self._left_out = found
        for warning in self.plan.warnings:
            if warning not in self._known:
                self._log.warning(warning)
        self._known = set(self.plan.warnings)

    def _tell(self) -> None:
        for call in self.changed:
            call()


def _judged(resource: Resource, problems: Mapping[tuple[str, str], Problem | None]) -> Resource:
    return replace(
        resource,
        devices=tuple(
            Device(item.id, item.unit, item.problem or problems[resource.name, item.unit.id])
            for item in resource.devices
        ),
    )


def _visible(resource: Resource) -> list[tuple[str, bool, int | None]]:
    return [(device.id, device.healthy, device.unit.numa) for device in resource.devices]
