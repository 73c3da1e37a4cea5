"""The nouns of MIG: layouts, instances, profiles, places. The GPUs' reader makes them, and has them."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gpunode.gpu.mig_model import (
    ComputeInstance,
    ComputeProfile,
    GpuInstance,
    GpuLayout,
    Layouts,
    Placement,
    Profile,
    device_name,
    inferred_compute,
)

__all__ = [
    "ComputeInstance",
    "ComputeProfile",
    "GpuInstance",
    "GpuLayout",
    "Layouts",
    "Placement",
    "Profile",
    "device_name",
    "inferred_compute",
]


# Names of MIG devices as configurations write them, ``[Cc.]Gg.Mgb[+attr,...|-attr,...]``.

_NAME = re.compile(r"(?:([1-9]\d?)c\.)?([1-9]\d?)g\.(\d{1,4})gb(?:([+-])(.+))?", re.ASCII)
_ATTRIBUTE = re.compile(r"[a-z](?:[a-z0-9.]*[a-z0-9])?", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class DeviceName:
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
        """The GPU instance's name, its attributes in the alphabet's order."""
        sign = "+" if self.added else "-" if self.removed else ""
        return f"{self.slices}g.{self.gigabytes}gb{sign}{','.join(sorted(self.added or self.removed))}"

    @property
    def text(self) -> str:
        """The name with nothing in it that goes without saying: ``3g.20gb``, ``1c.3g.20gb``."""
        return self.instance if self.compute == self.slices else f"{self.compute}c.{self.instance}"


def parse_name(text: str) -> DeviceName | None:
    """What a name means, None if it isn't one. Whether a GPU offers it is another question."""
    found = _NAME.fullmatch(text)
    if found is None:
        return None
    compute, slices, gigabytes, sign, attributes = found.groups()
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


def same_profile(wanted: DeviceName, offered: Iterable[str]) -> bool:
    """Whether one of the names that a GPU has for a profile means the wanted GPU instance."""
    for name in offered:
        known = parse_name(name)
        if name == wanted.instance or (known is not None and known.instance == wanted.instance):
            return True
    return False


# What one GPU instance holds: compute instances by their slices, and where they lie in it.

Bin = tuple[int, ...]
"""Compute instances of one GPU instance by their slices, the largest first."""


@dataclass(frozen=True)
class ComputeTarget:
    """A compute instance that is wanted; `kept` is the one that is there. Without `placement`: anywhere."""

    slices: int
    placement: Placement | None = None
    kept: ComputeInstance | None = None


def fillings(profile: Profile, left: Counter[int]) -> Iterator[Bin]:
    """Every non-empty selection of the wish that one GPU instance of this profile holds."""
    sizes = sorted((size for size, count in left.items() if count > 0), reverse=True)
    ranges = [range(min(left[size], profile.slices // size), -1, -1) for size in sizes]
    for counts in itertools.product(*ranges):
        one = tuple(size for size, count in zip(sizes, counts, strict=True) for _ in range(count))
        if one and _holds(profile, one):
            yield one


def _holds(profile: Profile, one: Bin) -> bool:
    if sum(one) > profile.slices or len(one) == 0:
        return False
    if one == (profile.slices,):
        return True
    return compute_places(profile, one, ()) is not None


def bins(profile: Profile, left: Counter[int]) -> tuple[Bin, ...]:
    """The rest of the wish in as few new GPU instances as it takes, the fullest first."""
    found: list[Bin] = []
    remaining = Counter({size: count for size, count in left.items() if count > 0})
    while remaining.total():
        largest = max(size for size, count in remaining.items() if count > 0)
        able = [one for one in fillings(profile, remaining) if largest in one]
        best = max(able, key=lambda one: (sum(one), -len(one), one), default=(largest,))
        found.append(best)
        remaining -= Counter(best)
    return tuple(found)


def compute_places(
    profile: Profile, wanted: Bin, present: Sequence[ComputeInstance]
) -> tuple[ComputeTarget, ...] | None:
    """The compute instances of a GPU instance, those that are there kept as far as they are wanted.

    None if they don't fit. Where the driver tells no places only their number and sum count.
    """
    left = Counter(wanted)
    kept: list[ComputeInstance] = []
    for one in present:
        if left[one.slices] > 0:
            left[one.slices] -= 1
            kept.append(one)
    targets = [ComputeTarget(one.slices, one.placement, one) for one in kept]
    news = sorted((size for size, count in left.items() for _ in range(count)), reverse=True)
    if not news:
        return tuple(targets)
    if news == [profile.slices]:
        return (*targets, ComputeTarget(profile.slices, _first_place(profile)))
    offers = {one.slices: one for one in profile.compute}
    counts = Counter(wanted)
    if any(size not in offers or counts[size] > offers[size].max_count for size in counts):
        return None
    if sum(wanted) > profile.slices:
        return None
    if any(not offers[size].placements for size in news) or any(one.placement is None for one in kept):
        return (*targets, *(ComputeTarget(size) for size in news))
    taken = [one.placement for one in kept if one.placement is not None]
    places = _free_places([offers[size].placements for size in news], taken)
    if places is None:
        return None
    return (*targets, *(ComputeTarget(size, place) for size, place in zip(news, places, strict=True)))


def _first_place(profile: Profile) -> Placement | None:
    for one in profile.compute:
        if one.slices == profile.slices and one.placements:
            return one.placements[0]
    return None


def _free_places(
    offers: Sequence[Sequence[Placement]], taken: Sequence[Placement]
) -> tuple[Placement, ...] | None:
    if not offers:
        return ()
    for place in offers[0]:
        if not any(place.overlaps(other) for other in taken):
            rest = _free_places(offers[1:], (*taken, place))
            if rest is not None:
                return (place, *rest)
    return None
