"""What one GPU instance holds: compute instances by their slices, and where they lie in it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from gpunode.dataclass import dataclass
from gpunode.mig.layout import ComputeInstance, Placement, Profile

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
