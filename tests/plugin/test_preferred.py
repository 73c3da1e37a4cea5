"""GetPreferredAllocation's policy."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from gpunode.gpu.model import Inventory
from gpunode.plugin.devices import DeviceTable, Snapshot
from gpunode.plugin.preferred import preferred
from tests.plugin.nodes import gpu, table, uuid


def ids(*indices: int) -> tuple[str, ...]:
    return tuple(uuid(index) for index in indices)


def node_of(snapshot: Snapshot, device_id: str) -> int | None:
    device = snapshot.find(device_id)
    assert device is not None
    return device.numa


def test_a_container_gets_gpus_of_one_numa_node() -> None:
    snapshot = table(8).snapshot()
    assert preferred(snapshot, ids(0, 3, 4, 5, 6, 7), (), 4) == ids(4, 5, 6, 7)


def test_the_tightest_node_is_used_up_first() -> None:
    snapshot = table(8).snapshot()
    assert preferred(snapshot, ids(0, 1, 2, 3, 6, 7), (), 2) == ids(6, 7)


def test_the_node_of_a_required_gpu_comes_first() -> None:
    snapshot = table(8).snapshot()
    assert preferred(snapshot, ids(*range(8)), ids(5), 3) == ids(5, 4, 6)


def test_more_than_a_node_holds_takes_whole_nodes() -> None:
    snapshot = table(8).snapshot()
    assert preferred(snapshot, ids(0, 1, 4, 5, 6, 7), (), 5) == ids(4, 5, 6, 7, 0)


def test_equal_choices_go_to_the_lowest_index() -> None:
    assert preferred(table(8).snapshot(), ids(7, 6, 5, 4, 3, 2, 1, 0), (), 1) == ids(0)


def test_gpus_without_a_known_node_are_one_group() -> None:
    made = DeviceTable()
    made.sighting(Inventory("550", gpus=tuple(gpu(index) for index in range(4))))
    assert preferred(made.snapshot(), ids(3, 2, 1), (), 2) == ids(1, 2)


def test_impossible_requests_are_answered_as_well_as_they_can_be() -> None:
    snapshot = table(4).snapshot()
    assert preferred(snapshot, ids(0, 1), (), 5) == ids(0, 1)
    assert preferred(snapshot, ids(0, 1), (), 0) == ()
    assert preferred(snapshot, ids(0, 1), (), -3) == ()
    assert preferred(snapshot, ids(0, 1, 2), ids(2, 1, 0), 2) == ids(0, 1)
    assert preferred(snapshot, ("GPU-gone", uuid(1)), (), 1) == ids(1)
    assert preferred(snapshot, ("GPU-gone",), (), 1) == ("GPU-gone",)


@st.composite
def requests(draw: st.DrawFn) -> tuple[DeviceTable, list[str], list[str], int]:
    nodes = draw(st.lists(st.sampled_from([0, 1, 2, None]), min_size=1, max_size=9))
    made = DeviceTable()
    made.sighting(Inventory("550", gpus=tuple(gpu(index, node) for index, node in enumerate(nodes))))
    available = draw(st.lists(st.sampled_from(range(len(nodes))), min_size=1, unique=True))
    size = draw(st.integers(1, len(available)))
    required = draw(st.lists(st.sampled_from(available), max_size=size, unique=True))
    return made, [uuid(index) for index in available], [uuid(index) for index in required], size


@given(requests(), st.randoms(use_true_random=False))
def test_the_answer_is_complete_minimal_and_does_not_depend_on_order(request, random) -> None:
    made, available, required, size = request
    snapshot = made.snapshot()
    answer = preferred(snapshot, available, required, size)
    assert len(answer) == len(set(answer)) == size
    assert set(required) <= set(answer) <= set(available)
    shuffled = random.sample(available, len(available))
    assert preferred(snapshot, shuffled, required[::-1], size) == answer

    def spread(chosen: tuple[str, ...]) -> int:
        return len({node_of(snapshot, item) for item in chosen} - {None})

    rest = [item for item in available if item not in required]
    if all(node_of(snapshot, item) is not None for item in available):
        best = min(spread((*required, *more)) for more in combinations(rest, size - len(required)))
        assert spread(answer) == best
