"""A backend that advertises what a test sets, and a checker without memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import Any

from gpunode.errors import ConfigError
from gpunode.gpu.model import Inventory, Topology
from gpunode.gpu.nvml import GpuEvent
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.health import HealthChecker
from gpunode.plugin.model import (
    Answer,
    KubeletDevice,
    Problem,
    ReportReceiver,
    Resource,
    ResourcePlan,
    Snapshot,
    Unit,
)
from tests.plugin.nodes import inventory


@dataclass
class FakeBackend:
    """`resources` maps names to numbers of GPUs, which are named after their resource."""

    resources: dict[str, int] = field(default_factory=dict)
    shares: int = 1
    refuses: str = ""
    waiting: str = ""
    prepared: list[ResourcePlan] = field(default_factory=list)
    sink: ReportReceiver | None = None

    def run(self, sink: ReportReceiver, stop: Event) -> None:
        self.sink = sink
        self.look()
        stop.wait()

    def hurry(self) -> None:
        """Polls nothing."""

    def let_go(self) -> None:
        """Holds nothing."""

    def show(self, **resources: int) -> None:
        """nvidia.com/NAME for each keyword."""
        self.resources = {f"nvidia.com/{name}": count for name, count in resources.items()}
        self.look()

    def look(self) -> None:
        assert self.sink is not None
        self.sink.seen(inventory(1), Topology())

    def plan(self, settings: Settings, seen: Inventory) -> ResourcePlan:
        if self.refuses:
            raise ConfigError(self.refuses)
        return ResourcePlan(
            tuple(Resource(name, self._devices(name, count)) for name, count in self.resources.items())
        )

    def _devices(self, name: str, count: int) -> tuple[KubeletDevice, ...]:
        units = [Unit(f"{name}-{index}", f"{name}-{index}", str(index)) for index in range(count)]
        if self.shares == 1:
            return tuple(KubeletDevice(unit.id, unit) for unit in units)
        return tuple(KubeletDevice(f"{unit.id}::{n}", unit) for unit in units for n in range(self.shares))

    def prepare(self, settings: Settings, seen: Inventory, plan: ResourcePlan) -> None:
        self.prepared.append(plan)

    def answer(self, settings: Settings, snapshot: Snapshot, ids: Sequence[str]) -> Answer:
        return Answer({"IDS": ",".join(ids), snapshot.resource.name: "here"})


class FakeChecker(HealthChecker):
    """An event marks the unit that it names, one with XID 0 clears it; other events are ignored."""

    def __init__(self) -> None:
        self.bad: dict[str, Problem] = {}

    def configure(self, settings: Any) -> None: ...

    def seen(self, inventory: Inventory, now: float) -> None: ...

    def readings(self, readings: Any, now: float) -> None: ...

    def event(self, event: GpuEvent, now: float) -> None:
        if event.xid:
            self.bad[event.uuid] = Problem(f"xid-{event.xid}", f"XID {event.xid}", now)
        else:
            self.bad.pop(event.uuid, None)

    def broken(self, reason: str, sure: bool, now: float) -> None: ...

    def tick(self, now: float) -> None: ...

    def problem(self, unit: Unit) -> Problem | None:
        return self.bad.get(unit.gpu)
