"""The plugin's types: a unit, a device, a resource, the advertised state, and what a container gets.

A *unit* is something that a container can be given as a whole: a GPU or a partition of one. A *device* is
what the kubelet counts: a unit, or one of several shares of it. A *resource* is a name with its devices.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from threading import Event
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

from gpunode.errors import GpunodeError
from gpunode.gpu.model import GPU_IS_LOST, Gpu, Inventory, MigDevice, Reading, Topology
from gpunode.plugin.config.settings import NameRule, Settings

if TYPE_CHECKING:
    from gpunode.gpu.nvml import GpuEvent


SHARE_MARK = "::"
"""Between a unit's id and the number of a share, as NVIDIA's plugin has it: ``GPU-1234::0``."""


@dataclass(frozen=True)
class Unit:
    """A GPU or a partition (MIG device, AMD partition) of one.

    `id` is the kubelet's id of an unshared one: the UUID, for AMD the PCI address or ``amdgpu_xcp_3``. `gpu`
    is the id of the physical GPU, its own for a whole one. `index` is ``0``, or ``0:1`` for the second MIG
    device of the first GPU. `pci` is the physical GPU's address as sysfs spells it. `paths` are the device
    nodes on the node that this unit needs in addition to the vendor's common ones. `memory_bytes` is the
    unit's own.
    """

    id: str
    gpu: str
    index: str
    name: str = ""
    pci: str = ""
    numa: int | None = None
    profile: str = ""
    gi: int | None = None
    ci: int | None = None
    minor: int | None = None
    memory_bytes: int = 0
    compute_capability: str = ""
    paths: tuple[str, ...] = ()

    @property
    def partition(self) -> bool:
        """Whether it is a part of a GPU."""
        return self.id != self.gpu

    @property
    def kind(self) -> str:
        """`mig` for a part of a GPU, else `gpu`, as in the rules that name resources."""
        return "mig" if self.partition or self.profile else "gpu"

    @property
    def naming_key(self) -> str:
        """The text that naming rules match."""
        return self.name if self.kind == "gpu" else self.profile

    @property
    def order(self) -> tuple[int, ...]:
        """Sort key for the usual order: 0, 1, 2:0, 2:1, 10."""
        return tuple(int(part) if part.isdecimal() else 1 << 30 for part in self.index.split(":"))


def gpu_unit(gpu: Gpu, paths: tuple[str, ...], part: MigDevice | None = None) -> Unit:
    """The unit of a whole GPU, or of a part of it; `paths` are its device nodes."""
    whole = Unit(
        gpu.uuid,
        gpu.uuid,
        str(gpu.index),
        name=gpu.name,
        pci=gpu.pci,
        numa=gpu.numa,
        minor=gpu.minor,
        memory_bytes=gpu.memory_bytes,
        compute_capability=gpu.compute_capability,
        paths=paths,
    )
    if part is None:
        return whole
    return replace(
        whole,
        id=part.uuid,
        index=f"{gpu.index}:{part.index}",
        profile=part.profile,
        gi=part.gi,
        ci=part.ci,
        memory_bytes=part.memory_bytes,
    )


class Problem(NamedTuple):
    """Why a device must not be allocated.

    `code` is short and stable, for metrics and JSON: ``xid-79``, ``ecc``, ``row-remap``, ``lost``,
    ``fabric``, ``recovery-action``, ``driver``, ``mig-mode``, ``mps``... `reason` is for people. `since` is
    seconds since the epoch. `mend` is the action that makes the device healthy again: ``restart-app``,
    ``reset``, ``reboot``, ``replace``, "" if unknown or if it comes back by itself. `starting` is no failure:
    it is not ready yet. `logged` if the log has one line for all devices with this problem.
    """

    code: str
    reason: str
    since: float = 0.0
    mend: str = ""
    starting: bool = False
    logged: bool = False


class KubeletDevice(NamedTuple):
    """What the kubelet counts. `id` is the unit's id, with ``::N`` for a share of it."""

    id: str
    unit: Unit
    problem: Problem | None = None

    @property
    def healthy(self) -> bool:
        return self.problem is None


