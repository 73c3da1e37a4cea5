"""What sets of GPUs are worth when they are divided into groups of one size: exact, remembered, bounded.

A set is a count per class of interchangeable GPUs, as bytes. Branch and bound: of all groups that hold one
certain GPU the most promising is tried first, and no more are once none can beat what was found.
"""

from __future__ import annotations

from operator import sub

from gpunode.plugin.placement.bounds import Bounds
from gpunode.plugin.placement.groups import Groups, Steps

MOST_REMEMBERED = 20_000
_HEAVY = 5_000


class Worths:
    """What sets of GPUs are worth, divided into groups of `size` and one of what remains."""

    def __init__(self, groups: Groups, size: int) -> None:
        self.groups = groups
        self.classes = groups.classes
        self.size = size
        self._known: dict[bytes, tuple[int, bool]] = {}
        self._canonical: dict[bytes, bytes] = {}
        self._bounded: dict[bytes, int] = {}
        self._bounds = Bounds(groups, size)

    def improve_bounds(self, gpus: int) -> None:
        """Bound sets of so many GPUs better from now on, and parts of them; that may take a while."""
        changed = [self._bounds.improve(rest) for rest in sorted({gpus % self.size, 0})]
        if any(changed):
            self._bounded = {}

    @property
    def heavy(self) -> bool:
        """Whether much is remembered: a megabyte or more."""
        return len(self._bounded) > _HEAVY

    def bound(self, counts: bytes) -> int:
        """What these can't be worth more than."""
        found = self._bounded.get(counts)
        if found is None:
            found = self._bounded[counts] = self._bounds.bound(counts)
        return found

    def best(self, counts: bytes, floor: int, steps: Steps) -> int:
        """What canonical `counts` are worth; where that isn't more than `floor`, something up to `floor`.

        Once the steps are over: what an obvious division is worth.
        """
        if sum(counts) <= self.size:
            return self.groups.worth(counts)
        known, exact = self._known.get(counts, (-1, False))
        if exact or 0 <= known <= floor:
            return known
        if steps.over():
            return self.groups.obvious(counts, self.size)
        top = floor
        beaten = False
        for bound, worth, rest in self._branches(counts, steps):
            if bound <= top or (steps.over() and beaten):
                break
            found = worth + self.best(rest, top - worth, steps)
            if found > top:
                top, beaten = found, True
        if not steps.over():
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

    def _remember(self, counts: bytes, worth: int, exact: bool) -> None:
        if len(self._bounded) >= MOST_REMEMBERED:
            self._known, self._canonical, self._bounded = {}, {}, {}
        self._known[counts] = (worth, exact)
