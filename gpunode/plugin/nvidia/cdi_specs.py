"""The CDI specifications that allocated containers name: written before a unit is advertised, kept true.

They are never removed: the kubelet starts a container again without asking, and that names what it got.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from threading import Lock

from gpunode.cdi.document import encode
from gpunode.cdi.driver_files import SOCKETS
from gpunode.cdi.model import Spec
from gpunode.dataclass import dataclass
from gpunode.errors import GpunodeError
from gpunode.gpu.model import Inventory
from gpunode.host import Host
from gpunode.plugin.errand import Errand
from gpunode.plugin.logfmt import Log
from gpunode.plugin.model import Plan, Problem, Resource, Unit
from gpunode.plugin.nvidia.cdi_content import DIRECTORY, Content, make_content, path_of
from gpunode.plugin.nvidia.cdi_hooks import HookChoice
from gpunode.plugin.nvidia.site import Roots, find_roots, uses_cdi
from gpunode.plugin.settings import Settings

CHECK_SECONDS = 30.0
RETRY_SECONDS = 5.0  # while something is missing: device files may come a moment after NVML
_LD_CACHE = "/etc/ld.so.cache"
_WATCHED = ("/dev", "/dev/nvidia-caps", "/dev/dri", "/dev/infiniband")


@dataclass(frozen=True)
class _Wanted:
    settings: Settings
    inventory: Inventory
    plan: Plan


class CdiSpecs:
    """Writes them, and writes them anew when what they are made of changes. Thread-safe.

    It is a `Part`, which looks every half minute, and more often while something is missing; what is to be
    written then is written beside it, as the hook program is asked, and may hang. It is a `Condemner`: a unit
    that no specification describes can't be handed out.
    """

    def __init__(self, host: Host, log: Log, errand: Errand | None = None) -> None:
        self._host = host
        self._log = log
        self._hooks = HookChoice(host)
        self._lock = Lock()
        self._wanted: _Wanted | None = None
        self._written: object = None  # what the files were made of when they were last right
        self._errand = errand or Errand("cdi")
        self._looked = float("-inf")
        self._told: tuple[str, ...] = ()
        self._problems: Mapping[str, Problem] = {}  # by unit; replaced as a whole

    def write(self, settings: Settings, inventory: Inventory, plan: Plan) -> None:
        """Bring the files to what this plan needs, where a cdi-* strategy is on; a failure is a `problem`."""
        with self._lock:
            self._wanted = _Wanted(settings, inventory, plan) if uses_cdi(settings) else None
            self._refresh()

    def problem(self, resource: Resource, unit: Unit) -> Problem | None:
        """Why this unit can't be injected."""
        return self._problems.get(unit.id)

    def tick(self, now: float) -> None:
        """Look whether the files are still right."""
        wanted = self._wanted
        seconds = RETRY_SECONDS if self._problems else CHECK_SECONDS
        if wanted is None or now < self._looked + seconds or self._errand.busy:
            return
        self._looked = now
        if self._stale(wanted):
            self._errand.start(self._look)

    def _stale(self, wanted: _Wanted) -> bool:
        try:
            return self._signature(wanted, find_roots(self._host, wanted.settings)) != self._written
        except GpunodeError:
            return True

    def _look(self) -> None:
        with self._lock:
            self._refresh()

    def close(self) -> None:
        """The files stay."""

    # --- writing ---------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        wanted = self._wanted
        if wanted is None or not wanted.plan.resources:
            self._problems, self._written = {}, None
            return
        try:
            roots = find_roots(self._host, wanted.settings)
            made_of = self._signature(wanted, roots)
            if made_of == self._written:
                return
            content = self._make(wanted, roots)
            written = [path for path, spec in content.specs.items() if self._put(path, spec, roots)]
            self._written = self._signature(wanted, roots)
        except GpunodeError as error:
            self._failed(wanted.plan, error)
            return
        self._succeeded(content, written)

    def _make(self, wanted: _Wanted, roots: Roots) -> Content:
        hooks = self._hooks.choose(wanted.settings, roots)
        return make_content(self._host, wanted.settings, wanted.inventory, wanted.plan, roots, hooks)

    def _put(self, path: str, spec: Spec, roots: Roots) -> bool:
        """Replace the file in one step, unless it says the same already.

        An engine remembers the numbers of device files until the file that names them changes, so one whose
        device files were made anew is written again. A link is replaced: others may write in that directory,
        and root must not write wherever they point.
        """
        data, host = encode(spec, "json"), self._host
        if host.is_symlink(path):
            host.remove(path)
        elif host.read_bytes(path) == data and not self._older(path, spec, roots):
            return False
        host.make_dirs(DIRECTORY)
        host.write_atomic(path, data, mode=0o644)
        return True

    def _older(self, path: str, spec: Spec, roots: Roots) -> bool:
        edits = (spec.edits, *(device.edits for device in spec.devices))
        nodes = {node.path for one in edits for node in one.nodes}
        made = (self._host.stat(f"{roots.dev_here}{node}") for node in nodes)
        latest = max((found.st_ctime_ns for found in made if found), default=0)
        file = self._host.stat(path)
        return file is not None and file.st_mtime_ns < latest

    def _signature(self, wanted: _Wanted, roots: Roots) -> object:
        """Changes with whatever the files are made of, and with the files; some forty stat calls."""
        host = self._host
        here = [f"{roots.dev_here}{place}" for place in _WATCHED]
        devices = [
            f"{place}/{name}"
            for place in here
            for name in host.listdir(place)
            if place != here[0] or name.startswith(("nvidia", "gdrdrv"))
        ]
        common = wanted.plan.resources[0].common
        classes = ("gpu", *(["imex-channel"] if common.channels else []), *common.cdi)
        there = (f"{roots.driver_here}{path}" for path in (_LD_CACHE, *SOCKETS))
        files = (*there, *(() if roots.mounted else SOCKETS), *map(path_of, classes))
        hooks = self._hooks.programs(wanted.settings, roots)
        return wanted, hooks, [_mark(host, path) for path in (*devices, *files)]

    # --- saying it -------------------------------------------------------------------------------------

    def _failed(self, plan: Plan, error: GpunodeError) -> None:
        self._written = None
        """Every unit is unhealthy for one reason, which the log has in one line."""
        units = {unit.id: unit.index for resource in plan.resources for unit in resource.units}
        told = (error.message, error.hint, *units)
        if told != self._told:
            self._told = told
            self._log.error(
                "GPUs are unhealthy: no CDI specification can be written",
                code="cdi",
                indexes=",".join(units.values()),
                reason=error.message,
                hint=error.hint,
            )
        self._condemn(dict.fromkeys(units, f"no CDI specification: {error.message}"), logged=True)

    def _succeeded(self, content: Content, written: Iterable[str]) -> None:
        for path in written:
            self._log.info("CDI specification written", path=path, devices=len(content.specs[path].devices))
        if content.notes != self._told:
            for note in content.notes:
                self._log.warning("CDI specification", note=note)
            self._told = content.notes
        self._condemn({unit: f"no CDI specification has it: {why}" for unit, why in content.missing.items()})

    def _condemn(self, reasons: Mapping[str, str], logged: bool = False) -> None:
        """One that lasts keeps the time when it began."""
        now, before = self._host.now(), self._problems
        self._problems = {
            unit: before[unit]
            if unit in before and before[unit].reason == reason
            else Problem("cdi", reason, now, logged=logged)
            for unit, reason in reasons.items()
        }


def _mark(host: Host, path: str) -> tuple[str, int, int]:
    found = host.stat(path)
    return (path, found.st_ctime_ns, found.st_ino) if found else (path, 0, 0)