class Common(NamedTuple):
    """What a container gets in addition to its units, read when the plan was made: Allocate reads no file.

    `nodes` are device nodes such as ``/dev/nvidiactl``, `channels` IMEX channels, `cdi` the classes other
    than ``gpu`` that have a specification (``gdrcopy``).
    """

    nodes: tuple[str, ...] = ()
    channels: tuple[int, ...] = ()
    cdi: tuple[str, ...] = ()


@dataclass(frozen=True)
class Resource:
    """One extended resource. `sharing` is none, time-slicing or mps; `devices` are ordered by unit, then
    share.

    `shares` is the largest number of shares that any unit of it has (1 unshared). With `single_share` a
    container may request one share only (NVIDIA's failRequestsGreaterThanOne). Some units may be unshared:
    their devices have the unit's own id.
    """

    name: str
    devices: tuple[KubeletDevice, ...] = ()
    sharing: str = "none"
    shares: int = 1
    single_share: bool = False
    common: Common = field(default_factory=Common)

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """Each unit once."""
        return tuple({device.unit.id: device.unit for device in self.devices}.values())

    @cached_property
    def share_counts(self) -> Mapping[str, int]:
        """The number of shares of each shared unit, by its id; unshared units aren't in it."""
        return Counter(device.unit.id for device in self.devices if device.id != device.unit.id)


@dataclass(frozen=True)
class LeftOut:
    """A GPU or partition that is not advertised, and why. `unshareable`: it can't be shared as configured."""

    index: str
    id: str
    reason: str
    unshareable: bool = False


