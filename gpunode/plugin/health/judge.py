"""The judge: takes news of the GPUs and tells each unit's problem."""

from __future__ import annotations

from collections.abc import Sequence

from gpunode.gpu.events import GpuEvent
from gpunode.gpu.model import Inventory, Reading
from gpunode.plugin.model import Problem, Unit
from gpunode.plugin.settings import HealthSettings


class HealthJudge:
    """See `gpunode.plugin.ledger.Judge`."""

    def __init__(self, settings: HealthSettings) -> None:
        self._settings = settings
        self._lost: dict[str, Problem] = {}
        self._broken: Problem | None = None
        self._events: dict[str, Problem] = {}

    def configure(self, settings: HealthSettings) -> None:
        self._settings = settings

    def seen(self, inventory: Inventory, now: float) -> None:
        self._broken = None
        self._lost = {gpu.uuid: Problem("lost", gpu.error, now) for gpu in inventory.gpus if gpu.error}

    def readings(self, readings: Sequence[Reading], now: float) -> None:
        """Nothing yet."""

    def event(self, event: GpuEvent, now: float) -> None:
        if event.xid is not None:
            self._events[event.uuid] = Problem(f"xid-{event.xid}", f"XID {event.xid}", now)

    def broken(self, reason: str, sure: bool, now: float) -> None:
        self._broken = Problem("driver", reason, now)

    def tick(self, now: float) -> None:
        """Nothing ends yet."""

    def problem(self, unit: Unit) -> Problem | None:
        return self._events.get(unit.gpu) or self._lost.get(unit.gpu) or self._broken
