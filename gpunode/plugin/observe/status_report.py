"""Report of `plugin status`, combined from what the kubelet, the plugin and NVML each report. Pure.

The kubelet lists only devices that it could allocate, so another plugin's unhealthy device shows in two ways
only: a container holds it although it isn't allocatable, or NVML lists a GPU that no plugin advertises.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone

from gpunode.daemons.pod_resources import Holding
from gpunode.facts.device_plugins import all_foreign, unit_of
from gpunode.gpu.model import Inventory
from gpunode.plugin.model import LeftOut, Problem
from gpunode.plugin.observe.status_file import OwnResource, OwnStatus, OwnUnit

_GPU_IDS = ("GPU-", "MIG-")
_TAKEN = "registered, but the kubelet allocates another plugin's devices"
_NONE_LISTED = "registered, but the kubelet lists none of its devices"


@dataclass(frozen=True)
class DeviceProblem:
    """A device's problem as reported: `since` is a time such as 2026-05-01T12:00:00Z, or empty."""

    code: str
    reason: str
    since: str = ""
    mend: str = ""


@dataclass(frozen=True)
class Holder:
    """A container that holds devices of one unit. `pod` is empty and `pod_uid` set where only that is
    known."""

    namespace: str
    pod: str
    container: str
    pod_uid: str
    devices: tuple[str, ...]

    @property
    def name(self) -> str:
        """namespace/pod/container, for people."""
        pod = f"{self.namespace}/{self.pod}" if self.pod else f"pod {self.pod_uid}"
        return f"{pod}/{self.container}"


@dataclass(frozen=True)
class UnitStatus:
    """A GPU or partition under one resource; under none (`resource` empty) if no plugin advertises it.

    `devices` is 1 or the number of its shares, `allocatable` how many of them the kubelet could allocate,
    None if it wasn't queried. `health` is healthy, unhealthy (`problem` says why), not-allocatable (the
    kubelet doesn't count it and no reason is known), not-advertised or unknown.
    """

    resource: str
    id: str
    gpu: str
    index: str
    model: str
    profile: str
    devices: int
    allocatable: int | None
    health: str
    problem: DeviceProblem | None = None
    holders: tuple[Holder, ...] = ()

    @property
    def held(self) -> int:
        return len({device for holder in self.holders for device in holder.devices})

    @property
    def order(self) -> tuple[object, ...]:
        places = [int(part) if part.isdecimal() else 1 << 30 for part in self.index.split(":")]
        return (places, self.resource, self.id)


@dataclass(frozen=True)
class ResourceStatus:
    """`plugin` is gpunode, other or, if no plugin was seen, empty.

    `capacity` is None for another plugin's: the kubelet doesn't report it. `registered` is whether the
    kubelet has it, None if that could not be queried. `status` is our plugin's, or the kubelet's evidence
    against it.
    """

    name: str
    plugin: str
    registered: bool | None
    capacity: int | None
    allocatable: int | None
    held: int
    sharing: str
    status: str


@dataclass(frozen=True)
class Known:
    """The results of all queries. `allocatable` is None if the kubelet didn't report it."""

    own: OwnStatus | None = None
    allocatable: Mapping[str, Sequence[str]] | None = None
    holdings: tuple[Holding, ...] = ()
    inventory: Inventory | None = None
    every_resource: bool = False


@dataclass(frozen=True)
class Report:
    """Units are in the usual order."""

    resources: tuple[ResourceStatus, ...]
    units: tuple[UnitStatus, ...]
    left_out: tuple[LeftOut, ...] = field(default_factory=tuple)


def make_report(known: Known) -> Report:
    """The whole report."""
    own = (
        {resource.name: resource for resource in known.own.resources}
        if known.own and known.own.current
        else {}
    )
    names = {*own, *(known.allocatable or {}), *(holding.resource for holding in known.holdings)}
    shown_names = sorted(
        name for name in names if name in own or known.every_resource or _of_gpus(known, name)
    )
    places = _Places(known)
    units = [unit for name in shown_names for unit in _units(known, name, own.get(name), places)]
    left_out = known.own.left_out if known.own and known.own.current else ()
    if known.inventory is not None:
        units += places.unadvertised(units, left_out)
    resources = tuple(_resource(known, name, own.get(name), units) for name in shown_names)
    return Report(resources, tuple(sorted(units, key=lambda unit: unit.order)), left_out)


def _of_gpus(known: Known, name: str) -> bool:
    """Whether the resource is one of GPUs: by its name, or because its devices have ids of GPUs."""
    if "gpu" in name or "/mig-" in name:
        return True
    return any(device.startswith(_GPU_IDS) for device in _devices(known, name))


def _devices(known: Known, name: str) -> list[str]:
    """What the kubelet reports of a resource: allocatable or held."""
    allocatable = (known.allocatable or {}).get(name, ())
    return [
        *allocatable,
        *(item for holding in known.holdings if holding.resource == name for item in holding.ids),
    ]


def _resource(
    known: Known, name: str, own: OwnResource | None, units: Iterable[UnitStatus]
) -> ResourceStatus:
    own_units = [unit for unit in units if unit.resource == name]
    allocatable = known.allocatable
    lost = _lost_allocation(own, allocatable) if own else ""
    registered = (
        None if allocatable is None else bool(allocatable.get(name)) or bool(own and own.watched and not lost)
    )
    is_own = own is not None and lost != _TAKEN
    return ResourceStatus(
        name,
        "gpunode" if is_own else "" if registered is False else "other",
        registered,
        sum(unit.devices for unit in own.units) if own and is_own else None,
        None if allocatable is None else len(allocatable.get(name, ())),
        sum(unit.held for unit in own_units),
        own.sharing if own else _sharing(unit.devices for unit in own_units),
        lost or own.status if own else "",
    )


