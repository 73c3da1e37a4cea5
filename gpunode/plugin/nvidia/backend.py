"""The NVIDIA backend: NVML tells (watch.py), resources.py plans, cdi_specs.py prepares, response.py
answers."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event
from typing import TYPE_CHECKING

from gpunode.gpu.model import Inventory, Topology
from gpunode.host import Host
from gpunode.plugin.backend import Sink
from gpunode.plugin.logfmt import Log
from gpunode.plugin.model import Answer, Plan, Problem, Resource, Snapshot, Unit
from gpunode.plugin.nvidia.resources import plan
from gpunode.plugin.nvidia.response import answer
from gpunode.plugin.nvidia.site import uses_cdi
from gpunode.plugin.nvidia.watch import Watch
from gpunode.plugin.placement.choose import prefer
from gpunode.plugin.settings import Settings

if TYPE_CHECKING:
    from gpunode.plugin.nvidia.cdi_specs import CdiSpecs


class NvidiaBackend:
    """See `gpunode.plugin.backend.Backend`. It is a `Part` and a `Condemner` for its CDI specifications."""

    def __init__(self, host: Host, settings: Settings, log: Log) -> None:
        self._host = host
        self._log = log
        self._watch = Watch(host, settings, log)
        self._specs: CdiSpecs | None = None

    @property
    def waiting(self) -> str:
        return self._watch.waiting

    def run(self, sink: Sink, stop: Event) -> None:
        self._watch.run(sink, stop)

    def hurry(self) -> None:
        self._watch.hurry()

    def let_go(self) -> None:
        self._watch.let_go()

    def plan(self, settings: Settings, inventory: Inventory) -> Plan:
        return plan(self._host, settings, inventory)

    def prepare(self, settings: Settings, inventory: Inventory, plan: Plan) -> None:
        self._watch.configure(settings)
        if self._specs is None and uses_cdi(settings):
            from gpunode.plugin.nvidia.cdi_specs import CdiSpecs  # half a megabyte that few need

            self._specs = CdiSpecs(self._host, self._log)
        if self._specs is not None:
            self._specs.write(settings, inventory, plan)

    def problem(self, resource: Resource, unit: Unit) -> Problem | None:
        return self._specs.problem(resource, unit) if self._specs is not None else None

    def tick(self, now: float) -> None:
        if self._specs is not None:
            self._specs.tick(now)

    def close(self) -> None:
        """The specifications stay."""

    def answer(self, settings: Settings, snapshot: Snapshot, ids: Sequence[str]) -> Answer:
        return answer(settings, snapshot, ids)

    def prefer(
        self,
        settings: Settings,
        snapshot: Snapshot,
        topology: Topology,
        available: Sequence[str],
        must_include: Sequence[str],
        size: int,
    ) -> tuple[str, ...]:
        return prefer(settings, snapshot, topology, available, must_include, size)
