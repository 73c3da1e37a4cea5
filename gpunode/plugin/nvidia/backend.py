"""The NVIDIA backend: watch.py queries NVML, resources.py plans, cdi.py prepares, response.py answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event
from typing import TYPE_CHECKING

from gpunode.errors import GpunodeError
from gpunode.gpu.model import Inventory
from gpunode.host import Host
from gpunode.plugin.background import BackgroundTask
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.logfmt import Log
from gpunode.plugin.model import Answer, Problem, ReportReceiver, Resource, ResourcePlan, Snapshot, Unit
from gpunode.plugin.nvidia.platform import Site, read_site, still_so, uses_cdi
from gpunode.plugin.nvidia.resources import plan
from gpunode.plugin.nvidia.response import answer
from gpunode.plugin.nvidia.watch import Watch

if TYPE_CHECKING:
    from gpunode.plugin.nvidia.cdi import CdiSpecs


LOOK_SECONDS = 5.0


class NvidiaBackend:
    """See `gpunode.plugin.model.Backend`. It is a `ServicePart` and a `Veto` for its CDI specifications.

    `replan` is called, from its own thread, when device files that a plan used appear or disappear:
    /dev/nvidia-uvm exists only after the first use of CUDA, and NVML doesn't report it.
    """

    def __init__(self, host: Host, settings: Settings, log: Log) -> None:
        self._host = host
        self._log = log
        self._watch = Watch(host, settings, log)
        self._specs: CdiSpecs | None = None
        self._read: tuple[Settings, Site] | None = None  # for a plan that may yet be refused
        self._planned: tuple[Settings, Site] | None = None
        self._task = BackgroundTask("plan")
        self._next = 0.0
        self.replan: Callable[[], None] = lambda: None

    @property
    def waiting(self) -> str:
        return self._watch.waiting

    def run(self, sink: ReportReceiver, stop: Event) -> None:
        self._watch.run(sink, stop)

    def hurry(self) -> None:
        self._watch.hurry()

    def let_go(self) -> None:
        self._watch.let_go()

    def plan(self, settings: Settings, inventory: Inventory) -> ResourcePlan:
        site = read_site(self._host, settings, inventory)
        self._read = settings, site
        return plan(self._host, settings, inventory, site)

    def prepare(self, settings: Settings, inventory: Inventory, plan: ResourcePlan) -> None:
        self._planned = self._read
        self._watch.configure(settings)
        if self._specs is None and uses_cdi(settings):
            from gpunode.plugin.nvidia.cdi import CdiSpecs  # half a megabyte that few nodes need

            self._specs = CdiSpecs(self._host, self._log)
        if self._specs is not None:
            self._specs.write(settings, inventory, plan)

    def problem(self, resource: Resource, unit: Unit) -> Problem | None:
        return self._specs.problem(resource, unit) if self._specs is not None else None

    def tick(self, now: float) -> None:
        if now >= self._next and not self._task.busy:
            self._next = now + LOOK_SECONDS
            if self._planned is not None and self._outdated(*self._planned):
                self._task.start(self.replan)
        if self._specs is not None:
            self._specs.tick(now)

    def _outdated(self, settings: Settings, site: Site) -> bool:
        try:
            return not still_so(self._host, settings, site)
        except GpunodeError:  # what can't be read stays unchanged
            return False

    def close(self) -> None:
        """Does nothing: the specifications stay."""

    def answer(self, settings: Settings, snapshot: Snapshot, ids: Sequence[str]) -> Answer:
        return answer(settings, snapshot, ids)
