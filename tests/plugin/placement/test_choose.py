"""Responses of GetPreferredAllocation: whole GPUs, shares and MIG devices, and requests that can't be met."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpunode.gpu.model import Topology
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.model import KubeletDevice, Problem, Resource, Snapshot, Unit
from gpunode.plugin.placement import prefer
from tests.plugin.placement.machines import MACHINES, RESOURCE, ids, unit, uuid

PACKED = Settings(shared_devices_allocation_policy="packed")


def chosen(machine: str, available, must=(), size: int = 1) -> tuple[str, ...]:
    found = MACHINES[machine]
    return prefer(Settings(), found.snapshot(), found.topology, ids(*available), ids(*must), size)


def shared(gpus: int, shares: int) -> Snapshot:
    units = [unit(index, index * 2 // gpus) for index in range(gpus)]
    devices = tuple(KubeletDevice(f"{one.id}::{n}", one) for one in units for n in range(shares))
    return Snapshot(1, Resource(RESOURCE, devices, "time-slicing", shares))


def share(index: int, number: int) -> str:
    return f"{uuid(index)}::{number}"


def partitioned(*counts: int) -> Snapshot:
    devices = []
    for gpu, count in enumerate(counts):
        for slot in range(count):
            one = Unit(f"MIG-{gpu}-{slot}", uuid(gpu), f"{gpu}:{slot}", numa=gpu // 2)
            devices.append(KubeletDevice(one.id, one))
    return Snapshot(1, Resource(RESOURCE, tuple(devices)))


# --- whole GPUs -----------------------------------------------------------------------------------------


def test_bridged_pairs_stay_together_and_numa_nodes_too() -> None:
    assert chosen("bridged", range(8), size=2) == ids(0, 1)
    assert chosen("bridged", range(8), [5], 2) == ids(5, 4)
    assert chosen("bridged-across", range(8), size=2) == ids(0, 4)
    assert chosen("pcie", [0, 3, 4, 5, 6, 7], size=4) == ids(4, 5, 6, 7)


def test_fullest_numa_node_is_used_up_first() -> None:
    assert chosen("pcie", [0, 1, 2, 3, 6, 7], size=2) == ids(6, 7)


def test_nvswitch_links_count_and_the_numa_node_breaks_ties() -> None:
    assert chosen("hgx-h100", range(8), [6], 4) == ids(6, 4, 5, 7)
    half = MACHINES["pcie"]
    switched = half.topology._replace(switch_links={uuid(index): 6 for index in (0, 1, 6, 7)})
    assert prefer(Settings(), half.snapshot(), switched, ids(*range(8)), (), 4) == ids(0, 1, 6, 7)


def test_without_link_data_numa_and_index_decide() -> None:
    snapshot = MACHINES["pcie"].snapshot()
    assert prefer(Settings(), snapshot, Topology(), ids(7, 5, 3, 1, 2, 6), (), 3) == ids(1, 2, 3)
    bare = Snapshot(1, Resource(RESOURCE, tuple(KubeletDevice(one.id, one) for one in map(unit, range(4)))))
    assert prefer(Settings(), bare, Topology(), ids(3, 2, 1), (), 2) == ids(1, 2)


def test_unhealthy_devices_are_skipped() -> None:
    snapshot = MACHINES["pcie"].snapshot()
    sick = tuple(
        device._replace(problem=Problem("lost", "lost")) if device.unit.index == "0" else device
        for device in snapshot.devices
    )
    example_request = Snapshot(2, replace(snapshot.resource, devices=sick))
    assert prefer(Settings(), example_request, Topology(), ids(0, 1, 2), (), 2) == ids(1, 2)


def test_amd_partitions_come_from_the_fewest_gpus() -> None:
    snapshot = partitioned(4, 4)
    ids_of = [device.id for device in snapshot.devices]
    answer = prefer(Settings(vendor="amd"), snapshot, Topology(), ids_of[1:], (), 4)
    assert answer == tuple(ids_of[4:])


# --- shares and partitions ------------------------------------------------------------------------------


def test_shares_go_to_different_gpus_starting_with_the_least_used() -> None:
    snapshot = shared(4, 4)
    everything = [device.id for device in snapshot.devices]
    free = [one for one in everything if one not in (share(0, 0), share(0, 1), share(1, 0))]
    assert prefer(Settings(), snapshot, Topology(), free, (), 1) == (share(2, 0),)
    assert prefer(Settings(), snapshot, Topology(), free, (), 3) == (share(2, 0), share(3, 0), share(1, 1))
    assert prefer(Settings(), snapshot, Topology(), everything, (share(3, 2),), 2) == (
        *(share(3, 2), share(2, 0)),
    )


def test_packed_shares_fill_the_most_used_gpu() -> None:
    snapshot = shared(4, 4)
    free = [device.id for device in snapshot.devices if device.id not in (share(2, 0), share(2, 1))]
    assert prefer(PACKED, snapshot, Topology(), free, (), 3) == (share(2, 2), share(2, 3), share(3, 0))


def test_mig_devices_are_spread_and_packed_by_their_gpu() -> None:
    snapshot = partitioned(3, 3, 3)
    free = [device.id for device in snapshot.devices if device.id not in ("MIG-1-0", "MIG-0-2")]
    assert prefer(Settings(), snapshot, Topology(), free, (), 2) == ("MIG-2-0", "MIG-0-0")
    assert prefer(PACKED, snapshot, Topology(), free, (), 2) == ("MIG-0-0", "MIG-0-1")
    assert prefer(PACKED, snapshot, Topology(), free[2:], (), 2) == ("MIG-1-1", "MIG-1-2")


def test_sixty_four_of_a_thousand_shares_are_spread_evenly_and_quickly() -> None:
    snapshot = shared(8, 128)
    available = Random(1).sample([device.id for device in snapshot.devices], 1024)
    prefer(Settings(), snapshot, Topology(), available, (), 64)
    start = time.thread_time()
    answer = prefer(Settings(), snapshot, Topology(), available, (), 64)
    assert time.thread_time() - start < 0.05  # a tenth of it on an idle machine
    assert set(Counter(one.partition("::")[0] for one in answer).values()) == {8}


# --- requests that can't be met, and invariants ---------------------------------------------------------


def test_impossible_requests_get_the_best_possible_response() -> None:
    assert chosen("pcie", [0, 1], size=5) == ids(0, 1)
    assert chosen("pcie", [0, 1], size=0) == ()
    assert chosen("pcie", [0, 1], size=-3) == ()
    assert chosen("pcie", [0, 1, 2], [2, 1, 0], 2) == ids(0, 1)
    snapshot = MACHINES["pcie"].snapshot()
    assert prefer(Settings(), snapshot, Topology(), ("GPU-gone", uuid(1)), (), 1) == ids(1)
    assert prefer(Settings(), snapshot, Topology(), ids(1), ("GPU-gone",), 2) == ("GPU-gone", uuid(1))
    assert prefer(Settings(), Snapshot(1, Resource(RESOURCE)), Topology(), ids(1), (), 1) == ()


KINDS = ("gpus", "shares", "mig", "mig-shares")


def example_request(kind: str, draw: st.DrawFn) -> tuple[Snapshot, Topology]:
    if kind == "gpus":
        machine = MACHINES[draw(st.sampled_from(["dgx1-v100", "hgx-h100", "dgx2", "t4", "l40s"]))]
        return machine.snapshot(), machine.topology
    if kind == "shares":
        return shared(draw(st.integers(1, 4)), draw(st.integers(2, 5))), Topology()
    mig = partitioned(*draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    if kind == "mig":
        return mig, Topology()
    devices = tuple(KubeletDevice(f"{one.id}::{n}", one.unit) for one in mig.devices for n in range(3))
    return Snapshot(1, Resource(RESOURCE, devices, "time-slicing", 3)), Topology()


@st.composite
def requests(draw: st.DrawFn):
    snapshot, topology = example_request(draw(st.sampled_from(KINDS)), draw)
    everything = [device.id for device in snapshot.devices]
    available = draw(st.lists(st.sampled_from(everything), min_size=1, unique=True))
    size = draw(st.integers(1, len(available)))
    must = draw(st.lists(st.sampled_from(available), max_size=size, unique=True))
    return snapshot, topology, available, must, size


@pytest.mark.parametrize("policy", ["distributed", "packed"])
@settings(max_examples=60, deadline=None)
@given(request=requests(), random=st.randoms(use_true_random=False))
def test_response_is_complete_and_independent_of_the_request_order(request, random, policy) -> None:
    snapshot, topology, available, must, size = request
    chosen_by = Settings(shared_devices_allocation_policy=policy)
    answer = prefer(chosen_by, snapshot, topology, available, must, size)
    assert len(answer) == len(set(answer)) == size
    assert set(answer[: len(must)]) == set(must)
    assert set(answer) <= set(available)
    shuffled = random.sample(available, len(available))
    assert prefer(chosen_by, snapshot, topology, shuffled, must[::-1], size) == answer


@settings(max_examples=60, deadline=None)
@given(request=requests())
def test_distributed_shares_use_as_many_gpus_as_possible(request) -> None:
    snapshot, topology, available, must, size = request
    answer = prefer(Settings(), snapshot, topology, available, must, size)
    if snapshot.resource.shares > 1 or snapshot.devices[0].unit.partition:
        gpu_of = {device.id: device.unit.gpu for device in snapshot.devices}
        fixed = {gpu_of[one] for one in must}
        others = {gpu_of[one] for one in available if one not in must} - fixed
        assert len({gpu_of[one] for one in answer}) == len(fixed) + min(len(others), size - len(must))
