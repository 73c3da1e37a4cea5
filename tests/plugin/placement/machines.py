"""Real machine models, as matrices and as units with links; and the brute-force search."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import combinations
from random import Random

from gpunode.gpu.model import Pair, Topology
from gpunode.plugin.model import KubeletDevice, Resource, Snapshot, Unit
from gpunode.plugin.placement import Links

RESOURCE = "nvidia.com/gpu"
INT, PIX, PXB, PHB, NODE, SYS = 0, 10, 20, 30, 40, 50
Level = Callable[[int, int], int]
Matrix = list[list[int]]


def uuid(index: int) -> str:
    return f"GPU-{index:08d}"


def ids(*indices: int) -> tuple[str, ...]:
    return tuple(uuid(index) for index in indices)


def unit(index: int, numa: int | None = None) -> Unit:
    return Unit(uuid(index), uuid(index), str(index), numa=numa)


class Machine:
    """`level` is the PCIe topology, `links` NVLinks between two GPUs, `switch` those to NVSwitches."""

    def __init__(
        self,
        count: int,
        level: Level,
        sockets: int = 2,
        links: dict[tuple[int, int], int] | None = None,
        switch: int = 0,
    ) -> None:
        self.units = tuple(unit(index, index * sockets // count) for index in range(count))
        self.topology = Topology(
            tuple(
                Pair(uuid(a), uuid(b), level(a, b), (links or {}).get((a, b), 0))
                for a, b in combinations(range(count), 2)
            ),
            {uuid(index): switch for index in range(count)} if switch else {},
        )

    @property
    def matrix(self) -> Matrix:
        score = Links(self.topology).score
        return [[0 if a is b else score(a, b) for b in self.units] for a in self.units]

    @property
    def nvidia_matrix(self) -> Matrix:
        """The scores of NVIDIA's plugin: 100 for each direct link, and 60 less NVML's level."""
        pairs = {(pair.first, pair.second): pair for pair in self.topology.pairs}

        def score(a: str, b: str) -> int:
            pair = pairs[min(a, b), max(a, b)]
            return 100 * pair.nvlinks + 60 - (pair.level or 0)

        return [[0 if a is b else score(a.id, b.id) for b in self.units] for a in self.units]

    def snapshot(self) -> Snapshot:
        return Snapshot(1, Resource(RESOURCE, tuple(KubeletDevice(unit.id, unit) for unit in self.units)))


def tree(*sizes_and_levels: int) -> Level:
    """``tree(2, PIX, 4, PXB, 8, NODE)``: the first that holds both, otherwise across the sockets."""
    steps = list(zip(sizes_and_levels[::2], sizes_and_levels[1::2], strict=True))

    def level(a: int, b: int) -> int:
        return next((near for size, near in steps if a // size == b // size), SYS)

    return level


_CUBE = {  # DGX-1 with V100: six links each, twice to some
    **{(0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2},
    **{(2, 6): 1, (3, 7): 1, (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2},
}
_PLX_OF_FIVE = tree(5, PXB)


def _t4(a: int, b: int) -> int:
    """Sixteen cards behind switches with five, four, three and four slots."""
    switch = [0] * 5 + [1] * 4 + [2] * 3 + [3] * 4
    return PIX if switch[a] == switch[b] else NODE if switch[a] // 2 == switch[b] // 2 else SYS


MACHINES = {
    "dgx1-v100": Machine(8, tree(2, PIX, 4, NODE), links=_CUBE),
    "hgx-h100": Machine(8, tree(2, PXB, 4, NODE), switch=18),
    "dgx2": Machine(16, tree(2, PIX, 4, PXB, 8, NODE), switch=6),
    "gb200": Machine(4, tree(2, NODE), switch=18),
    "pcie": Machine(8, tree(4, NODE)),
    "l40s-pcie8": Machine(8, tree(2, PIX, 4, NODE)),
    "pcie-pairs": Machine(8, tree(2, PIX, 8, NODE)),
    "bridged": Machine(8, tree(4, NODE), links={(a, a + 1): 4 for a in range(0, 8, 2)}),
    "bridged-across": Machine(8, tree(4, NODE), links={(a, a + 4): 4 for a in range(4)}),
    "l40s": Machine(10, _PLX_OF_FIVE),
    "t4": Machine(16, _t4),
    "nvswitch-16": Machine(16, tree(8, NODE), switch=18),
    "plx-16": Machine(16, tree(4, PIX, 8, NODE)),
    "bridged-16": Machine(16, tree(8, NODE), links={(a, a + 1): 4 for a in range(0, 16, 2)}),
    "bridged-across-16": Machine(16, tree(8, NODE), links={(a, a + 8): 4 for a in range(8)}),
    "bridged-across-plx": Machine(
        16, tree(4, PIX, 8, NODE), links={(a + b, a + b + 4): 4 for a in range(4) for b in (0, 8)}
    ),
    "islands": Machine(
        16,
        tree(2, PIX, 4, PXB, 8, NODE),
        links={(a, b): 18 for a, b in combinations(range(16), 2) if a // 8 == b // 8},
    ),
}


def random_matrix(seed: int, count: int = 16) -> Matrix:
    """Random links: no such machine exists."""
    random = Random(seed)
    matrix = [[0] * count for _ in range(count)]
    for a, b in combinations(range(count), 2):
        matrix[a][b] = matrix[b][a] = random.choice([10, 20, 30, 40, 50]) + 100 * random.choice(
            [0, 0, 0, 1, 2]
        )
    return matrix


def worth_of_sets(matrix: Matrix, members: Sequence[int]) -> list[int]:
    """The sum of all pairs of each set of `members`, by the set's bits: bit n is the nth member."""
    worth = [0]
    for at in members:
        toward = [0]  # the sum of the pairs of `at` with each set of those before it
        for other in members[: len(worth).bit_length() - 1]:
            toward += [links + matrix[at][other] for links in toward]
        worth += [inside + links for inside, links in zip(worth, toward, strict=True)]
    return worth


def brute_force(matrix: Matrix, free: Iterable[int], must: Sequence[int], size: int) -> tuple[int, int, int]:
    """(value of the best division, of its group, less what that has in common with the rest), trying all."""
    members = sorted({*free, *must})
    bits = {at: 1 << number for number, at in enumerate(members)}
    worth = worth_of_sets(matrix, members)
    everything = len(worth) - 1

    @cache
    def best(left: int) -> int:
        """The value of the best division of a set; its first member is in any group of it."""
        count = left.bit_count()
        if count <= size:
            return worth[left]
        first, *later = (bit for bit in bits.values() if bit & left)
        groups = (
            first + sum(others)
            for some in {size, count % size or size}
            for others in combinations(later, some - 1)
        )
        return max(worth[group] + best(left - group) for group in groups)

    def rank(group: int) -> tuple[int, int, int]:
        rest = everything - group
        return worth[group] + best(rest), worth[group], worth[group] + worth[rest] - worth[everything]

    fixed = sum(bits[at] for at in must)
    others = [bits[at] for at in members if at not in must]
    return max(rank(fixed + sum(chosen)) for chosen in combinations(others, size - len(must)))
