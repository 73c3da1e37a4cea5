"""MIG layouts: modes, instances and profiles of each GPU, and the names of MIG devices.

The model is the same for NVML, a recording or a test. Two numbers identify a profile: its `index`, NVML's
constant (NVML_GPU_INSTANCE_PROFILE_*), and its `id`, the driver's, which `nvidia-smi mig -lgip` shows.
Placements of GPU instances count the GPU's memory slots (8 on most, 4 on an A30 or RTX PRO); those of compute
instances count the compute slices of their GPU instance.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from gpunode.output.typed import from_plain


class Placement(NamedTuple):
    """`size` slots from `start`."""

    start: int
    size: int

    @property
    def end(self) -> int:
        """The first slot after it."""
        return self.start + self.size

    def overlaps(self, other: Placement) -> bool:
        """Whether the two share a slot."""
        return self.start < other.end and other.start < self.end

    def __str__(self) -> str:
        return f"{self.start}:{self.size}"


class ComputeProfile(NamedTuple):
    """A compute instance that fits a GPU instance: `slices` of its compute slices, at most `max_count`.

    NVML reports these only once such a GPU instance exists; before that they are inferred.
    """

    slices: int
    max_count: int
    placements: tuple[Placement, ...] = ()


@dataclass(frozen=True)
class Profile:
    """A GPU instance profile that a GPU offers.

    `name` is NVML's own, ``1g.10gb+me``; `aliases` are other names for it, such as the one computed from its
    share of the memory. `free` is how many more fit now, None where MIG is off or the driver doesn't report
    it. `placements` is empty if the driver doesn't report them.
    """

    index: int
    id: int
    name: str
    slices: int
    memory_mib: int
    max_count: int
    sms: int = 0
    placements: tuple[Placement, ...] = ()
    aliases: tuple[str, ...] = ()
    compute: tuple[ComputeProfile, ...] = ()
    free: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """All names of this profile; the first is the one to show."""
        return (self.name, *self.aliases)


class ComputeInstance(NamedTuple):
    """A compute instance; with its GPU instance it is the MIG device with this `uuid` (empty if unknown).

    `placement` counts the GPU instance's compute slices; null if the driver doesn't report it. `profile` is
    the MIG device's: ``3g.40gb``, or ``1c.3g.40gb`` for a part of the GPU instance.
    """

    id: int
    slices: int
    placement: Placement | None = None
    uuid: str = ""
    profile: str = ""


class GpuInstance(NamedTuple):
    """A GPU instance. `profile` and `profile_id` are the profile's index and id, `slices` its GPU slices."""

    id: int
    profile: int
    profile_id: int
    name: str
    slices: int
    placement: Placement
    compute: tuple[ComputeInstance, ...] = ()
    aliases: tuple[str, ...] = ()


def device_name(gpu_instance: str, gpu_slices: int, compute_slices: int) -> str:
    """The name of a MIG device of `compute_slices` on a GPU instance of that profile."""
    return gpu_instance if compute_slices == gpu_slices else f"{compute_slices}c.{gpu_instance}"


@dataclass(frozen=True)
class GpuLayout:
    """One GPU.

    `pci` is ``0000:3b:00.0``; `device_id` and `subsystem_id` are PCI's two ids as NVML packs them, device or
    subsystem above vendor: 0x20B010DE. `capable` is whether it supports MIG; `current` and `pending` are its
    modes now and after its next reset, equal unless a change is pending. `slots` is its number of memory
    slots, 0 if not reported. `architecture` is NVML_DEVICE_ARCH_* (7 Ampere, 9 Hopper, 10 Blackwell), 0 if
    not reported; `virtualization` is NVML_GPU_VIRTUALIZATION_MODE_* (0 none, 1 passthrough, 2 vGPU guest, 3
    vGPU host). `error` is why the GPU can't be read; the other fields are then what could be read. `untold`
    is why its instances are unknown although its modes are known: missing permission.
    """

    uuid: str
    index: int
    name: str
    pci: str
    device_id: int = 0
    subsystem_id: int = 0
    minor: int | None = None
    memory_bytes: int = 0
    architecture: int = 0
    virtualization: int = 0
    capable: bool = False
    current: bool = False
    pending: bool = False
    slots: int = 0
    instances: tuple[GpuInstance, ...] = ()
    profiles: tuple[Profile, ...] = ()
    error: str = ""
    untold: str = ""

    @property
    def mode_pending(self) -> bool:
        """Whether a change of the mode is pending until the next reset."""
        return self.current != self.pending

    def devices(self) -> Mapping[str, int]:
        """The number of MIG devices of each profile, as mig-parted's configuration counts them."""
        return Counter(ci.profile for gi in self.instances for ci in gi.compute)


