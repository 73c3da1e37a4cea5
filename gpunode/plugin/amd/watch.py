"""Looks at the AMD GPUs in sysfs, again and again: what is there, and in which condition."""

from __future__ import annotations

import math
from threading import Event

from gpunode.gpu.amd import missing, read_condition, read_inventory, trace
from gpunode.gpu.amd_kfd import read_nodes, read_topology
from gpunode.gpu.model import Inventory, Reading
from gpunode.host import Host
from gpunode.plugin.backend import Sink
from gpunode.plugin.logfmt import Log, OnChange
from gpunode.plugin.settings import Settings

_TURN_SECONDS = 2.0


class Watch:
    """Tells the sink what sysfs says. `waiting` is empty once GPUs were seen."""

    def __init__(self, host: Host, settings: Settings, log: Log) -> None:
        self._host = host
        self._settings = settings
        self._say = OnChange(log)
        self._soon = Event()
        self._trace: object = None
        self._inventory: Inventory | None = None
        self._next_look = 0.0
        self._next_reading = 0.0
        self.waiting = "waiting for the amdgpu driver"

    def run(self, sink: Sink, stop: Event) -> None:
        """Traces are compared now and then; everything is read when they differ, and where something could
        not be read."""
        turn = min(_TURN_SECONDS, self._settings.rediscover_seconds)
        while True:
            self._soon.clear()  # before the look at `stop`, so that no hurry is missed
            if stop.is_set():
                return
            self._turn(sink)
            self._soon.wait(turn)

    def hurry(self) -> None:
        self._next_look = 0.0
        self._soon.set()

    def _turn(self, sink: Sink) -> None:
        reason = missing(self._host)
        if reason:
            self.waiting = f"waiting for the AMD GPUs: {reason}"
            self._say.warning(self.waiting, hint="modprobe amdgpu; gpunode doctor")
            self._trace = self._inventory = None
            sink.broken(reason, sure=True)
            return
        now, seen = self._host.monotonic(), trace(self._host)
        if seen != self._trace or now >= self._next_look:
            self._trace = seen
            self._next_look = now + self._look(sink, now)
        elif self._inventory is not None and now >= self._next_reading:
            self._read(sink, self._conditions(self._inventory), now)

    def _conditions(self, inventory: Inventory) -> list[Reading]:
        return [read_condition(self._host, gpu) for gpu in inventory.gpus]

    def _read(self, sink: Sink, readings: list[Reading], now: float) -> None:
        self._next_reading = now + self._settings.health.poll_seconds
        sink.readings(readings)

    def _look(self, sink: Sink, now: float) -> float:
        """In how many seconds to look again, if nothing changes meanwhile: news is looked at twice.

        Errors are counted from what there was before the GPUs are advertised: none that a container meets is
        passed over.
        """
        before, nodes = self._inventory, read_nodes(self._host)
        seen = self._inventory = read_inventory(self._host, nodes)
        conditions = self._conditions(seen)
        sink.seen(seen, read_topology(seen, nodes))
        self._read(sink, conditions, now)
        self.waiting = ""
        self._say.reset()
        if seen != before:
            return _TURN_SECONDS
        return self._settings.rediscover_seconds if any(gpu.error for gpu in seen.gpus) else math.inf