class ResourcePlan(NamedTuple):
    """What this node advertises: the pure result of inventory and settings. `problems` are in the devices."""

    resources: tuple[Resource, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Snapshot:
    """One resource at one moment. `version` grows with every change that the kubelet must see."""

    version: int
    resource: Resource

    @property
    def devices(self) -> tuple[KubeletDevice, ...]:
        return self.resource.devices

    @cached_property
    def by_id(self) -> Mapping[str, KubeletDevice]:
        return MappingProxyType({device.id: device for device in self.resource.devices})

    @cached_property
    def healthy(self) -> int:
        """How many devices can be allocated."""
        return sum(device.healthy for device in self.resource.devices)


class ContainerMount(NamedTuple):
    """A host path in the container."""

    host: str
    container: str
    read_only: bool = False


class ContainerDevice(NamedTuple):
    """A device node in the container; `permissions` of r, w, m."""

    host: str
    container: str
    permissions: str = "rw"


@dataclass(frozen=True)
class Answer:
    """What a container gets: the fields of ContainerAllocateResponse, free of protobuf."""

    envs: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[ContainerMount, ...] = ()
    nodes: tuple[ContainerDevice, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)
    cdi: tuple[str, ...] = ()


class AllocationError(GpunodeError):
    """A request that can't be met; the message is for the pod's events. `code`: not-found, invalid,
    unhealthy."""

    default_code = "invalid"


# The backend of a vendor, and the receiver of its reports.
#
# `Backend` is NVIDIA (nvidia/), AMD (amd/) or a simulated node (simulate/). Its `run` loop, in its own
# thread, reports what it sees to a `ReportReceiver` (the ledger); the other methods are called by the ledger
# and the RPC handlers, with values only, and must return quickly.


class ReportReceiver(Protocol):
    """Receives a backend's reports, from any thread."""

    def seen(self, inventory: Inventory, topology: Topology) -> None:
        """The node's GPUs now: every existing one, readable or not."""

    def readings(self, readings: Sequence[Reading]) -> None:
        """The GPUs' readings of their own health."""

    def event(self, event: GpuEvent) -> None:
        """A critical event."""

    def broken(self, reason: str, sure: bool) -> None:
        """The driver as a whole doesn't respond. Unless `sure` it may be a temporary overload of this
        node."""


class Backend(Protocol):
    """One kind of GPU."""

    @property
    def waiting(self) -> str:
        """What the backend waits for, empty when GPUs are seen."""

    def run(self, sink: ReportReceiver, stop: Event) -> None:
        """Report the GPUs and their events to `sink`, until `stop`."""

    def hurry(self) -> None:
        """Read the GPUs again now."""

    def let_go(self) -> None:
        """Close the driver for a while, so that it can be unloaded; safe in a signal handler."""

    def plan(self, settings: Settings, inventory: Inventory) -> ResourcePlan:
        """The resources of these GPUs. `ConfigError` if the settings aren't valid for this node."""

    def prepare(self, settings: Settings, inventory: Inventory, plan: ResourcePlan) -> None:
        """Make what containers will need (CDI specifications) before the plan is advertised."""

    def answer(self, settings: Settings, snapshot: Snapshot, ids: Sequence[str]) -> Answer:
        """What a container gets for these devices. `AllocationError` has the reason for a refusal."""


# Names of resources: which rule gives a unit its name.


def glob_matches(pattern: str, text: str) -> bool:
    """Whether `pattern` matches all of `text`: only ``*`` is special, case counts."""
    return fnmatchcase(text, re.sub(r"[?[]", r"[\g<0>]", pattern))


def ruled_name(rules: Iterable[NameRule], kind: str, text: str) -> str:
    """The name that the first matching rule of this kind (gpu, mig) gives; empty without one."""
    return next((rule.name for rule in rules if rule.kind == kind and glob_matches(rule.pattern, text)), "")


def idle_rules(rules: Iterable[NameRule], kind: str, texts: Sequence[str]) -> Iterator[str]:
    """A warning about the rules of this kind that match none of these: the most common mistake is half a
    name."""
    idle = [
        rule.pattern
        for rule in rules
        if rule.kind == kind and not any(glob_matches(rule.pattern, text) for text in texts)
    ]
    if idle and any(texts):
        section, what = ("gpus", "model") if kind == "gpu" else ("mig", "profile")
        there = ", ".join(sorted({text for text in texts if text}))
        yield f"resources.{section}: {', '.join(idle)}: no {what} here is called so; there is {there}"


# A GPU that was seen once stays known: if lost or unreadable it is still listed, with the reason. Pure.

NOT_LISTED = "lost: the driver does not list it any more"


def complete_inventory(now: Inventory, before: Inventory | None) -> Inventory:
    """`now`, completed from `before` for GPUs that can't be read or aren't listed, ordered by index.

    A GPU off the bus may be listed without its UUID; its PCI address, or else its index if nothing else has
    that UUID now, still identifies it. Such a GPU keeps its old description, MIG devices included, and has
    `error` set; one that NVML doesn't list counts as lost. What a healthy GPU reports replaces what it
    reported before.
    """
    if before is None:
        return now
    whole = {gpu.uuid for gpu in now.gpus if gpu.uuid}
    missing = {gpu.uuid: gpu for gpu in before.gpus if gpu.uuid and gpu.uuid not in whole}
    described = {gpu.uuid: gpu for gpu in before.gpus if gpu.uuid}
    gpus = []
    for gpu in now.gpus:
        if gpu.error and gpu.uuid in described:
            gpus.append(_filled(described[gpu.uuid], gpu))
        elif gpu.uuid:
            gpus.append(gpu)
        else:
            old = _recognised(gpu, missing)
            gpus.append(gpu if old is None else _lost(missing.pop(old.uuid), gpu))
    gpus += [_lost(gpu, gpu) for gpu in missing.values()]
    return now._replace(gpus=tuple(sorted(gpus, key=lambda gpu: (gpu.index, gpu.uuid))))


def _lost(old: Gpu, now: Gpu) -> Gpu:
    """The old description with the error that NVML has now, or else that it doesn't list the GPU."""
    if now.error:
        return replace(old, error=now.error, error_code=now.error_code)
    return replace(old, error=NOT_LISTED, error_code=GPU_IS_LOST)


def _filled(old: Gpu, now: Gpu) -> Gpu:
    """The old description of a GPU that can't be fully read now; fields that were missing are taken from
    `now`."""
    return replace(
        old,
        index=now.index,
        error=now.error,
        error_code=now.error_code,
        name=old.name or now.name,
        pci=old.pci or now.pci,
        minor=old.minor if old.minor is not None else now.minor,
        memory_bytes=old.memory_bytes or now.memory_bytes,
        compute_capability=old.compute_capability or now.compute_capability,
        numa=old.numa if old.numa is not None else now.numa,
    )


def _recognised(unreadable: Gpu, missing: dict[str, Gpu]) -> Gpu | None:
    same_place = [gpu for gpu in missing.values() if unreadable.pci and gpu.pci == unreadable.pci]
    same_index = [gpu for gpu in missing.values() if not unreadable.pci and gpu.index == unreadable.index]
    return next(iter(same_place or same_index), None)


# Devices that an Allocate requests, and which requests can be met at all. Pure, and the same for every
# vendor.

_SHOWN = 8
_SHOWN_CHARACTERS = 80


def requested_devices(snapshot: Snapshot, ids: Sequence[str]) -> list[KubeletDevice]:
    """The devices with these ids. `AllocationError` names one that doesn't exist, with some that do, or one
    that is unhealthy, with the reason and what to do."""
    if not ids:
        raise AllocationError("the request names no device")
    devices = []
    shares = 0
    for device_id in ids:
        device = snapshot.by_id.get(device_id)
        if device is None:
            raise _unknown(snapshot, device_id)
        if device.problem:
            raise _unhealthy(device, device.problem)
        shares += SHARE_MARK in device_id
        devices.append(device)
    if shares and len(ids) > 1 and snapshot.resource.single_share:
        raise _too_many_shares(snapshot.resource, len(ids))
    return devices


def _unhealthy(device: KubeletDevice, problem: Problem) -> AllocationError:
    fix = how_to_fix(problem.mend, device.unit.gpu, device.unit.index, os.getpid())
    return AllocationError(
        f"device {device.id} is unhealthy: {problem.reason}{f'; {fix}' if fix else ''}",
        hint="gpunode plugin status",
        code="unhealthy",
    )


def _unknown(snapshot: Snapshot, device_id: str) -> AllocationError:
    known = [device.id for device in snapshot.devices[:_SHOWN]]
    more = len(snapshot.devices) - len(known)
    names = ", ".join(known) + (f" and {more} more" if more else "")
    shown_id = device_id if len(device_id) <= _SHOWN_CHARACTERS else f"{device_id[:_SHOWN_CHARACTERS]}..."
    return AllocationError(
        f"invalid request: unknown device {shown_id!r}; {snapshot.resource.name} has {names or 'none'}",
        code="not-found",
    )


def _too_many_shares(resource: Resource, count: int) -> AllocationError:
    section = "mps" if resource.sharing == "mps" else "timeSlicing"
    return AllocationError(
        f"maximum request size for shared resources is 1; found {count}: request one {resource.name}, or set "
        f"failRequestsGreaterThanOne to false in sharing.{section} (two shares may be of the same GPU)"
    )


# Selectors: texts by which users select GPUs and partitions in `include`, `exclude` and `devices`.

Matcher = Callable[[Unit], bool]
_INDEX = re.compile(r"\d{1,6}(:\d{1,6})?", re.ASCII)
_PCI = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-7]))?", re.ASCII | re.IGNORECASE)


