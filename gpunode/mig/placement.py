"""A search for the placements of the desired instances on one GPU, among those that its driver offers.

Instances that already fit keep their place and their UUIDs. The driver's own first fit needs the right order
of creation, and can leave free slots that no instance can use (NVIDIA's MIG user guide: 1g, 1g, 2g, 3g fails
on an A100, 3g first works), so each instance gets its place beforehand.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from gpunode.mig.model import (
    Bin,
    ComputeTarget,
    GpuInstance,
    GpuLayout,
    Placement,
    Profile,
    bins,
    compute_places,
    device_name,
    fillings,
    parse_name,
    same_profile,
)


class CannotPlace(Exception):
    """The request doesn't fit on this GPU; `reason` names the profile, `fits` the part that fits."""

    def __init__(self, reason: str, fits: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.fits = fits


class InstanceTarget(NamedTuple):
    """A desired GPU instance with all of its compute instances; `kept` is the existing one."""

    profile_id: int
    name: str
    slices: int
    placement: Placement
    compute: tuple[ComputeTarget, ...]
    kept: GpuInstance | None = None

    @property
    def devices(self) -> tuple[str, ...]:
        """Its MIG devices."""
        return tuple(device_name(self.name, self.slices, instance.slices) for instance in self.compute)


def solve(gpu: GpuLayout, desired: Mapping[str, int]) -> tuple[InstanceTarget, ...]:
    """All desired instances of the GPU, with their placements. `CannotPlace` if they don't fit.

    The solution with the fewest lost MIG devices is chosen, then the one with the fewest lost GPU instances,
    then the one with the fewest new ones. A GPU with a change of its mode has no instances: pass it without.
    """
    wish = _wish(gpu, desired)
    targets = _search(gpu, wish)
    if targets is None:
        raise CannotPlace(_reason(gpu, wish, desired), _what_fits(gpu, desired))
    return targets


def unknown_profiles(gpu: GpuLayout, desired: Iterable[str]) -> tuple[str, ...]:
    """The names that this GPU doesn't offer."""
    return tuple(name for name in desired if meaning(gpu, name) is None)


def offered(gpu: GpuLayout) -> str:
    """The names of the GPU's profiles, for messages."""
    return ", ".join(profile.name for profile in gpu.profiles)


def meaning(gpu: GpuLayout, name: str) -> tuple[Profile, int] | None:
    """The GPU instance profile and the compute slices of a name on this GPU; None if it isn't offered."""
    parsed = parse_name(name)
    if parsed is None:
        return None
    for profile in gpu.profiles:
        if same_profile(parsed, profile.names):
            fits = parsed.compute == profile.slices or parsed.compute in {c.slices for c in profile.compute}
            return (profile, parsed.compute) if fits else None
    return None


class _Part(NamedTuple):
    """The desired compute instances of one profile, by their slices."""

    profile: Profile
    sizes: Bin


def _wish(gpu: GpuLayout, desired: Mapping[str, int]) -> tuple[_Part, ...]:
    sizes: dict[int, list[int]] = {}
    for name, count in desired.items():
        match = meaning(gpu, name)
        if match is None:
            raise CannotPlace(f"it has no profile {name}", f"its profiles: {offered(gpu) or 'none'}")
        profile, compute = match
        most = profile.max_count * max(1, profile.slices)
        if count > most:
            each = next((offer.max_count for offer in profile.compute if offer.slices == compute), 1)
            most = profile.max_count * (1 if compute == profile.slices else each)
            raise CannotPlace(f"{count} x {name} are wanted, of which it takes at most {most}")
        sizes.setdefault(profile.index, []).extend([compute] * count)
    profiles = {profile.index: profile for profile in gpu.profiles}
    parts = [_Part(profiles[index], tuple(sorted(all_, reverse=True))) for index, all_ in sizes.items()]
    return tuple(sorted(parts, key=lambda part: (-part.profile.slices, part.profile.index)))


# --- the search -----------------------------------------------------------------------------------------


class _Choice(NamedTuple):
    """One solution: which instances stay with which compute instances, and what is created."""

    kept: tuple[tuple[GpuInstance, Bin], ...]
    made: tuple[tuple[Profile, Bin], ...]
    lost_devices: int
    lost_instances: int

    @property
    def cost(self) -> tuple[int, int, int]:
        return self.lost_devices, self.lost_instances, len(self.made)


def _search(gpu: GpuLayout, wish: Sequence[_Part]) -> tuple[InstanceTarget, ...] | None:
    per_profile = [list(_choices(part, gpu.instances)) for part in wish]
    known = {part.profile.id for part in wish}
    rest = [instance for instance in gpu.instances if instance.profile_id not in known]
    for choice in sorted(_joined(per_profile, rest), key=lambda entry: entry.cost):
        profiles = [
            *(_profile_of(gpu, instance) for instance, _ in choice.kept),
            *(p for p, _ in choice.made),
        ]
        if not _allowed(profiles):
            continue
        places = _places(
            gpu, [instance.placement for instance, _ in choice.kept], [p for p, _ in choice.made]
        )
        if places is not None:
            return _targets(gpu, choice, places)
    return None


def _joined(per_profile: Sequence[Sequence[_Choice]], rest: Sequence[GpuInstance]) -> Iterator[_Choice]:
    lost = sum(len(instance.compute) for instance in rest)
    for combination in itertools.product(*per_profile):
        yield _Choice(
            tuple(itertools.chain.from_iterable(choice.kept for choice in combination)),
            tuple(itertools.chain.from_iterable(choice.made for choice in combination)),
            lost + sum(choice.lost_devices for choice in combination),
            len(rest) + sum(choice.lost_instances for choice in combination),
        )


def _choices(part: _Part, instances: Sequence[GpuInstance]) -> Iterator[_Choice]:
    """All solutions for one profile's devices: which existing instances they use, and what is new."""
    present = [instance for instance in instances if instance.profile_id == part.profile.id]

    def walk(
        at: int, left: Counter[int], kept: tuple[tuple[GpuInstance, Bin], ...], lost: tuple[int, int]
    ) -> Iterator[_Choice]:
        if at == len(present):
            made = tuple((part.profile, filling) for filling in bins(part.profile, left))
            yield _Choice(kept, made, *lost)
            return
        instance = present[at]
        yield from walk(at + 1, left, kept, (lost[0] + len(instance.compute), lost[1] + 1))
        for use in fillings(part.profile, left):
            # what an instance can hold: at most its own devices, and what fits beside them
            if compute_places(part.profile, use, instance.compute) is None:
                continue
            lost_devices = (
                len(instance.compute) - (Counter(c.slices for c in instance.compute) & Counter(use)).total()
            )
            yield from walk(
                at + 1, left - Counter(use), (*kept, (instance, use)), (lost[0] + lost_devices, lost[1])
            )

    yield from walk(0, Counter(part.sizes), (), (0, 0))


def _profile_of(gpu: GpuLayout, instance: GpuInstance) -> Profile:
    return next(profile for profile in gpu.profiles if profile.id == instance.profile_id)


def _allowed(profiles: Sequence[Profile]) -> bool:
    """Whether the profiles can coexist at any placements: their counts, and the media engines.

    NVIDIA's MIG user guide: one instance of a GPU at most has the extensions of ``+me``; one with ``+me.all``
    takes every engine, so that all others must be ``-me``.
    """
    counts = Counter(profile.index for profile in profiles)
    limits = {profile.index: profile.max_count for profile in profiles}
    if any(count > limits[index] for index, count in counts.items()):
        return False
    parsed = (next(filter(None, map(parse_name, profile.names)), None) for profile in profiles)
    names = [name for name in parsed if name is not None]
    extended = [name for name in names if "me" in name.added]
    greedy = [name for name in names if "me.all" in name.added]
    others = [name for name in names if "me.all" not in name.added and "me" not in name.removed]
    return len(extended) <= 1 and len(greedy) <= 1 and not (greedy and others)


# --- placements -----------------------------------------------------------------------------------------


def _places(
    gpu: GpuLayout, occupied: Sequence[Placement], profiles: Sequence[Profile]
) -> tuple[Placement, ...] | None:
    """A placement for each of `profiles` that leaves the most free slots for later instances; None if they
    don't fit."""
    sizes = [max((place.size for place in profile.placements), default=0) for profile in profiles]
    order = sorted(range(len(profiles)), key=lambda number: -sizes[number])
    everywhere = [place for profile in gpu.profiles for place in profile.placements]

    def damage(place: Placement) -> tuple[int, int]:
        return sum(place.overlaps(other) for other in everywhere), place.start

    by_number: dict[int, Placement] = {}

    def walk(at: int) -> bool:
        if at == len(order):
            return True
        number = order[at]
        for place in sorted(profiles[number].placements, key=damage):
            if any(place.overlaps(other) for other in (*occupied, *by_number.values())):
                continue
            by_number[number] = place
            if walk(at + 1):
                return True
            del by_number[number]
        return False

    return tuple(by_number[number] for number in range(len(profiles))) if walk(0) else None


def _targets(gpu: GpuLayout, choice: _Choice, places: Sequence[Placement]) -> tuple[InstanceTarget, ...]:
    targets = []
    for instance, filling in choice.kept:
        compute = compute_places(_profile_of(gpu, instance), filling, instance.compute) or ()
        targets.append(
            InstanceTarget(
                instance.profile_id, instance.name, instance.slices, instance.placement, compute, instance
            )
        )
    for (profile, filling), place in zip(choice.made, places, strict=True):
        compute = compute_places(profile, filling, ()) or ()
        targets.append(InstanceTarget(profile.id, profile.name, profile.slices, place, compute))
    return tuple(sorted(targets, key=lambda target: target.placement.start))


# --- reasons --------------------------------------------------------------------------------------------


def _reason(gpu: GpuLayout, wish: Sequence[_Part], desired: Mapping[str, int]) -> str:
    for part in wish:
        count = len(bins(part.profile, Counter(part.sizes)))
        if count > part.profile.max_count:
            limit = part.profile.max_count
            return f"{count} x {part.profile.name} are wanted, of which it takes at most {limit}"
        if not part.profile.placements:
            return f"the driver doesn't report the possible placements of a {part.profile.name}"
    profiles = [
        profile for part in wish for profile in [part.profile] * len(bins(part.profile, Counter(part.sizes)))
    ]
    if not _allowed(profiles):
        return f"{summary(desired)} need the same media engines"
    slots = f" in its {gpu.slots} memory slots" if gpu.slots else ""
    return f"{summary(desired)} don't fit together{slots}"


def _what_fits(gpu: GpuLayout, desired: Mapping[str, int]) -> str:
    """As much of the request as fits, in its own order, the largest profiles first."""
    bare = replace(gpu, instances=())
    fitting: dict[str, int] = {}
    names = [
        name for name, count in sorted(desired.items(), key=_largest_first) for _ in range(min(count, 8))
    ]
    for name in names:
        more = {**fitting, name: fitting.get(name, 0) + 1}
        if _search(bare, _wish(bare, more)) is not None:
            fitting = more
    return f"this much of it would fit: {summary(fitting)}" if fitting else ""


def _largest_first(pair: tuple[str, int]) -> tuple[int, int]:
    parsed = parse_name(pair[0])
    return (-parsed.slices, -parsed.compute) if parsed else (0, 0)


def summary(devices: Mapping[str, int]) -> str:
    """``1 x 3g.20gb, 2 x 2g.10gb``."""
    return ", ".join(
        f"{count} x {name}" for name, count in sorted(devices.items(), key=_largest_first) if count
    )
