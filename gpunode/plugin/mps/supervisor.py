"""MPS as a part of the plugin: a keeper for each daemon that the plan asks for, and the devices' health.

Without a resource that is shared with MPS nothing of it runs and nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from gpunode.errors import GpunodeError
from gpunode.host import Host
from gpunode.plugin.logfmt import Log, OnChange
from gpunode.plugin.model import Plan, Problem, Resource, Unit
from gpunode.plugin.mps.layout import MPS, NOT_YET, DaemonSpec, daemon_specs, root_of
from gpunode.plugin.settings import Settings

if TYPE_CHECKING:
    from gpunode.plugin.mps.keeper import Keeper
    from gpunode.plugin.mps.onlooker import Onlooker

Source = Callable[[], tuple[Settings, Plan] | None]
"""Settings and plan of this moment; None while it isn't known which GPUs there are: nothing is ended then."""

_LOCK_SECONDS = 1.0
_TURN_SECONDS = 0.5
_CLOSE_SECONDS = 1.0


class Supervisor:
    """A `Part` and a `Condemner`. `changed` is called when a device's health may be another.

    With `own` it keeps the daemons itself, otherwise it watches somebody else's; None is as the settings say.
    `limits` overrides who limits the clients, see `daemon_specs`. `soon` is told within how many seconds the
    next turn must come.
    """

    def __init__(
        self,
        host: Host,
        log: Log,
        source: Source,
        changed: Callable[[], None],
        own: bool | None = None,
        limits: bool | None = None,
        soon: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._host = host
        self._soon = soon
        self._log = log
        self._say = OnChange(log)
        self._source = source
        self._changed = changed
        self._own = own
        self._limits = limits
        self._seen: tuple[Settings, Plan] | None = None
        self._due = False
        self._wanted: tuple[DaemonSpec, ...] = ()
        self._keepers: dict[str, Keeper | Onlooker] = {}
        self._ending: list[Keeper | Onlooker] = []
        self._by_gpu: Mapping[tuple[str, str], Keeper | Onlooker] = {}
        self._told: Sequence[object] = ()
        self._lock = ExitStack()
        self._locked = ""
        self._next_lock = 0.0
        self._foreign: Problem | None = None

    # --- Condemner -------------------------------------------------------------------------------------

    def problem(self, resource: Resource, unit: Unit) -> Problem | None:
        """Called for every unit each second, from any thread."""
        if resource.sharing != MPS or unit.id not in resource.share_counts:
            return None
        keeper = self._by_gpu.get((resource.name, unit.id))
        if keeper is None:
            return self._foreign or NOT_YET
        return keeper.gpu_problems.get(unit.id) or keeper.problem

    @property
    def ready(self) -> bool:
        """All daemons that are wanted are up, also if none is."""
        return len(self._keepers) == len(self._wanted) and all(
            keeper.problem is None for keeper in self._keepers.values()
        )

    @property
    def status(self) -> str:
        """One line for people."""
        up = sum(keeper.problem is None for keeper in self._keepers.values())
        wrong = next((k.problem.reason for k in self._keepers.values() if k.problem), "")
        trouble = self._foreign.reason if self._foreign else wrong
        return f"{up} of {len(self._wanted)} MPS control daemons up{': ' if trouble else ''}{trouble}"

    def told(self) -> list[dict[str, object]]:
        """Each daemon: resource, gpus, pipe directory, and its problem ("" for none)."""
        return [
            {
                "resource": keeper.spec.resource,
                "gpus": list(keeper.spec.gpus),
                "pipe": keeper.spec.pipe,
                "problem": keeper.problem.reason if keeper.problem else "",
            }
            for keeper in self._keepers.values()
        ]

    # --- Part ------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        found = self._source()
        if found is None:
            return
        settings, plan = found
        if self._keepers or self._ours(settings):
            self._soon(_TURN_SECONDS)  # a keeper's thread has no other way to say that something happened
        if self._seen is None or self._seen[0] is not settings or self._seen[1] is not plan:
            first, self._seen, self._due = self._seen is None, (settings, plan), True
            if not first:
                return  # while both are being exchanged they need not belong together: the next turn will see
        if self._due:
            self._due = False
            self._wanted = daemon_specs(settings, plan.resources, self._limits)
        if self._ours(settings) and not self._may(settings, now):
            return
        self._reconcile(settings)
        self._tell(settings)

    def close(self) -> None:
        """Ask the keepers to end; what takes longer than a second ends with the process, which waits."""
        keepers = [*self._keepers.values(), *self._ending]
        for keeper in keepers:
            keeper.stop(hurry=True)
        deadline = self._host.monotonic() + _CLOSE_SECONDS
        for keeper in keepers:
            keeper.join(max(0.0, deadline - self._host.monotonic()))
        self._keepers, self._by_gpu = {}, {}
        if self._locked:
            self._host.remove(f"{self._locked}/.ready")
        if not any(keeper.alive for keeper in keepers):
            self._lock.close()

    # --- what there is and what there should be --------------------------------------------------------

    def _ours(self, settings: Settings) -> bool:
        return settings.mps if self._own is None else self._own

    def _may(self, settings: Settings, now: float) -> bool:
        """Whether this process has the MPS root for itself: two that keep the same daemons would fight."""
        root = root_of(settings)
        if not self._wanted and not self._keepers and not self._host.exists(root):
            return False  # nothing to do and nothing left of before
        if self._locked:
            return True
        if now < self._next_lock:
            return False
        self._next_lock = now + _LOCK_SECONDS
        try:
            self._host.make_dirs(
                root
            )  # clients reach their pipes through it; a lock's directory would be 0700
            self._lock.enter_context(self._host.lock(f"{root}/.lock", 0.0))
        except GpunodeError as error:
            reason = f"another process keeps the MPS daemons, or {root} can't be used: {error.message}"
            if self._foreign is None or self._foreign.reason != reason:
                self._foreign = Problem("mps", reason, self._host.now())
                self._say.warning(reason, hint=error.hint)
                self._changed()
            return False
        self._locked, self._foreign = root, None
        self._sweep(settings, root)
        return True

    def _reconcile(self, settings: Settings) -> None:
        """Keepers for what is wanted, none for what isn't. Values are compared, so it is cheap."""
        self._ending = [keeper for keeper in self._ending if keeper.alive]
        changed = False
        wanted = {spec.directory: spec for spec in self._wanted}
        for directory, keeper in list(self._keepers.items()):
            spec = wanted.get(directory)
            if spec is not None and (spec.resource, spec.gpus) == (keeper.spec.resource, keeper.spec.gpus):
                if spec != keeper.spec:
                    keeper.adjust(spec)
                continue
            keeper.stop()
            self._ending.append(self._keepers.pop(directory))
            changed = True
        for directory, spec in wanted.items():
            if directory not in self._keepers:
                self._keepers[directory] = self._keeper(settings, spec)
                changed = True
        if changed:
            self._by_gpu = {(k.spec.resource, gpu): k for k in self._keepers.values() for gpu in k.spec.gpus}

    def _keeper(self, settings: Settings, spec: DaemonSpec) -> Keeper | Onlooker:
        if not self._ours(settings):
            from gpunode.plugin.mps.onlooker import Onlooker

            onlooker = Onlooker(self._host, settings, spec)
            onlooker.start()
            return onlooker
        from gpunode.plugin.mps.keeper import Keeper

        keeper = Keeper(self._host, settings, spec, self._log)
        keeper.start(after=list(self._ending))
        return keeper

    def _sweep(self, settings: Settings, root: str) -> None:
        """End what a killed plugin has left that isn't wanted any more: daemons, compute modes."""
        from gpunode.plugin.mps.keeper import Keeper
        from gpunode.plugin.mps.process import remains

        wanted = {spec.directory for spec in self._wanted}
        for spec in remains(self._host, root):
            if spec.directory not in wanted:
                keeper = Keeper(self._host, settings, spec, self._log)
                keeper.stop()
                keeper.start()
                self._ending.append(keeper)

    def _tell(self, settings: Settings) -> None:
        told = [(k.problem, k.gpu_problems) for k in self._keepers.values()]
        if told == self._told:
            return
        self._told = told
        self._changed()
        if self._locked and self._ours(settings):
            path = f"{self._locked}/.ready"
            if self.ready:
                self._host.write_atomic(path, b"")
            else:
                self._host.remove(path)
