"""The search: which group to take, so that the best groups are left for others.

The free GPUs are divided into groups of the size that is asked for, and one smaller group of what remains. A
division is worth the nearness of all pairs within its groups; of the best division the nearest group is
taken. That is what NVIDIA's plugin does, which tries every division: 2.6 million for 16 GPUs in fours. Here a
set of GPUs is a count per class (`modules`), what a set can be worth at most is bounded from above, the most
promising group is tried first, and the worth of a set is remembered for the next request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpunode.plugin.placement.groups import Groups, Steps
from gpunode.plugin.placement.modules import Classes, Matrix, classes_of
from gpunode.plugin.placement.search import Worths
from gpunode.plugin.placement.seed import seed

EXACT_GPUS = 16
MOST_STEPS = 2_000_000
"""Groups looked at in one search at most: of 16 GPUs with links at random the worst seen took half of it."""
MOST_STEPS_BEYOND = 100_000
"""The same for more GPUs, where a search might never end."""
QUICK_STEPS = 4_000
"""While a pod waits: 50 ms. With more than 16 GPUs each step takes longer."""
_PAUSE_SECONDS = 0.003
_QUICK_PAUSE_SECONDS = 0.00005
_MOST_GPUS = 255  # a count is a byte


@dataclass(frozen=True)
class Choice:
    """`group` are positions, those that had to be in it first. `total` is the worth of the whole division.

    `exact` is False if the search was given up, after `steps` groups, with the best that it had found.
    """

    group: tuple[int, ...]
    worth: int = 0
    total: int = 0
    steps: int = 0
    exact: bool = True


class Divider:
    """Searches on one machine. Safe to call from several threads: what they share is only remembered."""

    def __init__(self, matrix: Matrix, most_steps: int | None = None) -> None:
        if len(matrix) > _MOST_GPUS:
            raise ValueError(f"{len(matrix)} GPUs")
        # what every pair has in common decides nothing: all divisions have equally many pairs
        least = min((w for a, row in enumerate(matrix) for b, w in enumerate(row) if a != b), default=0)
        self.matrix = [
            [0 if a == b else w - least for b, w in enumerate(row)] for a, row in enumerate(matrix)
        ]
        self._most_steps = most_steps
        self.classes: Classes = classes_of(self.matrix)
        first = [members[0] for members in self.classes.members]
        last = [members[-1] for members in self.classes.members]
        self.near = [[self.matrix[a][b] for b in last] for a in first]  # within a class: of two members
        self._groups = Groups(self.classes, self.near)
        self._sizes: dict[int, Worths] = {}

    def choose(self, available: Sequence[int], must: Sequence[int], size: int, quick: bool = False) -> Choice:
        """Positions out of `available` (and all of `must`, if they fit): fewer than `size` if there are
        not as many. Not `quick` it may take seconds, though other threads get their turn.
        """
        fixed = tuple(sorted(set(must)))[: max(size, 0)]
        free = sorted(set(available) - set(must))
        if size <= len(fixed) or not free:
            return Choice(fixed, self.worth(fixed), self.worth(fixed))
        if size >= len(fixed) + len(free):
            group = (*fixed, *free)
            return Choice(group, self.worth(group), self.worth(group))
        return self._search(fixed, free, size, quick)

    def divide(self, available: Sequence[int], size: int, quick: bool = False) -> list[tuple[int, ...]]:
        """The groups of a best division, the best first, a smaller one of what remains last."""
        left, groups = sorted(set(available)), []
        while left:
            groups.append(self.choose(left, (), size, quick).group)
            left = [position for position in left if position not in groups[-1]]
        return groups

    def worth(self, group: Sequence[int]) -> int:
        """Nearness of all pairs, above the least of the machine."""
        return sum(self.matrix[a][b] for at, a in enumerate(group) for b in group[:at])

    def _search(self, fixed: tuple[int, ...], free: Sequence[int], size: int, quick: bool) -> Choice:
        """Best division, then the nearest group, then the one whose loss hurts the others least."""
        steps, worths = self._steps(len(fixed) + len(free), quick), self._worths(size)
        if not quick:
            worths.improve_bounds(len(fixed) + len(free))
        held = self.classes.counts(fixed)
        start = seed(self.matrix, fixed, free, size)
        best = (sum(map(self.worth, start)), -1, 0)
        ties: list[bytes] = []
        for bound, worth, rest, group in worths.options(self.classes.counts(free), held, steps):
            if bound < best[0] or steps.over():
                break
            if bound == best[0] and worth < best[1]:
                continue
            total = worth + worths.best(rest, best[0] - worth - 1, steps)
            if (total, worth) < best[:2]:
                continue
            rank = (total, worth, self._kept(fixed, free, group))
            if rank > best:
                best, ties = rank, [group]
            elif rank == best:
                ties.append(group)
        if worths.heavy:
            self._sizes.pop(size, None)
        if not ties:
            nearest = max(
                (group for group in start if len(group) == size and {*fixed} <= {*group}), key=self.worth
            )
            chosen = tuple(sorted({*nearest}.difference(fixed)))
            return Choice((*fixed, *chosen), self.worth(nearest), best[0], steps.taken, exact=False)
        chosen = min(self._lowest(group, held, free) for group in ties)
        return Choice((*fixed, *chosen), best[1], best[0], steps.taken, not steps.over())

    def _steps(self, gpus: int, quick: bool) -> Steps:
        if self._most_steps:
            return Steps(self._most_steps)
        if quick:
            most = QUICK_STEPS * EXACT_GPUS**2 // max(gpus, EXACT_GPUS) ** 2
            return Steps(most, _QUICK_PAUSE_SECONDS)
        return Steps(MOST_STEPS if gpus <= EXACT_GPUS else MOST_STEPS_BEYOND, _PAUSE_SECONDS)

    def _worths(self, size: int) -> Worths:
        return self._sizes.get(size) or self._sizes.setdefault(size, Worths(self._groups, size))

    def _kept(self, fixed: Sequence[int], free: Sequence[int], group: bytes) -> int:
        """Less the nearness between the group and what is left."""
        chosen = self._realised(group, free)
        left = set(free).difference(chosen)
        return -sum(self.matrix[a][b] for a in (*fixed, *chosen) for b in left)

    def _lowest(self, group: bytes, held: bytes, free: Sequence[int]) -> tuple[int, ...]:
        """The lowest positions that make this group or one that can be exchanged for it."""
        there = self.classes.counts(free)
        best, lower = self._realised(group, free), True
        while lower:
            lower = False
            for other in self.classes.exchanged(group, there, held):
                found = self._realised(other, free)
                if found < best:
                    best, group, lower = found, other, True
                    break
        return best

    def _realised(self, group: bytes, free: Sequence[int]) -> tuple[int, ...]:
        """The lowest positions that make this group."""
        there = set(free)
        return tuple(
            sorted(
                position
                for count, members in zip(group, self.classes.members, strict=True)
                for position in [member for member in members if member in there][:count]
            )
        )
