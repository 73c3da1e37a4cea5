"""The NVIDIA backend: NVML tells (watch.py), resources.py plans, cdi_specs.py prepares, response.py
answers."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event

from gpunode.gpu.model import Inventory, Topology
from gpunode.host import Host
from gpunode.plugin.backend import Sink
from gpunode.plugin.logfmt import Log
from gpunode.plugin.model import Answer, Plan, Snapshot
from gpunode.plugin.nvidia.cdi_specs import write_specs
from gpunode.plugin.nvidia.resources import plan
from gpunode.plugin.nvidia.response import answer
from gpunode.plugin.nvidia.watch import Watch
from gpunode.plugin.placement.choose import prefer
from gpunode.plugin.settings import Settings


class NvidiaBackend:
    """See `gpunode.plugin.backend.Backend`."""

    def __init__(self, host: Host, settings: Settings, log: Log) -> None:
        self._host = host
        self._log = log
        self._watch = Watch(host, settings, log)

    @property
    def waiting(self) -> str:
        return self._watch.waiting

    def run(self, sink: Sink, stop: Event) -> None:
        self._watch.run(sink, stop)

    def hurry(self) -> None:
        self._watch.hurry()

    def plan(self, settings: Settings, inventory: Inventory) -> Plan:
        return plan(self._host, settings, inventory)

    def prepare(self, settings: Settings, inventory: Inventory, plan: Plan) -> None:
        write_specs(self._host, settings, inventory, plan, self._log)

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
