"""Simulated nodes from their specification."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.errors import GpunodeError, UsageError
from gpunode.gpu.model import Topology
from gpunode.host import Host
from gpunode.plugin.simulate.node import MODELS, load, on_machine, parse_layout


def near(topology: Topology) -> set[tuple[int | None, int]]:
    return {(pair.level, pair.nvlinks) for pair in topology.pairs}


def test_every_model_is_its_own_server() -> None:
    for key, model in MODELS.items():
        inventory, topology = load(key)
        assert inventory.simulated
        assert len(inventory.gpus) == model.count
        assert {gpu.name for gpu in inventory.gpus} == {model.name}
        assert len(topology.pairs) == model.count * (model.count - 1) // 2
        for found in ("uuid", "pci", "minor"):
            assert len({getattr(gpu, found) for gpu in inventory.gpus}) == model.count


def test_boards_have_their_real_links() -> None:
    hgx, topology = load("h100:8")
    assert set(topology.switch_links.values()) == {18}
    assert len(topology.switch_links) == 8
    assert [gpu.numa for gpu in hgx.gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert near(load("a100:4")[1]) == {(20, 4), (50, 4)}
    assert near(load("l40s:10")[1]) == {(20, 0), (40, 0), (50, 0)}
    pairs = load("h100-pcie:4")[1].pairs
    assert sorted(pair.nvlinks for pair in pairs) == [0, 0, 0, 0, 12, 12]
    assert set(load("dgx2")[1].switch_links.values()) == {6}
    assert load("gb200")[0].gpus[2].pci == "0018:01:00.0"
    assert load("h100:4,links=none")[1] == Topology(load("h100:4,links=none")[1].pairs, {})


def test_groups_make_a_node_of_several_models() -> None:
    inventory, topology = load("a100:2,mig=1g.5gb+me/1g.5gb*2+a100:2+t4:1,numa=1,driver=570.1")
    assert [len(gpu.mig) for gpu in inventory.gpus] == [3, 3, 0, 0, 0]
    assert [gpu.index for gpu in inventory.gpus] == [0, 1, 2, 3, 4]
    assert inventory.gpus[4].name == "Tesla T4"
    assert {gpu.numa for gpu in inventory.gpus} == {0}
    assert inventory.driver_version == "570.1"
    uuids = [gpu.uuid for gpu in inventory.gpus]
    linked = [{uuids.index(pair.first), uuids.index(pair.second)} for pair in topology.pairs if pair.nvlinks]
    assert linked == [{2, 3}]


@pytest.mark.parametrize(
    ("real", "expected"),
    [
        ([], [0, 0, 0, 0, 1, 1, 1, 1]),
        (["node0"], [0] * 8),
        (["node0", "node1", "node2"], [0, 0, 0, 0, 1, 1, 1, 1]),
        (["node0", "node8"], [0, 0, 0, 0, 8, 8, 8, 8]),
    ],
)
def test_numa_nodes_are_those_of_the_machine(tmp_path: Path, real: list[str], expected: list[int]) -> None:
    for name in real:
        (tmp_path / "sys/devices/system/node" / name).mkdir(parents=True)
    found = on_machine(load("h100:8")[0], Host(tmp_path, {}))
    assert [gpu.numa for gpu in found.gpus] == expected
    unknown = on_machine(load("h100:8,numa=0")[0], Host(tmp_path, {}))
    assert {gpu.numa for gpu in unknown.gpus} == {None}


def test_numa_node_can_be_unknown() -> None:
    assert {gpu.numa for gpu in load("h100:8,numa=0")[0].gpus} == {None}


def test_uuids_are_stable_and_unique_to_the_node(tmp_path: Path) -> None:
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/hostname").write_text("node-7\n")
    host = Host(tmp_path, {})
    one, same, other = load("h100:8", host)[0], load("h100:4,node=node-7")[0], load("h100:8,node=node-8")[0]
    assert [gpu.uuid for gpu in one.gpus[:4]] == [gpu.uuid for gpu in same.gpus]
    assert not {gpu.uuid for gpu in one.gpus} & {gpu.uuid for gpu in other.gpus}


def test_mig_devices_are_placed_as_by_the_driver() -> None:
    (gpu,) = load("a100:1,mig=1g.5gb*2/3g.20gb/2g.10gb")[0].gpus
    assert gpu.mig_enabled
    devices = [(mig.index, mig.profile, mig.gi, mig.memory_bytes >> 30) for mig in gpu.mig]
    assert devices == [
        (0, "3g.20gb", 2, 20),
        (1, "2g.10gb", 3, 10),
        (2, "1g.5gb", 9, 5),
        (3, "1g.5gb", 10, 5),
    ]
    assert len({mig.uuid for mig in gpu.mig}) == len(gpu.mig)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("h10", "did you mean h100"),
        ("", "no GPU ''"),
        ("h100:0", "from 1 to 64"),
        ("h100:many", "from 1 to 64"),
        ("h100:40+h100:40", "80 simulated GPUs"),
        ("t4,mig=1g.5gb", "Tesla T4 has no MIG"),
        ("h100,mig=1g.5gb", "no MIG profile '1g.5gb'"),
        ("a100,mig=3g.20gb*2/1g.5gb", "does not fit"),
        ("a100,mig=1g.5gb+me*2", "can have 1 of"),
        ("a100,mig=1g.5gb*0", "from 1 to 8"),
        ("h100,colour=red", "not one of mig, links"),
        ("h100,mig=", "not one of mig, links"),
        ("h100,links=wire", "links=wire"),
        ("h100,numa=-1", "numa=-1"),
    ],
)
def test_invalid_specification_is_refused(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("+", r"\+")):
        load(spec)


@given(st.text(alphabet="ah100t4:,=+migl/*.gb0123456789 x", max_size=40))
def test_any_specification_is_parsed_or_refused(spec: str) -> None:
    try:
        inventory, _ = load(spec)
    except GpunodeError:
        return
    assert 1 <= len(inventory.gpus) <= 64


@given(data=st.data(), key=st.sampled_from([key for key, model in MODELS.items() if model.mig]))
def test_accepted_layout_has_no_overlap(data, key: str) -> None:
    model = MODELS[key]
    names = data.draw(st.lists(st.sampled_from([one.name for one in model.profiles]), min_size=1, max_size=8))
    try:
        placed = parse_layout("/".join(names), model)
    except UsageError:
        return
    assert sorted(profile.name for profile, _ in placed) == sorted(names)
    slots = [set(range(start, start + profile.size)) for profile, start in placed]
    assert all(not one & other for one, other in combinations(slots, 2))
    assert all(start in profile.starts for profile, start in placed)
    assert max(map(max, slots)) < model.slots


@pytest.mark.parametrize("key", [key for key, model in MODELS.items() if model.mig])
def test_limit_of_each_profile_fits(key: str) -> None:
    for profile in MODELS[key].profiles:
        assert len(parse_layout(f"{profile.name}*{profile.limit}", MODELS[key])) == profile.limit
        with pytest.raises(UsageError):
            parse_layout(f"{profile.name}*{profile.limit + 1}", MODELS[key])
