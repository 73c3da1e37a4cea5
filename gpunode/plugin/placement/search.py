"""What sets of GPUs are worth when they are divided into groups of one size: exact, remembered, bounded.

A set is a count per class of interchangeable GPUs, as bytes. Branch and bound: of all groups that hold one
certain GPU the most promising is tried first, and no more are once none can beat what was found.
"""

from __future__ import annotations

from math import lcm
from operator import mul, sub

from gpunode.plugin.placement.groups import Groups, Steps

MOST_REMEMBERED = 20_000
_MOST_FOR_BOUND = 20_000


_Bound = tuple[list[int], list[tuple[int, int]], int]
"""Each class's part at most, (gain in the small group, class) with the highest first, and their scale."""


class Worths:
    """What sets of GPUs are worth, divided into groups of `size` and one of what remains."""

    def __init__(self, groups: Groups, size: int) -> None:
        self.groups = groups
        self.classes = groups.classes
        self.size = size
        self._known: dict[bytes, tuple[int, bool]] = {}
        self._canonical: dict[bytes, bytes] = {}
        self._bounded: dict[bytes, int] = {}
        self._bounds: dict[int, _Bound] = {}

    def bound(self, counts: bytes) -> int:
        """What these can't be worth more than."""
        found = self._bounded.get(counts)
        if found is None:
            found = self._bounded[counts] = self._bound(counts)
        return found

    def _bound(self, counts: bytes) -> int:
        rest = sum(counts) % self.size
        share, gains, scale = self._bounds.get(rest) or self._make_bound(rest)
        total: int = sum(map(mul, counts, share))
        for gain, at in gains:
            if rest <= 0:
                break
            some = min(rest, counts[at])
            total += some * gain
            rest -= some
        return total // scale

    def _make_bound(self, rest: int) -> _Bound:
        """Nobody's part in a group is more than an equal share of the best group that it can be in."""
        scale = lcm(self.size, rest or 1)
        share = [best * (scale // self.size) for best in self._best_groups(self.size)]
        small = [best * (scale // (rest or 1)) for best in self._best_groups(rest)]
        gains = sorted(
            ((b - a, at) for at, (a, b) in enumerate(zip(share, small, strict=True))), reverse=True
        )
        made = self._bounds[rest] = (share, gains, scale)
        return made

    def _best_groups(self, size: int) -> list[int]:
        """For each class the worth of the best group of `size` on the whole machine with one of it."""
        full = bytes(len(members) for members in self.classes.members)
        steps = Steps(_MOST_FOR_BOUND)
        best = [0] * len(full)
        if size < 2:
            return best
        for worth, group in self.groups.listed(full, size, steps):
            for at, count in enumerate(group):
                if count and worth > best[self.classes.orbit[at]]:
                    best[self.classes.orbit[at]] = worth
        if not steps.over:
            return [best[orbit] for orbit in self.classes.orbit]
        return [self._nearest(at, size) * size // 2 for at in range(len(full))]

    def _nearest(self, at: int, size: int) -> int:
        """Nearness of one of a class to the `size` - 1 that are nearest to it."""
        near: list[int] = []
        for other, members in enumerate(self.classes.members):
            near += [self.groups.near[at][other]] * (len(members) - (other == at))
        return sum(sorted(near, reverse=True)[: size - 1])

    def best(self, counts: bytes, floor: int, steps: Steps) -> int:
        """What canonical `counts` are worth; where that isn't more than `floor`, something up to `floor`.

        Once the steps are over: what an obvious division is worth.
        """
        if sum(counts) <= self.size:
            return self.groups.worth(counts)
        known, exact = self._known.get(counts, (-1, False))
        if exact or 0 <= known <= floor:
            return known
        if steps.over:
            return self._obvious(counts)
        top = floor
        beaten = False
        for bound, worth, rest in self._branches(counts, steps):
            if bound <= top:
                break
            found = worth + self.best(rest, top - worth, steps)
            if found > top:
                top, beaten = found, True
        if not steps.over:
            self._remember(counts, top, beaten)
        return top

    def options(self, free: bytes, fixed: bytes, steps: Steps) -> list[tuple[int, int, bytes, bytes]]:
        """(bound, worth, canonical rest, counts beside `fixed`) of each group with all of `fixed`, the most
        promising first.
        """
        listed = self.groups.listed(free, self.size - sum(fixed), steps, fixed)
        found = []
        for worth, group in listed:
            rest = self._rest(free, group)
            found.append((worth + self.bound(rest), worth, rest, group))
        found.sort(reverse=True)
        return found

    def _branches(self, counts: bytes, steps: Steps) -> list[tuple[int, int, bytes]]:
        """(bound, worth, canonical rest) of each group with the first GPU, the most promising first."""
        anchor = next(at for at, count in enumerate(counts) if count)
        found = set()
        for size in {self.size, sum(counts) % self.size or self.size}:
            for worth, group in self.groups.listed(counts, size, steps, anchor=anchor):
                rest = self._rest(counts, group)
                found.add((worth + self.bound(rest), worth, rest))
        return sorted(found, reverse=True)

    def _rest(self, counts: bytes, group: bytes) -> bytes:
        """What is left, in canonical form."""
        rest = bytes(map(sub, counts, group))
        if not self.classes.siblings:
            return rest
        found = self._canonical.get(rest)
        if found is None:
            found = self._canonical[rest] = self.classes.canonical(rest)
        return found

    def _obvious(self, counts: bytes) -> int:
        """Groups that take the nearest one each time."""
        total, left = 0, bytearray(counts)
        near = self.groups.near
        need = 0
        row = [0] * len(left)
        for _ in range(sum(left)):
            if need == 0:
                need, row = self.size, [0] * len(left)
            at = max((i for i, count in enumerate(left) if count), key=lambda i: (row[i], -i))
            total += row[at]
            left[at] -= 1
            need -= 1
            row = [r + n for r, n in zip(row, near[at], strict=True)]
        return total

    def _remember(self, counts: bytes, worth: int, exact: bool) -> None:
        if len(self._bounded) >= MOST_REMEMBERED:
            self._known, self._canonical, self._bounded = {}, {}, {}
        self._known[counts] = (worth, exact)
