"""Partitions of a container: those of few GPUs, near to each other."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.gpu.model import Pair, Topology
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.model import KubeletDevice, Resource, Snapshot, Unit
from gpunode.plugin.placement import Links, prefer

AMD = Settings(vendor="amd")


def node(gpus: int, parts: int = 8, numa: int = 2) -> tuple[Snapshot, dict[str, str]]:
    """Every GPU in `parts` partitions, and which GPU each belongs to."""
    units = [
        Unit(
            f"gpu{gpu}" if part == 0 else f"xcp{gpu}-{part}",
            f"gpu{gpu}",
            f"{gpu}:{part}",
            numa=gpu * numa // gpus,
        )
        for gpu in range(gpus)
        for part in range(parts)
    ]
    resource = Resource("amd.com/gpu", tuple(KubeletDevice(unit.id, unit) for unit in units))
    return Snapshot(1, resource), {unit.id: unit.gpu for unit in units}


def hives(gpus: int, size: int) -> Topology:
    """XGMI within a hive and nothing between hives."""
    pairs = combinations(range(gpus), 2)
    return Topology(
        tuple(Pair(f"gpu{a}", f"gpu{b}", 40, 1 if a // size == b // size else 0) for a, b in pairs)
    )


@given(st.data())
def test_response_uses_the_fewest_gpus(data: st.DataObject) -> None:
    gpus = data.draw(st.integers(1, 5))
    snapshot, parent = node(gpus, 4, 1)
    ids = list(parent)
    available = data.draw(st.lists(st.sampled_from(ids), min_size=1, unique=True))
    size = data.draw(st.integers(1, len(available)))
    must = data.draw(st.lists(st.sampled_from(available), max_size=size, unique=True))
    found = prefer(AMD, snapshot, hives(gpus, 2), available, must, size)
    assert len(set(found)) == size
    assert set(must) <= set(found) <= set(available)
    used = {parent[one] for one in found}
    begun = {parent[one] for one in must}
    room = {gpu: sum(parent[one] == gpu for one in available) for gpu in set(parent.values())}
    fewest = next(
        count
        for count in range(len(begun), gpus + 1)
        for more in combinations(sorted(room.keys() - begun), count - len(begun))
        if sum(room[gpu] for gpu in (*begun, *more)) >= size
    )
    assert len(used) == fewest
    assert found == prefer(AMD, snapshot, hives(gpus, 2), available[::-1], must[::-1], size)


def test_two_gpus_of_one_hive_are_preferred_to_the_first_two() -> None:
    snapshot, parent = node(4, numa=1)
    available = [one for one, gpu in parent.items() if gpu != "gpu0"]
    found = prefer(AMD, snapshot, hives(4, 2), available, (), 12)
    assert {parent[one] for one in found} == {"gpu2", "gpu3"}


def test_partially_used_gpu_is_filled_first() -> None:
    snapshot, parent = node(2)
    available = [one for one in parent if one not in ("gpu0", "xcp0-1")]
    found = prefer(AMD, snapshot, hives(2, 2), available, ("xcp1-3",), 8)
    assert {parent[one] for one in found} == {"gpu1"}


def test_many_gpus_need_no_long_search(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot, parent = node(40, 2, 8)
    asked = []

    def counted(links: Links, a: Unit, b: Unit) -> int:
        asked.append((a, b))
        return 0

    monkeypatch.setattr(Links, "score", counted)
    found = prefer(AMD, snapshot, Topology(), list(parent), (), 10)
    assert len(found) == 10 and len({parent[one] for one in found}) == 5
    assert 0 < len(asked) <= 10 * 1000
