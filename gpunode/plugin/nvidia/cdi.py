"""Contents of the CDI specifications for allocated containers: the advertised units, and additional
classes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import NamedTuple

from gpunode.cdi.build import INDEX, UUID, Form, build, feature_nodes, feature_spec, gds_mounts
from gpunode.cdi.driver_files import SOCKETS, DriverFiles, daemon_sockets, read_driver_files
from gpunode.cdi.hooks import HookProgram, find_hooks, query_hooks
from gpunode.cdi.nodes import read_nodes
from gpunode.cdi.spec import Spec, encode
from gpunode.cdi.versions import UNKNOWN_ENGINE
from gpunode.errors import GpunodeError, PreconditionError
from gpunode.facts.toolkit import hook_program
from gpunode.gpu.model import Gpu, Inventory
from gpunode.host import Host
from gpunode.plugin.background import BackgroundTask
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.logfmt import Log
from gpunode.plugin.model import Common, Problem, Resource, ResourcePlan, Unit
from gpunode.plugin.nvidia.platform import Roots, find_roots, imex_node, uses_cdi
from gpunode.plugin.nvidia.response import CDI_VENDOR

DIRECTORY = "/var/run/cdi"
_NO_LIBCUDA = (
    "find out why it is missing: gpunode doctor --only driver-lib-mismatch --only libcuda-missing; "
    "if the driver isn't installed on the node itself, pass its directory with --driver-root"
)


@dataclass(frozen=True)
class Content:
    """Specifications by path. `missing` has the reason for each unit, by its id, that is in none of them."""

    specs: Mapping[str, Spec]
    missing: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def path_of(device_class: str) -> str:
    """Path of the specification of a class, as with NVIDIA's plugin."""
    return f"{DIRECTORY}/{CDI_VENDOR}-{device_class}.json"


def make_content(
    host: Host,
    settings: Settings,
    inventory: Inventory,
    plan: ResourcePlan,
    roots: Roots,
    hooks: HookProgram | None,
) -> Content:
    """Everything that `response.answer` may name. `GpunodeError` if no GPU can be described."""
    if not inventory.driver_version:
        raise GpunodeError("NVML doesn't report the driver's version", hint="gpunode doctor")
    units = {unit.id: unit for resource in plan.resources for unit in resource.units}
    advertised = _advertised(inventory, units)
    nodes = read_nodes(host, advertised.gpus, roots.dev_here)._replace(dev_root=roots.dev)
    by_index = settings.device_id_strategy == INDEX
    whole = settings.mig_strategy == "none"
    names = (INDEX,) if by_index else (UUID,)
    # the engine is outside the plugin's container and may be old
    form = Form(CDI_VENDOR, "gpu", names, UNKNOWN_ENGINE, every=False, whole=whole)
    built = build(advertised, nodes, _driver_files(host, settings, inventory, roots), hooks, form)
    described = {device.name for device in built.spec.devices}
    missing = {
        unit.id: _reason(unit, built.notes)
        for unit in units.values()
        if (unit.index if by_index else unit.id) not in described
    }
    others = dict(_others(host, _common(plan), roots))
    return Content({path_of("gpu"): built.spec, **others}, missing, built.notes)


def _advertised(inventory: Inventory, units: Mapping[str, Unit]) -> Inventory:
    """Only what may be allocated: a pod can request any name in the file by an annotation of its own.

    A GPU that can't be read now stays described as far as it is known, for containers that have it.
    """
    return inventory._replace(gpus=tuple(_parts(inventory.gpus, units)))


def _parts(gpus: tuple[Gpu, ...], units: Mapping[str, Unit]) -> Iterator[Gpu]:
    for gpu in gpus:
        mig = tuple(part for part in gpu.mig if part.uuid in units)
        if gpu.uuid in units:
            yield replace(gpu, error="")
        elif mig:
            yield replace(gpu, mig=mig, error="")


def _common(plan: ResourcePlan) -> Common:
    return plan.resources[0].common if plan.resources else Common()


def _driver_files(host: Host, settings: Settings, inventory: Inventory, roots: Roots) -> DriverFiles:
    """Searched where this process sees them, with the node's own names."""
    try:
        files = read_driver_files(host, inventory.driver_version, roots.driver_here)
    except PreconditionError as error:
        raise PreconditionError(error.message, hint=_NO_LIBCUDA, code=error.code) from error
    sockets = files.sockets
    if roots.mounted:  # /run of the plugin's own container isn't the node's
        sockets = tuple(daemon_sockets(Host(host.path(roots.driver_here), {}), roots.driver))
    if "disable-ipc-discoverer" in settings.cdi_feature_flags:
        sockets = ()
    return files._replace(root=roots.driver, sockets=sockets)


