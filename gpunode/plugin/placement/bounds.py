"""What a set of GPUs can't be worth more than, whatever way it is divided.

Each GPU has a price. No group is worth more than the prices of its GPUs and a surplus that is the same for
all groups, so no division is worth more than all prices and the surplus for each group. Prices are right when
the best groups take every GPU as often: those that are in too many become dearer (subgradients of the
Lagrangian dual, with Polyak's steps). A few rounds once for a machine make the search on it short. Where
there are too many different groups for that while somebody waits, half of what is nearest to each GPU is its
price.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import floor
from operator import mul

from gpunode.plugin.placement.groups import Groups, Steps

_MOST_LISTED = 1_500
_MOST_LISTED_PATIENTLY = 20_000
_PAUSE_SECONDS = 0.003
_ROUNDS = 40
_FEW = 300  # groups: looking at all of them is quicker than all the rounds
_LOOKED_AT = 100  # the groups that are worth most, in every round; all of them only in the end
_EPSILON = 1e-6
_Listed = list[tuple[int, bytes]]


@dataclass(frozen=True)
class Prices:
    """By class, and the surplus of a whole group and of the smaller one."""

    each: tuple[float, ...]
    whole: float = 0.0
    small: float = 0.0


class Bounds:
    """For divisions into groups of `size`."""

    def __init__(self, groups: Groups, size: int) -> None:
        self._groups = groups
        self._size = size
        self._full = bytes(len(members) for members in groups.classes.members)
        self._prices: dict[int, Prices] = {}
        self._good: set[int] = set()

    def improve(self, rest: int) -> bool:
        """Find good prices, for which nobody should wait, where `rest` are left over; True if that changes
        the bounds.
        """
        if rest in self._good:
            return False
        self._prices[rest] = self._price(rest, patient=True)
        self._good.add(rest)
        return True

    def bound(self, counts: bytes) -> int:
        """What these can't be worth more than."""
        number, rest = divmod(sum(counts), self._size)
        prices = self._prices.get(rest)
        if prices is None:
            prices = self._prices.setdefault(rest, self._price(rest))
        total: float = sum(map(mul, counts, prices.each)) + number * prices.whole
        total += (prices.small if rest else 0.0) + _EPSILON
        return floor(total / self._groups.grain) * self._groups.grain

    def _price(self, rest: int, patient: bool = False) -> Prices:
        whole, small = self._listed(self._size, patient), self._listed(rest, patient)
        if whole is None or small is None:  # too many to look at: half of what is nearest to each
            return Prices(tuple(self._nearest(at) / 2 for at in range(len(self._full))))
        prices = self._start(whole)
        best, least = prices, float("inf")
        aim = self._groups.obvious(self._full, self._size)
        number = (sum(self._full) - rest) / self._size
        for _ in range(_ROUNDS if len(whole) > _FEW else 1):
            dear, cheap = _dearest(whole[:_LOOKED_AT], prices), _dearest(small[:_LOOKED_AT], prices)
            worth = sum(map(mul, self._full, prices)) + number * dear[0] + cheap[0]
            if worth < least:
                best, least = prices, worth
            excess = [
                there - number * a - b for there, a, b in zip(self._full, dear[1], cheap[1], strict=True)
            ]
            step = (worth - aim) / (sum(one * one for one in excess) or 1.0)
            if step * max(map(abs, excess)) < _EPSILON:
                break
            if patient:
                time.sleep(_PAUSE_SECONDS)
            prices = self._alike([one - step * more for one, more in zip(prices, excess, strict=True)])
        return Prices(tuple(best), _dearest(whole, best)[0], _dearest(small, best)[0])

    def _listed(self, size: int, patient: bool) -> _Listed | None:
        """Every group of the whole machine, those worth most first; None if there are too many."""
        most = _MOST_LISTED_PATIENTLY if patient else _MOST_LISTED
        steps = Steps(most, _PAUSE_SECONDS if patient else 0.0)
        found = self._groups.listed(self._full, size, steps)
        found.sort(key=lambda one: -one[0])
        return None if steps.over() else found

    def _start(self, whole: _Listed) -> list[float]:
        """An equal share of the best group that a GPU is in."""
        best = [0.0] * len(self._full)
        for worth, group in reversed(whole):
            for at, count in enumerate(group):
                if count:
                    best[self._groups.classes.orbit[at]] = worth / self._size
        return [best[orbit] for orbit in self._groups.classes.orbit]

    def _alike(self, prices: Sequence[float]) -> list[float]:
        """GPUs that can be exchanged for each other have one price."""
        by_orbit: dict[int, list[float]] = {}
        orbits = self._groups.classes.orbit
        for orbit, price in zip(orbits, prices, strict=True):
            by_orbit.setdefault(orbit, []).append(price)
        return [sum(by_orbit[orbit]) / len(by_orbit[orbit]) for orbit in orbits]

    def _nearest(self, at: int) -> int:
        """Nearness of one of a class to those that are nearest to it."""
        near: list[int] = []
        for other, members in enumerate(self._groups.classes.members):
            near += [self._groups.near[at][other]] * (len(members) - (other == at))
        return sum(sorted(near, reverse=True)[: self._size - 1])


def _dearest(groups: _Listed, prices: Sequence[float]) -> tuple[float, bytes]:
    """The greatest surplus over the prices, and the group that has it."""
    return max((worth - sum(map(mul, group, prices)), group) for worth, group in groups)