def _lost_allocation(own: OwnResource, allocatable: Mapping[str, Sequence[str]] | None) -> str:
    """How a kubelet with our registration doesn't allocate from us: none of our devices is allocatable; empty
    if some are.

    The kubelet allocates from the plugin that registered last, and keeps our stream open.
    """
    if allocatable is None:
        return ""
    listed = allocatable.get(own.name, ())
    if all_foreign(listed, (unit.id for unit in own.units)):
        return _TAKEN
    return _NONE_LISTED if not listed and own.watched and any(unit.healthy for unit in own.units) else ""


def _sharing(devices: Iterable[int]) -> str:
    return "shared" if any(count > 1 for count in devices) else "none"


def _units(known: Known, name: str, own: OwnResource | None, places: _Places) -> Iterable[UnitStatus]:
    """Each unit of a resource once: those our plugin reports, else those the kubelet knows."""
    allocatable: dict[str, set[str]] = {}
    for device in (known.allocatable or {}).get(name, ()):
        allocatable.setdefault(unit_of(device), set()).add(device)
    holders = _holders(known.holdings, name)
    own_units = {unit.id: unit for unit in own.units} if own else {}
    every = {*own_units, *allocatable, *holders}
    for unit_id in every:
        free = None if known.allocatable is None else len(allocatable.get(unit_id, ()))
        unit_holders = holders.get(unit_id, ())
        unit = own_units.get(unit_id) or places.find(unit_id)
        seen = {
            *allocatable.get(unit_id, ()),
            *(device for holder in unit_holders for device in holder.devices),
        }
        health = _health(unit.problem, free)
        yield UnitStatus(
            name,
            unit_id,
            unit.gpu,
            unit.index,
            unit.name,
            unit.profile,
            unit.devices if unit_id in own_units else len(seen),
            free,
            health,
            _trouble(unit.problem),
            unit_holders,
        )


def _health(problem: Problem | None, allocatable: int | None) -> str:
    if problem is not None:
        return "unhealthy"
    if allocatable is None:
        return "unknown"
    return "healthy" if allocatable else "not-allocatable"


def _holders(holdings: Iterable[Holding], resource: str) -> dict[str, tuple[Holder, ...]]:
    """By unit; a container is named once for each."""
    by_unit: dict[str, dict[tuple[str, str, str, str], list[str]]] = {}
    for holding in holdings:
        if holding.resource != resource:
            continue
        key = (holding.namespace, holding.pod, holding.container, holding.pod_uid)
        for device in holding.ids:
            by_unit.setdefault(unit_of(device), {}).setdefault(key, []).append(device)
    return {
        unit: tuple(Holder(*key, tuple(sorted(devices))) for key, devices in sorted(by.items()))
        for unit, by in by_unit.items()
    }


class _Places:
    """Index and model of a unit that our plugin didn't report, from NVML's inventory."""

    def __init__(self, known: Known) -> None:
        self._answered = known.allocatable is not None
        self._gpus = known.inventory.gpus if known.inventory else ()
        self._units: dict[str, OwnUnit] = {}
        for gpu in self._gpus:
            whole = _bare_unit(gpu.uuid, gpu.uuid, str(gpu.index), gpu.name)
            for called in (gpu.uuid, gpu.pci, f"nvidia{gpu.minor}"):
                self._units[called] = whole
            for mig in gpu.mig:
                place = f"{gpu.index}:{mig.index}"
                part = _bare_unit(mig.uuid, gpu.uuid, place, gpu.name, mig.profile)
                self._units[mig.uuid] = part
                self._units[f"nvidia{gpu.minor}/gi{mig.gi}"] = part
        for resource in known.own.resources if known.own else ():
            for unit in resource.units:
                self._units.setdefault(unit.id, replace(unit, devices=1, healthy=1, problem=None))

    def find(self, unit_id: str) -> OwnUnit:
        return self._units.get(unit_id) or _bare_unit(unit_id, unit_id)

    def unadvertised(self, units: Iterable[UnitStatus], left_out: Iterable[LeftOut]) -> list[UnitStatus]:
        """The GPUs that no plugin offers, not even in part; only the kubelet knows every plugin's."""
        offered = {name for unit in units for name in (unit.id, unit.gpu, self.find(unit.id).gpu)}
        reasons = {name: item.reason for item in left_out for name in (item.id, item.index) if name}
        return [
            UnitStatus(
                "",
                gpu.uuid,
                gpu.uuid,
                str(gpu.index),
                gpu.name,
                "",
                0,
                0 if self._answered else None,
                "not-advertised" if self._answered or reason else "unknown",
                _why(reason or gpu.error),
            )
            for gpu in self._gpus
            if gpu.uuid not in offered
            for reason in (reasons.get(gpu.uuid) or reasons.get(str(gpu.index)),)
        ]


def _bare_unit(unit_id: str, gpu: str, index: str = "", name: str = "", profile: str = "") -> OwnUnit:
    return OwnUnit(unit_id, gpu, index, name, profile, "", 0, 1, 1, None)


def _why(reason: str | None) -> DeviceProblem | None:
    return DeviceProblem("left-out", reason) if reason else None


def _trouble(problem: Problem | None) -> DeviceProblem | None:
    if problem is None:
        return None
    return DeviceProblem(problem.code, problem.reason, utc_time(problem.since), problem.mend)


def utc_time(seconds: float) -> str:
    """2026-05-01T12:00:00Z; empty for an unknown or invalid time."""
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ") if seconds else ""
    except (ValueError, OverflowError, OSError):
        return ""
