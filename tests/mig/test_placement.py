"""The solver compared with all possibilities: its placements are valid, its refusals are impossible."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixtures.mig_tables import BOARDS
from gpunode.mig.model import (
    ComputeInstance,
    GpuInstance,
    GpuLayout,
    Placement,
    Profile,
    device_name,
    inferred_compute,
    parse_name,
)
from gpunode.mig.placement import CannotPlace, InstanceTarget, solve

SEVEN = {"a100-40gb": (5, 10, 20, 40), "h100": (10, 20, 40, 80)}


def board(name: str, *instances: GpuInstance) -> GpuLayout:
    """A GPU as in the tables, with this layout."""
    found = BOARDS[name]
    profiles = tuple(
        Profile(
            one.index,
            one.id,
            one.name,
            one.slices,
            one.megabytes,
            one.count,
            placements=tuple(Placement(start, one.size) for start in one.starts),
            compute=inferred_compute(one.slices),
        )
        for one in found.profiles
    )
    return GpuLayout(
        *("GPU-0", 0, found.name, "0000:00:00.0"),
        capable=True,
        current=True,
        pending=True,
        slots=found.slots,
        profiles=profiles,
        instances=instances,
    )


def instance(gpu: GpuLayout, number: int, name: str, start: int, *parts: int) -> GpuInstance:
    profile = next(one for one in gpu.profiles if one.name == name)
    place = next(one for one in profile.placements if one.start == start)
    at, compute = 0, []
    for count, part in enumerate(parts or (profile.slices,)):
        device = device_name(name, profile.slices, part)
        compute.append(ComputeInstance(count, part, Placement(at, part), f"MIG-{number}-{count}", device))
        at += part
    return GpuInstance(number, profile.index, profile.id, name, profile.slices, place, tuple(compute))


def cut(target: tuple[InstanceTarget, ...]) -> Counter[str]:
    return Counter(name for one in target for name in one.devices)


def sound(gpu: GpuLayout, target: tuple[InstanceTarget, ...]) -> None:
    """Every placement is offered, none shares a slot, no count is exceeded."""
    profiles = {one.id: one for one in gpu.profiles}
    for one in target:
        assert one.placement in profiles[one.profile_id].placements
        places = [part.placement for part in one.compute if part.placement is not None]
        assert not any(a.overlaps(b) for a, b in itertools.combinations(places, 2))
        assert sum(part.slices for part in one.compute) <= one.slices
    assert not any(a.placement.overlaps(b.placement) for a, b in itertools.combinations(target, 2))
    for number, count in Counter(one.profile_id for one in target).items():
        assert count <= profiles[number].max_count


def possible(gpu: GpuLayout, names: list[str]) -> bool:
    """By trying all placements, for whole GPU instances without attributes."""
    offers = [next(one for one in gpu.profiles if one.name == name) for name in names]
    counts = Counter(names)
    if any(counts[one.name] > one.max_count for one in offers):
        return False
    ways = itertools.product(*(one.placements for one in offers))
    return any(not any(a.overlaps(b) for a, b in itertools.combinations(way, 2)) for way in ways)


@pytest.mark.parametrize("name", ["a100-40gb", "a30", "h200"])
def test_every_mix_is_placed_if_possible(name: str) -> None:
    gpu = board(name)
    plain = [one.name for one in gpu.profiles if "+" not in one.name and "-" not in one.name]
    seen: Counter[bool] = Counter()
    for size in range(1, 5):
        for names in itertools.combinations_with_replacement(plain, size):
            can = possible(gpu, list(names))
            seen[can] += 1
            try:
                target = solve(gpu, Counter(names))
            except CannotPlace as error:
                assert not can, names
                assert error.reason
            else:
                assert can, names
                sound(gpu, target)
                assert cut(target) == Counter(names)
    assert seen[True] > 8 and seen[False] > 8


BALANCED = {"1g.5gb": 2, "2g.10gb": 1, "3g.20gb": 1}


@given(st.data())
def test_instances_that_fit_are_kept(data: st.DataObject) -> None:
    gpu = board("a100-40gb")
    names = [one.name for one in gpu.profiles]
    some = st.dictionaries(st.sampled_from(names), st.integers(1, 4), max_size=3)
    before = data.draw(some.filter(lambda wish: fits(gpu, wish)))
    after = data.draw(some.filter(lambda wish: fits(gpu, wish)))
    instances = tuple(
        GpuInstance(n, 0, t.profile_id, t.name, t.slices, t.placement, (ComputeInstance(0, t.slices),))
        for n, t in enumerate(solve(gpu, before))
    )
    target = solve(board("a100-40gb", *instances), after)
    sound(gpu, target)
    assert cut(target) == Counter(after)
    kept = [one.kept for one in target if one.kept is not None]
    assert len({one.id for one in kept}) == len(kept)
    assert all(one.kept is None or one.kept.placement == one.placement for one in target)
    # an existing layout is kept whole
    assert all(one.kept is not None for one in solve(board("a100-40gb", *instances), before))


def fits(gpu: GpuLayout, wish: Mapping[str, int]) -> bool:
    try:
        solve(gpu, wish)
    except CannotPlace:
        return False
    return True


def test_additional_instances_move_no_existing_one() -> None:
    gpu = board("a100-40gb")
    there = instance(gpu, 1, "2g.10gb", 2)
    target = solve(board("a100-40gb", there), BALANCED)
    assert next(one for one in target if one.name == "2g.10gb").kept == there


def test_only_blocking_instances_are_removed() -> None:
    gpu = board("a100-40gb")
    a, b = instance(gpu, 1, "1g.5gb", 0), instance(gpu, 2, "1g.5gb", 5)
    target = solve(board("a100-40gb", a, b), {"4g.20gb": 1, "1g.5gb": 1})
    assert [one.kept for one in target if one.kept] == [b]


def test_compute_instances_share_a_gpu_instance() -> None:
    gpu = board("a100-40gb")
    target = solve(gpu, {"1c.3g.20gb": 3, "2c.3g.20gb": 1})
    assert sorted(one.devices for one in target) == [
        ("1c.3g.20gb", "1c.3g.20gb"),
        ("2c.3g.20gb", "1c.3g.20gb"),
    ]
    sound(gpu, target)


def test_added_compute_instance_keeps_the_others() -> None:
    gpu = board("a100-40gb")
    there = instance(gpu, 1, "3g.20gb", 4, 1, 1)
    (target,) = solve(board("a100-40gb", there), {"1c.3g.20gb": 3})
    assert target.kept == there
    assert [one.kept.id if one.kept else None for one in target.compute] == [0, 1, None]
    assert target.compute[2].placement == Placement(2, 1)


def test_empty_instance_is_removed() -> None:
    empty = GpuInstance(4, 0, 19, "1g.5gb", 1, Placement(6, 1))
    assert solve(board("a100-40gb", empty), {}) == ()


@pytest.mark.parametrize(
    ("name", "wish", "reason", "fits_"),
    [
        ("a100-40gb", {"3g.20gb": 3}, "3 x 3g.20gb are wanted, of which it takes at most 2", "2 x 3g.20gb"),
        (
            "a100-40gb",
            {"4g.20gb": 1, "3g.20gb": 2},
            "don't fit together in its 8",
            "1 x 4g.20gb, 1 x 3g.20gb",
        ),
        ("a100-40gb", {"1g.5gb+me": 2}, "at most 1", ""),
        ("a100-40gb", {"1g.10gb": 1, "1g.6gb": 1}, "it has no profile 1g.6gb", "1g.5gb, 2g.10gb"),
        ("a100-40gb", {"2c.2g.10gb": 1, "3c.4g.20gb": 1}, "no profile 3c.4g.20gb", ""),
        ("a100-40gb", {"1g.5gb": 10**6}, "at most 7", ""),
        ("a30", {"1g.6gb+me": 1, "2g.12gb+me": 1}, "need the same media engines", "1 x 2g.12gb+me"),
        ("rtx-pro-6000", {"1g.24gb+me.all": 1, "1g.24gb": 1}, "need the same media engines", "1 x 1g.24gb"),
        ("rtx-pro-6000", {"1g.24gb+me": 1, "1g.24gb+me.all": 1}, "need the same media engines", ""),
    ],
)
def test_refusal_names_the_reason_and_what_would_fit(
    name: str, wish: dict[str, int], reason: str, fits_: str
) -> None:
    with pytest.raises(CannotPlace) as raised:
        solve(board(name), wish)
    assert reason in raised.value.reason and fits_ in raised.value.fits


@pytest.mark.parametrize(
    "wish",
    [
        {"1g.24gb+me.all": 1, "1g.24gb-me": 3},
        {"1g.24gb+me": 1, "1g.24gb": 3},
        {"2g.48gb+gfx": 1, "1g.24gb+gfx": 2},
        {"2g.48gb-me": 2},
        {"2g.48gb+me.all": 1, "2g.48gb-me": 1},
    ],
)
def test_compatible_attributes(wish: dict[str, int]) -> None:
    assert cut(solve(board("rtx-pro-6000"), wish)) == Counter(wish)


def test_alias_of_a_profile_is_accepted() -> None:
    gpu = board("a100-40gb")
    renamed = tuple(
        replace(one, aliases=("7g.39gb",)) if one.name == "7g.40gb" else one for one in gpu.profiles
    )
    assert [one.name for one in solve(replace(gpu, profiles=renamed), {"7g.39gb": 1})] == ["7g.40gb"]
    assert parse_name("7g.39gb") is not None