class Layouts(NamedTuple):
    """All GPUs of a node, in NVML's order."""

    driver_version: str = ""
    gpus: tuple[GpuLayout, ...] = ()

    def gpu(self, uuid: str) -> GpuLayout | None:
        """The GPU with that UUID; None if there is none."""
        return next((gpu for gpu in self.gpus if gpu.uuid == uuid), None)


def layouts_from_json(data: Any, where: str = "") -> Layouts:
    """Read `Layouts` back from the output of `plain`, with the profile of each MIG device. `PlainError`, a
    ValueError, for anything else."""
    layouts = from_plain(Layouts, data, where=where)
    gpus = (replace(gpu, instances=tuple(map(_with_profiles, gpu.instances))) for gpu in layouts.gpus)
    return layouts._replace(gpus=tuple(gpus))


def _with_profiles(gi: GpuInstance) -> GpuInstance:
    compute = (ci._replace(profile=device_name(gi.name, gi.slices, ci.slices)) for ci in gi.compute)
    return gi._replace(compute=tuple(compute))


_STARTS_AT_MULTIPLES_OF = {1: 1, 2: 2, 3: 4, 4: 4, 7: 8}


def inferred_compute(gpu_slices: int) -> tuple[ComputeProfile, ...]:
    """The compute instances that a GPU instance of so many slices supports, before one exists.

    All of its slices, or at most half of them, rounded up: 1c, 2c and 4c of a 4g; 1c, 2c and 3c of a 3g; 1c,
    2c, 3c, 4c and 7c of a 7g (`nvidia-smi mig -lcip` on an A100).
    """
    result = []
    for slices, multiple in _STARTS_AT_MULTIPLES_OF.items():
        if slices == gpu_slices or (slices < gpu_slices and 2 * slices <= gpu_slices + 1):
            starts = range(0, gpu_slices - slices + 1, multiple)
            places = tuple(Placement(start, slices) for start in starts)
            result.append(ComputeProfile(slices, len(places), places))
    return tuple(result)


# Names of MIG devices as configurations write them, ``[Cc.]Gg.Mgb[+attr,...|-attr,...]``.

_NAME = re.compile(r"(?:([1-9]\d?)c\.)?([1-9]\d?)g\.(\d{1,4})gb(?:([+-])(.+))?", re.ASCII)
_ATTRIBUTE = re.compile(r"[a-z](?:[a-z0-9.]*[a-z0-9])?", re.ASCII | re.IGNORECASE)


class DeviceName(NamedTuple):
    """A MIG device: `compute` of the `slices` compute slices of the GPU instance `instance`.

    `added` and `removed` are the attributes of the instance's profile: ``+me,gfx`` or ``-me``.
    """

    compute: int
    slices: int
    gigabytes: int
    added: frozenset[str] = frozenset()
    removed: frozenset[str] = frozenset()

    @property
    def instance(self) -> str:
        """The GPU instance's name, its attributes in alphabetical order."""
        sign = "+" if self.added else "-" if self.removed else ""
        return f"{self.slices}g.{self.gigabytes}gb{sign}{','.join(sorted(self.added or self.removed))}"

    @property
    def text(self) -> str:
        """The name without redundant parts: ``3g.20gb``, ``1c.3g.20gb``."""
        return self.instance if self.compute == self.slices else f"{self.compute}c.{self.instance}"


