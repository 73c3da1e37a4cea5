"""The search finds what trying everything finds, and looks at little."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import combinations, takewhile
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpunode.plugin.placement.divide import QUICK_STEPS, Choice, Divider
from gpunode.plugin.placement.exchange import families
from gpunode.plugin.placement.modules import classes_of
from gpunode.plugin.placement.seed import seed
from tests.plugin.placement.machines import (
    MACHINES,
    NODE,
    PIX,
    SYS,
    Machine,
    Matrix,
    brute_force,
    random_matrix,
    tree,
)

SIXTEEN = [name for name, machine in MACHINES.items() if len(machine.units) == 16]


def rank(divider: Divider, choice: Choice, free: list[int]) -> tuple[int, int, int]:
    rest = [at for at in free if at not in choice.group]
    return choice.total, choice.worth, -sum(divider.matrix[a][b] for a in choice.group for b in rest)


def matrix_of(count: int, draw: st.DrawFn, weights: list[int]) -> Matrix:
    made = [[0] * count for _ in range(count)]
    for a, b in combinations(range(count), 2):
        made[a][b] = made[b][a] = draw(st.sampled_from(weights))
    return made


@st.composite
def questions(draw: st.DrawFn) -> tuple[Matrix, list[int], list[int], int]:
    """Any topology: random links, or blocks of GPUs, or links across blocks, or blocks that are alike and
    linked alike, in any order; up to nine GPUs.
    """
    count = draw(st.integers(2, 9))
    kind = draw(st.sampled_from(["links", "blocks", "both", "alike"]))
    if kind == "alike":
        width, blocks = draw(st.sampled_from([(2, 3), (2, 4), (3, 2), (3, 3), (4, 2)]))
        within, across = (matrix_of(width, draw, [0, 30, 100]) for _ in range(2))
        itself = draw(st.lists(st.sampled_from([0, 30]), min_size=width, max_size=width))
        count = width * blocks
        order = draw(st.permutations(range(count)))
        made = [[0] * count for _ in range(count)]
        for a, b in combinations(range(count), 2):
            one, other = a % width, b % width
            part = within if a // width == b // width else across
            weight = part[one][other] if one != other else itself[one]
            made[order[a]][order[b]] = made[order[b]][order[a]] = weight
        free = draw(st.lists(st.sampled_from(range(count)), min_size=1, unique=True))
        size = draw(st.integers(1, len(free)))
        return made, free, draw(st.lists(st.sampled_from(free), max_size=size, unique=True)), size
    made = matrix_of(count, draw, [10, 20, 110, 220] if kind != "blocks" else [0])
    if kind != "links":
        block = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
        for a, b in combinations(range(count), 2):
            near = 60 if block[a] == block[b] else 30 if block[a] // 2 == block[b] // 2 else 0
            made[a][b] += near
            made[b][a] += near
    free = draw(st.lists(st.sampled_from(range(count)), min_size=1, unique=True))
    size = draw(st.integers(1, len(free)))
    must = draw(st.lists(st.sampled_from(free), max_size=size, unique=True))
    return made, free, must, size


@settings(max_examples=150, deadline=None)
@given(questions(), st.randoms(use_true_random=False))
def test_any_topology_is_divided_as_well_as_trying_everything_does(question, random: Random) -> None:
    matrix, free, must, size = question
    divider = Divider(matrix)
    choice = divider.choose(free, must, size)
    assert choice.exact
    assert len(choice.group) == len(set(choice.group)) == size
    assert set(must) <= set(choice.group) <= set(free)
    assert divider.choose(random.sample(free, len(free)), must[::-1], size) == Choice(
        choice.group, choice.worth, choice.total, divider.choose(free, must, size).steps
    )
    if len(must) < size < len(free):
        best = brute_force(divider.matrix, free, must, size)
        assert rank(divider, choice, free) == best
        lower = takewhile(lambda group: group < tuple(sorted(choice.group)), combinations(sorted(free), size))
        for group in lower:
            if {*must} <= {*group}:
                assert brute_force(divider.matrix, free, group, size) != best, group


@pytest.mark.parametrize("name", [name for name, machine in MACHINES.items() if len(machine.units) <= 8])
def test_real_machines_are_divided_as_well_as_trying_everything_does(name: str) -> None:
    divider = Divider(MACHINES[name].matrix)
    random = Random(5)
    count = len(divider.matrix)
    for size in range(1, count):
        for free in (list(range(count)), random.sample(range(count), random.randint(size + 1, count))):
            must = random.sample(free, random.randint(0, min(2, size - 1)))
            found = divider.choose(free, must, size)
            assert rank(divider, found, free) == brute_force(divider.matrix, free, must, size), (free, must)


@pytest.mark.parametrize("name", SIXTEEN)
def test_sixteen_gpus_in_fours_are_divided_as_well_as_trying_everything_does(name: str) -> None:
    divider = Divider(MACHINES[name].matrix)
    free = [at for at in range(16) if at not in (1, 6, 9, 14)]
    found = divider.choose(free, (), 4)
    assert rank(divider, found, free) == brute_force(divider.matrix, free, (), 4)


@pytest.mark.parametrize("name", SIXTEEN)
def test_on_regular_machines_of_sixteen_few_groups_are_looked_at(name: str) -> None:
    """There are 2.6 million divisions into fours, and 12870 groups of eight."""
    machine = MACHINES[name]
    random = Random(16)
    for size in range(1, 16):
        divider = Divider(machine.matrix)
        for free in (range(16), random.sample(range(16), random.randint(size, 16))):
            found = divider.choose(list(free), (), size)
            assert found.exact
            assert found.steps < 2_000, (size, found)


@pytest.mark.parametrize("name", SIXTEEN)
def test_a_pod_on_a_machine_of_sixteen_waits_no_longer_than_some_milliseconds(name: str) -> None:
    """Every size, cold, all and any part available. Twenty times what it takes on an idle machine."""
    random = Random(61)
    for size in range(1, 16):
        for count in (16, random.randint(size + 1, 16)):
            free = random.sample(range(16), count)
            start = time.process_time()
            found = Divider(MACHINES[name].matrix).choose(free, (), size, quick=True)
            assert time.process_time() - start < 0.25
            assert found.exact


def test_the_most_irregular_sixteen_are_answered_at_once_and_exactly_with_patience() -> None:
    matrix = random_matrix(1)
    divider = Divider(matrix)
    start = time.process_time()
    quick = divider.choose(range(16), (3,), 4, quick=True)
    assert time.process_time() - start < 0.5  # a tenth of it on an idle machine
    assert not quick.exact
    assert quick.steps <= QUICK_STEPS
    assert 3 in quick.group
    patient = divider.choose(range(16), (3,), 4)
    assert patient.exact
    assert patient.steps < 300_000
    assert 0.97 * patient.total <= quick.total <= patient.total
    assert patient == replace(Divider(matrix).choose(range(16), (3,), 4), steps=patient.steps)


@settings(max_examples=60, deadline=None)
@given(questions())
def test_a_search_that_is_given_up_anywhere_tells_the_truth(question) -> None:
    """What it says its division is worth is worth no more than the best, and no less than its seed."""
    matrix, free, must, size = question
    best = Divider(matrix).choose(free, must, size)
    for most in (1, 2, 5, 20, 100):
        divider = Divider(matrix, most_steps=most)
        found = divider.choose(free, must, size, quick=True)
        assert len(set(found.group)) == size
        assert set(must) <= set(found.group) <= set(free)
        assert found.total <= best.total
        if found.exact:
            assert (found.total, found.worth) == (best.total, best.worth)
        if len(must) < size < len(free):
            rest = sorted({*free} - {*must})
            groups = seed(divider.matrix, sorted(must), rest, size)
            assert sorted(at for group in groups for at in group) == sorted(free)
            assert found.total >= sum(map(divider.worth, groups))


def test_where_the_search_is_given_up_the_answer_is_still_complete() -> None:
    machine = MACHINES["dgx1-v100"]
    found = Divider(machine.matrix, most_steps=3).choose(range(8), [5], 3)
    assert not found.exact
    assert len(set(found.group)) == 3
    assert 5 in found.group


def test_partitions_of_a_large_node_are_kept_together_in_bounded_steps() -> None:
    """Eight GPUs of eight partitions each: AMD's MI300X in CPX mode."""
    divider = Divider(Machine(64, tree(8, PIX, 32, NODE)).matrix)
    random = Random(64)
    for size in (2, 5, 8, 12, 16, 33):
        found = divider.choose(range(64), (), size, quick=True)
        assert len(found.group) == size
        assert found.steps <= 700
    free = random.sample(range(64), 40)
    assert set(divider.choose(free, (), 7, quick=True).group) <= set(free)
    assert len({at // 8 for at in divider.choose(range(64), (), 8, quick=True).group}) == 1


@pytest.mark.parametrize("name", ["l40s-pcie8", "pcie-pairs", "dgx1-v100", "bridged-across"])
def test_no_group_is_worse_than_nvidias_by_nvidias_own_score(name: str) -> None:
    """Of the best divisions NVIDIA's plugin takes the first that it finds: the best group of any is at least
    as good."""
    machine = MACHINES[name]
    matrix = machine.nvidia_matrix
    divider, nvidia = Divider(machine.matrix), Divider(matrix)
    for free in (free for count in (6, 8) for free in combinations(range(8), count)):
        for must in [(), *combinations(free, 1), *combinations(free, 2)]:
            for size in range(max(2, len(must) + 1), len(free)):
                group = divider.choose(free, must, size).group
                rest = [at for at in free if at not in group]
                best = nvidia.choose(free, must, size)
                worth = nvidia.worth(group)
                total = worth + sum(map(nvidia.worth, nvidia.divide(rest, size)))
                assert (total, worth) == (best.total, best.worth), (free, must, size)


def test_a_pair_that_is_left_over_is_not_broken_for_one_gpu() -> None:
    machine = MACHINES["bridged"]
    divider = Divider(machine.matrix)
    assert divider.choose([0, 1, 2, 4, 5], (), 1).group == (2,)
    assert divider.choose([0, 1, 2, 3, 7], (), 1).group == (7,)
    assert divider.choose(range(8), (), 1).group == (0,)


def test_division_lists_every_gpu_once() -> None:
    divider = Divider(MACHINES["l40s"].matrix)
    groups = divider.divide(range(10), 4)
    assert sorted(at for group in groups for at in group) == list(range(10))
    assert [len(group) for group in groups] == [4, 4, 2]
    assert groups[0] == (0, 1, 2, 3)
    assert groups[1] == (5, 6, 7, 8)


def test_exchangeable_gpus_are_counted_and_not_told_apart() -> None:
    classes = classes_of(Machine(16, tree(2, PIX, 4, NODE, 8, SYS)).matrix)
    assert len(classes.members) == 8
    assert set(classes.orbit) == {0}
    one = classes.canonical(classes.counts([0, 1, 2, 15]))
    assert one == classes.canonical(classes.counts([8, 9, 11, 5]))
    assert one != classes.canonical(classes.counts([0, 1, 4, 15]))


def test_pairs_that_can_only_be_exchanged_as_pairs_are_found() -> None:
    classes = classes_of(MACHINES["bridged-across-16"].matrix)
    assert classes.canonical(classes.counts([0, 8, 3])) == classes.canonical(classes.counts([5, 13, 6]))
    assert classes.canonical(classes.counts([0, 8, 3])) != classes.canonical(classes.counts([5, 12, 6]))
    sockets = classes_of(MACHINES["bridged-across-plx"].matrix)
    assert sockets.canonical(sockets.counts([1, 5, 3])) == sockets.canonical(sockets.counts([10, 14, 8]))


@settings(max_examples=100, deadline=None)
@given(questions())
def test_what_is_said_to_be_exchangeable_is(question) -> None:
    matrix = question[0]
    rows = list(range(len(matrix)))
    for family in families(matrix, [()] * len(matrix)):
        assert len({at for block in family for at in block}) == len(family) * len(family[0])
        for one, other in combinations(family, 2):
            to = dict(zip((*one, *other), (*other, *one), strict=True))
            assert all(matrix[to.get(a, a)][to.get(b, b)] == matrix[a][b] for a in rows for b in rows)


def test_nearness_may_be_negative() -> None:
    matrix = [[0 if a == b else -50 - 10 * (a // 2 != b // 2) for b in range(4)] for a in range(4)]
    assert Divider(matrix).choose([0, 1, 2, 3], [2], 2).group == (2, 3)