def matcher(selector: str) -> Matcher:
    """What a selector matches. One that matches a GPU matches all its partitions, too.

    An index (``0``, ``0:1`` for a MIG device), a UUID in any case, a PCI address in any spelling
    (``0000:3b:00.0``, ``00000000:3B:00.0``, ``3b:00.0``; ``10:00`` alone is a MIG device), or else a glob of
    the product's name or the partition's profile.
    """
    text = selector.strip()
    if _INDEX.fullmatch(text):
        desired = tuple(int(part) for part in text.split(":"))
        return lambda unit: unit.order[: len(desired)] == desired
    address = pci_numbers(text)
    if address is not None:
        return lambda unit: pci_numbers(unit.pci) == address
    folded = text.casefold()

    def by_name(unit: Unit) -> bool:
        return (
            folded in (unit.id.casefold(), unit.gpu.casefold())
            or glob_matches(text, unit.name)
            or (unit.profile != "" and glob_matches(text, unit.profile))
        )

    return by_name


def pci_numbers(address: str) -> tuple[int, int, int, int] | None:
    """Domain, bus, device and function of a PCI address; None for another text."""
    match = _PCI.fullmatch(address)
    if match is None:
        return None
    domain, bus, device, function = match.groups()
    return int(domain or "0", 16), int(bus, 16), int(device, 16), int(function or "0")