def parse_name(text: str) -> DeviceName | None:
    """The parsed name, None if it isn't a valid one. It doesn't check whether a GPU offers it."""
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    compute, slices, gigabytes, sign, attributes = match.groups()
    names = attributes.split(",") if attributes else []
    if len(set(names)) < len(names) or not all(_ATTRIBUTE.fullmatch(name) for name in names):
        return None
    size = int(slices)
    parts = int(compute) if compute else size
    if parts > size:
        return None
    added = frozenset(names) if sign == "+" else frozenset()
    removed = frozenset(names) if sign == "-" else frozenset()
    return DeviceName(parts, size, int(gigabytes), added, removed)


def same_profile(desired: DeviceName, offered: Iterable[str]) -> bool:
    """Whether one of a GPU's names for a profile means the same GPU instance as this name."""
    known = (parse_name(name) for name in offered)
    return any(name is not None and name.instance == desired.instance for name in known)


# The contents of one GPU instance: compute instances by their slices, and their placements in it.

Bin = tuple[int, ...]
"""Compute instances of one GPU instance by their slices, the largest first."""


class ComputeTarget(NamedTuple):
    """A desired compute instance; `kept` is the existing one. Without `placement`: anywhere."""

    slices: int
    placement: Placement | None = None
    kept: ComputeInstance | None = None


def fillings(profile: Profile, left: Counter[int]) -> Iterator[Bin]:
    """All non-empty parts of the request that fit one GPU instance of this profile."""
    sizes = sorted((size for size, count in left.items() if count > 0), reverse=True)
    ranges = [range(min(left[size], profile.slices // size), -1, -1) for size in sizes]
    for counts in itertools.product(*ranges):
        filling = tuple(size for size, count in zip(sizes, counts, strict=True) for _ in range(count))
        if filling and sum(filling) <= profile.slices and compute_places(profile, filling, ()) is not None:
            yield filling


def bins(profile: Profile, left: Counter[int]) -> tuple[Bin, ...]:
    """The rest of the request in as few new GPU instances as possible, the fullest first."""
    result: list[Bin] = []
    remaining = Counter({size: count for size, count in left.items() if count > 0})
    while remaining.total():
        largest = max(size for size, count in remaining.items() if count > 0)
        able = [filling for filling in fillings(profile, remaining) if largest in filling]
        best = max(able, key=lambda entry: (sum(entry), -len(entry), entry), default=(largest,))
        result.append(best)
        remaining -= Counter(best)
    return tuple(result)


def compute_places(
    profile: Profile, desired: Bin, present: Sequence[ComputeInstance]
) -> tuple[ComputeTarget, ...] | None:
    """The compute instances of a GPU instance; existing ones are kept where they match.

    `desired` has at most the profile's slices. None if they don't fit. Where the driver reports no
    placements, only their number counts.
    """
    left = Counter(desired)
    existing: list[ComputeInstance] = []
    for instance in present:
        if left[instance.slices] > 0:
            left[instance.slices] -= 1
            existing.append(instance)
    targets = [ComputeTarget(entry.slices, entry.placement, entry) for entry in existing]
    news = sorted((size for size, count in left.items() for _ in range(count)), reverse=True)
    if not news:
        return tuple(targets)
    if news == [profile.slices]:
        whole = (offer.placements for offer in profile.compute if offer.slices == profile.slices)
        first = next((places[0] for places in whole if places), None)
        return (*targets, ComputeTarget(profile.slices, first))
    offers = {offer.slices: offer for offer in profile.compute}
    counts = Counter(desired)
    if any(size not in offers or counts[size] > offers[size].max_count for size in counts):
        return None
    if any(not offers[size].placements for size in news) or any(
        entry.placement is None for entry in existing
    ):
        return (*targets, *(ComputeTarget(size) for size in news))
    occupied = [entry.placement for entry in existing if entry.placement is not None]
    places = _free_places([offers[size].placements for size in news], occupied)
    if places is None:
        return None
    return (*targets, *(ComputeTarget(size, place) for size, place in zip(news, places, strict=True)))


def _free_places(
    offers: Sequence[Sequence[Placement]], occupied: Sequence[Placement]
) -> tuple[Placement, ...] | None:
    if not offers:
        return ()
    for place in offers[0]:
        if not any(place.overlaps(other) for other in occupied):
            rest = _free_places(offers[1:], (*occupied, place))
            if rest is not None:
                return (place, *rest)
    return None