def _others(host: Host, common: Common, roots: Roots) -> Iterator[tuple[str, Spec]]:
    """The classes other than the GPUs that the plan found devices for."""
    nodes_by_class = feature_nodes(host, roots.dev_here) if common.cdi or common.channels else {}
    if common.channels:
        nodes = {node.path: node for node in nodes_by_class["imex-channel"]}
        paths = {channel: imex_node(channel) for channel in common.channels}
        channels = {str(channel): (nodes[path],) for channel, path in paths.items() if path in nodes}
        yield (
            path_of("imex-channel"),
            feature_spec(f"{CDI_VENDOR}/imex-channel", channels, dev_root=roots.dev),
        )
    for name in common.cdi:
        mounts = gds_mounts(host, roots.driver, roots.driver_here) if name == "gds" else ()
        yield (
            path_of(name),
            feature_spec(f"{CDI_VENDOR}/{name}", {"all": nodes_by_class[name]}, mounts, roots.dev),
        )


def _reason(unit: Unit, notes: tuple[str, ...]) -> str:
    """The builder's error for this unit."""
    places = (f"MIG device {unit.index} ", f"GPU {unit.index.partition(':')[0]} ")
    reason_note = next((note for note in notes if note.startswith(places)), "")
    reason = reason_note.partition(" is left out: ")[2]
    return reason or "its name is not allowed in a CDI specification; set device-id-strategy to index"


# Which hook program the CDI specifications name, and with which of its hooks.

_ASSUMED = frozenset(
    ("create-symlinks", "enable-cuda-compat", "update-ldcache", "disable-device-node-modification")
)


def _programs(host: Host, settings: Settings, roots: Roots) -> tuple[object, ...]:
    """Changes when one of them is installed, removed or replaced."""
    names = (hook_program(host, name) for name in ("nvidia-cdi-hook", "nvidia-ctk"))
    paths = (f"{_root(roots)}{settings.nvidia_cdi_hook_path}", *names)
    stats = (host.stat(path) for path in paths if path)
    return tuple((status.st_mtime_ns, status.st_size, status.st_ino) for status in stats if status)


def _root(roots: Roots) -> str:
    """Root directory for reading the node's programs."""
    return roots.driver_here if roots.mounted and not roots.driver else ""


def _find(host: Host, settings: Settings, roots: Roots) -> HookProgram | None:
    """The program that the settings name; else, on the node itself, whichever is installed.

    From a container only what is below the mounted root can be read. A configured path there is used
    unchecked; the default isn't, because containers wouldn't start without the program.
    """
    path = settings.nvidia_cdi_hook_path
    program = query_hooks(host, path, _root(roots)) if path else None
    if program is not None or not roots.mounted:
        return program or find_hooks(host)
    if not path or path == Settings().nvidia_cdi_hook_path:
        return None
    name = path.rpartition("/")[2]
    return HookProgram(path, (name, "hook") if name == "nvidia-ctk" else (name,), _ASSUMED)


# The CDI specifications that allocated containers name: written before a unit is advertised, and kept up to
# date.
#
# They are never removed: the kubelet restarts a container without another Allocate, and the container names
# the device that it got.

CHECK_SECONDS = 30.0
RETRY_SECONDS = 5.0  # while something is missing: device files may appear a moment after NVML
_LD_CACHE = "/etc/ld.so.cache"
_WATCHED = ("/dev", "/dev/nvidia-caps", "/dev/dri", "/dev/infiniband")


class _SpecSource(NamedTuple):
    settings: Settings
    inventory: Inventory
    plan: ResourcePlan