def unmatched(selectors: Iterable[str], units: Sequence[Unit]) -> tuple[str, ...]:
    """The selectors that match nothing: a typing error, or a GPU that doesn't exist now."""
    return tuple(selector for selector in selectors if not any(map(matcher(selector), units)))


def deselection(settings: Settings, units: Sequence[Unit]) -> tuple[dict[str, str], list[str]]:
    """Why a unit is not advertised, by its id, for units that `include` and `exclude` remove; and which
    selectors match nothing."""
    warnings = [
        f"{option}: this node has no GPU {selector}"
        for option, selectors in (("include", settings.include), ("exclude", settings.exclude))
        for selector in unmatched(selectors, units)
    ]
    include = [matcher(selector) for selector in settings.include]
    exclude = [matcher(selector) for selector in settings.exclude]
    reasons = {}
    for unit in units:
        if include and not any(test(unit) for test in include):
            reasons[unit.id] = "include doesn't name it"
        elif any(test(unit) for test in exclude):
            reasons[unit.id] = "exclude names it"
    return reasons, warnings


# The action for a problem's `mend`, for users: the same text in the log, in a pod's events and in
# `plugin status`.

_WORDS = {
    "restart-app": "restart the application that failed",
    "reboot": "drain and reboot the node",
    "replace": "have the GPU replaced",
}


def how_to_fix(remedy: str, gpu: str, index: str, pid: int = 0) -> str:
    """ "" for a `remedy` that needs no action. `gpu` and `index` are the unit's, `pid` the serving plugin's
    if known.

    A reset of an NVIDIA GPU fails while any process has NVML open, and the plugin does: SIGUSR1 makes it
    close NVML. Only NVIDIA's GPUs have ids with "GPU-"; AMD's are PCI addresses.
    """
    if remedy != "reset":
        return _WORDS.get(remedy, "")
    number = index.partition(":")[0]
    if gpu and not gpu.startswith("GPU-"):
        return f"drain the node, then amd-smi reset --gpureset -g {number}"
    closing = f"kill -USR1 {pid} (closes NVML for 2 min), " if pid else ""
    return f"drain the node, {closing}then nvidia-smi --gpu-reset -i {number}"


# Parts of the service beside the ledger and the kubelet links: each gets a turn at least once a second.


class ServicePart(Protocol):
    """MPS daemons, the config file's watch, the status file, the metrics server."""

    def tick(self, now: float) -> float | None:
        """Do what is due; `now` is monotonic seconds. Must not block.

        Returns the seconds within which the next turn must come; None if an event or the usual time will do.
        """

    def close(self) -> None:
        """Release all resources at the end."""
