"""Sharing: number of shares and name of each unit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.errors import ConfigError
from gpunode.plugin.config.settings import SharedResource, Sharing
from gpunode.plugin.model import KubeletDevice, Problem, Unit
from gpunode.plugin.sharing import share
from tests.plugin.gpus import GPU_RESOURCE, named, uuid


def sharing(*entries, strategy="time-slicing", **more):
    return Sharing(strategy, tuple(SharedResource(*entry) for entry in entries), **more)


def shared(count, *entries, **more):
    return share(named(GPU_RESOURCE, count), sharing(*entries, **more), lambda unit, entry: "")


def counts(made):
    """Shares of each unit by resource; 0 for an unshared one."""
    return {
        one.name: {unit.index: one.share_counts.get(unit.id, 0) for unit in one.units}
        for one in made.resources
    }


def test_without_sharing_resources_are_unchanged():
    (only,) = share(named(GPU_RESOURCE, 2), None, lambda unit, entry: "").resources
    assert (only.sharing, only.shares, len(only.devices)) == ("none", 1, 2)


def test_every_unit_is_shared_and_ids_are_numbered_by_unit_then_share():
    (only,) = shared(2, (GPU_RESOURCE, 3)).resources
    expected = [f"{uuid(gpu)}::{number}" for gpu in (0, 1) for number in (0, 1, 2)]
    assert [device.id for device in only.devices] == expected
    assert (only.name, only.sharing, only.shares, only.single_share) == (
        GPU_RESOURCE, "time-slicing", 3, False,
    )  # fmt: skip
    assert {device.unit.id for device in only.devices} == {uuid(0), uuid(1)}


@pytest.mark.parametrize(
    ("entry", "by_default", "name"),
    [
        ((GPU_RESOURCE, 2), False, GPU_RESOURCE),
        ((GPU_RESOURCE, 2), True, "nvidia.com/gpu.shared"),
        ((GPU_RESOURCE, 2, "nvidia.com/slice"), True, "nvidia.com/slice"),
        ((GPU_RESOURCE, 2, "nvidia.com/slice"), False, "nvidia.com/slice"),
    ],
)
def test_name_of_a_shared_resource(entry, by_default, name):
    assert list(counts(shared(1, entry, rename_by_default=by_default))) == [name]


def test_some_devices_are_shared_and_the_others_keep_their_name():
    made = shared(4, (GPU_RESOURCE, 4, "", ("1", uuid(3))), rename_by_default=True)
    assert counts(made) == {
        GPU_RESOURCE: {"0": 0, "2": 0},
        "nvidia.com/gpu.shared": {"1": 4, "3": 4},
    }


def test_shared_and_whole_units_can_have_one_name():
    made = shared(3, (GPU_RESOURCE, 2, "", ("1",)), fail_requests_greater_than_one=True)
    (only,) = made.resources
    assert [device.id for device in only.devices] == [uuid(0), f"{uuid(1)}::0", f"{uuid(1)}::1", uuid(2)]
    assert (only.sharing, only.shares, only.single_share) == ("time-slicing", 2, True)


def test_each_entry_has_its_own_count():
    made = shared(5, (GPU_RESOURCE, 8, "", 2), (GPU_RESOURCE, 2, "", ("0",)), (GPU_RESOURCE, 4, "", 1))
    assert counts(made) == {GPU_RESOURCE: {"0": 2, "1": 8, "2": 8, "3": 4, "4": 0}}
    assert made.resources[0].shares == 8


def test_number_larger_than_available_uses_all_and_warns():
    made = shared(2, (GPU_RESOURCE, 2, "", 3))
    assert counts(made) == {GPU_RESOURCE: {"0": 2, "1": 2}}
    assert made.warnings == ("sharing: nvidia.com/gpu: 3 devices are to be shared, there are 2",)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((GPU_RESOURCE, 2), (GPU_RESOURCE, 4, "", ("0",))),
        ((GPU_RESOURCE, 2, "", ("0", "1")), (GPU_RESOURCE, 4, "", (uuid(0),))),
        ((GPU_RESOURCE, 2), (GPU_RESOURCE, 2, "nvidia.com/slice")),
    ],
)
def test_device_in_two_entries_is_an_error_that_names_both(first, second):
    with pytest.raises(ConfigError, match="shared by two entries") as caught:
        shared(2, first, second)
    for entry in (first, second):
        assert f"replicas {entry[1]}" in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("entries", "warned"),
    [
        (((GPU_RESOURCE, 2), (GPU_RESOURCE, 2)), False),
        (((GPU_RESOURCE, 2), (GPU_RESOURCE, 1)), True),
        (((GPU_RESOURCE, 2, "", ("0", "1")),) * 2, False),
    ],
)
def test_duplicate_entry_counts_once(entries, warned):
    made = shared(2, *entries)
    assert counts(made) == {GPU_RESOURCE: {"0": 2, "1": 2}}
    assert bool(made.warnings) is warned


def test_entry_without_a_device_on_this_node_is_skipped_with_a_warning():
    made = shared(1, ("nvidia.com/mig-1g.10gb", 2), (GPU_RESOURCE, 2, "", ("0", "9")))
    assert counts(made) == {GPU_RESOURCE: {"0": 2}}
    assert sorted(made.warnings) == [
        "sharing: nvidia.com/gpu: this node has no device 9",
        "sharing: this node has no nvidia.com/mig-1g.10gb: that entry has no effect",
    ]


def test_invalid_new_name_is_an_error():
    long = f"nvidia.com/{'x' * 60}"
    entry = SharedResource(long, 2)
    with pytest.raises(ConfigError, match=r"\.shared") as caught:
        share(named(long, 1), Sharing("time-slicing", (entry,), True), lambda unit, entry: "")
    assert "rename" in caught.value.hint


def test_shares_joining_another_resource_are_ordered_by_unit():
    units = {
        "nvidia.com/a": (KubeletDevice(uuid(1), Unit(uuid(1), uuid(1), "1")),),
        "nvidia.com/b": (KubeletDevice(uuid(0), Unit(uuid(0), uuid(0), "0")),),
    }
    made = share(units, sharing(("nvidia.com/b", 2, "nvidia.com/a")), lambda unit, entry: "")
    (only,) = made.resources
    assert [device.id for device in only.devices] == [f"{uuid(0)}::0", f"{uuid(0)}::1", uuid(1)]


def test_refused_unit_is_left_out_and_a_problem_applies_to_every_share():
    problem = Problem("mig-mode", "why")
    bad = Unit(uuid(1), uuid(1), "1")
    devices = {GPU_RESOURCE: (*named(GPU_RESOURCE, 1)[GPU_RESOURCE], KubeletDevice(uuid(1), bad, problem))}
    made = share(devices, sharing((GPU_RESOURCE, 2)), lambda unit, entry: "no" if unit.index == "0" else "")
    assert [(item.index, item.reason) for item in made.left_out] == [("0", "no")]
    assert [device.problem for device in made.resources[0].devices] == [problem, problem]


@given(
    st.integers(0, 6),
    st.lists(
        st.tuples(
            st.integers(1, 4),
            st.one_of(st.none(), st.integers(1, 4), st.lists(st.integers(0, 6), min_size=1, max_size=3)),
        ),
        min_size=1,
        max_size=3,
    ),
    st.booleans(),
)
def test_every_unit_occurs_once_with_any_sharing(count, entries, rename):
    made_of = [
        (GPU_RESOURCE, replicas, "", tuple(map(str, chosen)) if isinstance(chosen, list) else chosen)
        for replicas, chosen in entries
    ]
    try:
        made = shared(count, *made_of, rename_by_default=rename)
    except ConfigError as error:
        assert "two entries" in error.message
        return
    units = [unit.id for one in made.resources for unit in one.units]
    assert sorted(units) == [uuid(index) for index in range(count)]
    ids = [device.id for one in made.resources for device in one.devices]
    assert len(ids) == len(set(ids))
    for one in made.resources:
        assert one.shares == max([1, *one.share_counts.values()])
        assert (one.sharing == "none") is (not one.share_counts)