class CdiSpecs:
    """Writes them, and rewrites them when what they are made of changes. Thread-safe.

    The backend's turns check every half minute, and more often while something is missing; a background
    thread writes, because it runs the hook program, which may hang. It is a `Veto`: a unit that no
    specification describes can't be allocated.
    """

    def __init__(self, host: Host, log: Log, task: BackgroundTask | None = None) -> None:
        self._host = host
        self._log = log
        self._hooks: tuple[object, HookProgram | None] = ((), None)  # and what they were found by
        self._lock = Lock()
        self._desired: _SpecSource | None = None
        self._written: object = None  # the input of the files when they were last right
        self._task = task or BackgroundTask("cdi")
        self._looked = float("-inf")
        self._reported: tuple[str, ...] = ()
        self._problems: Mapping[str, Problem] = {}  # by unit; replaced as a whole

    def write(self, settings: Settings, inventory: Inventory, plan: ResourcePlan) -> None:
        """Write the files that this plan needs, where a cdi-* strategy is on; a failure is a `problem`."""
        with self._lock:
            self._desired = _SpecSource(settings, inventory, plan) if uses_cdi(settings) else None
            self._refresh()

    def problem(self, resource: Resource, unit: Unit) -> Problem | None:
        """Why this unit can't be injected."""
        return self._problems.get(unit.id)

    def tick(self, now: float) -> None:
        """Check whether the files are still right."""
        desired = self._desired
        seconds = RETRY_SECONDS if self._problems else CHECK_SECONDS
        if desired is None or now < self._looked + seconds or self._task.busy:
            return
        self._looked = now
        if self._stale(desired):
            self._task.start(self._look)

    def _stale(self, desired: _SpecSource) -> bool:
        try:
            return self._signature(desired, find_roots(self._host, desired.settings)) != self._written
        except GpunodeError:
            return True

    def _look(self) -> None:
        with self._lock:
            self._refresh()

    # --- writing ----------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        desired = self._desired
        if desired is None or not desired.plan.resources:
            self._problems, self._written = {}, None
            return
        try:
            roots = find_roots(self._host, desired.settings)
            made_of = self._signature(desired, roots)
            if made_of == self._written:
                return
            content = self._make(desired, roots)
            written = [path for path, spec in content.specs.items() if self._put(path, spec, roots)]
            self._written = self._signature(desired, roots)
        except GpunodeError as error:
            self._failed(desired.plan, error)
            return
        self._succeeded(content, written)

    def _make(self, desired: _SpecSource, roots: Roots) -> Content:
        hooks = self._choose_hooks(desired.settings, roots)
        return make_content(self._host, desired.settings, desired.inventory, desired.plan, roots, hooks)

    def _choose_hooks(self, settings: Settings, roots: Roots) -> HookProgram | None:
        """None where there is no program, or all hooks are disabled: the specification then has only mounts.

        A program is queried for its hooks once, and again after it was replaced.
        """
        disabled = frozenset(settings.cdi_disable_hooks)
        if "all" in disabled:
            return None
        key = (settings.nvidia_cdi_hook_path, roots, _programs(self._host, settings, roots))
        if self._hooks[0] != key:
            self._hooks = key, _find(self._host, settings, roots)
        program = self._hooks[1]
        return program._replace(known=program.known - disabled) if program else None

    def _put(self, path: str, spec: Spec, roots: Roots) -> bool:
        """Replace the file in one step, unless the content is equal.

        An engine remembers the numbers of device files until the file that names them changes, so a
        specification is rewritten when its device files were recreated. A link is replaced: other users may
        write in that directory, and root must not write to its target.
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
        nodes = {node.path for edit in edits for node in edit.nodes}
        statuses = (self._host.stat(f"{roots.dev_here}{node}") for node in nodes)
        latest = max((status.st_ctime_ns for status in statuses if status), default=0)
        file = self._host.stat(path)
        return file is not None and file.st_mtime_ns < latest

    def _signature(self, desired: _SpecSource, roots: Roots) -> object:
        """Changes with the input of the files, and with the files; some forty stat calls."""
        host = self._host
        here = [f"{roots.dev_here}{place}" for place in _WATCHED]
        devices = [
            f"{place}/{name}"
            for place in here
            for name in host.listdir(place)
            if place != here[0] or name.startswith(("nvidia", "gdrdrv"))
        ]
        common = desired.plan.resources[0].common
        classes = ("gpu", *(["imex-channel"] if common.channels else []), *common.cdi)
        there = (f"{roots.driver_here}{path}" for path in (_LD_CACHE, *SOCKETS))
        files = (*there, *(() if roots.mounted else SOCKETS), *map(path_of, classes))
        hooks = _programs(host, desired.settings, roots)
        return desired, hooks, [_mark(host, path) for path in (*devices, *files)]

    # --- reporting --------------------------------------------------------------------------------------

    def _failed(self, plan: ResourcePlan, error: GpunodeError) -> None:
        """Every unit is unhealthy for one reason, which the log has in one line."""
        self._written = None
        units = {unit.id: unit.index for resource in plan.resources for unit in resource.units}
        failure = (error.message, error.hint, *units)
        if failure != self._reported:
            self._reported = failure
            self._log.error(
                "GPUs are unhealthy: no CDI specification can be written",
                code="cdi",
                indexes=",".join(units.values()),
                reason=error.message,
                hint=error.hint,
            )
        self._set_problems(dict.fromkeys(units, f"no CDI specification: {error.message}"), logged=True)

    def _succeeded(self, content: Content, written: Iterable[str]) -> None:
        for path in written:
            self._log.info("CDI specification written", path=path, devices=len(content.specs[path].devices))
        if content.notes != self._reported:
            for note in content.notes:
                self._log.warning("CDI specification", note=note)
            self._reported = content.notes
        self._set_problems(
            {unit: f"no CDI specification has it: {why}" for unit, why in content.missing.items()}
        )

    def _set_problems(self, reasons: Mapping[str, str], logged: bool = False) -> None:
        """A problem that persists keeps the time when it began."""
        now, before = self._host.now(), self._problems
        self._problems = {
            unit: before[unit]
            if unit in before and before[unit].reason == reason
            else Problem("cdi", reason, now, logged=logged)
            for unit, reason in reasons.items()
        }


def _mark(host: Host, path: str) -> tuple[str, int, int]:
    status = host.stat(path)
    return (path, status.st_ctime_ns, status.st_ino) if status else (path, 0, 0)
