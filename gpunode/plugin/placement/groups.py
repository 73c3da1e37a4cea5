"""Listing the groups that a set of GPUs holds: one for all that can be exchanged for each other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import gcd

from gpunode.plugin.placement.modules import Classes

_Slices = list[tuple[int, int, int]]
"""(start of an earlier branch, start of an equal one, width of both)."""


_BREATH = 200  # steps: about a millisecond


class Steps:
    """How many groups were looked at, of `most`. After each few of them others have `pause` seconds: a
    search in Python would hold up all threads of its process, those that tell the kubelet of a fault too.
    """

    def __init__(self, most: int, pause: float = 0.0) -> None:
        self.most = most
        self.taken = 0
        self.due = most
        """When `breathe` is to be called."""
        self._pause = pause
        if pause:
            self.due = min(most, _BREATH)

    def over(self) -> bool:
        return self.taken >= self.most

    def breathe(self) -> bool:
        """Let others go first; True if the steps are over."""
        if not self.over():
            time.sleep(self._pause)
            self.due = min(self.most, self.taken + _BREATH)
        return self.over()


class Groups:
    """Groups as counts per class. `near` is the nearness of two GPUs by class."""

    def __init__(self, classes: Classes, near: Sequence[Sequence[int]]) -> None:
        self.classes = classes
        self.near = near
        self.grain = gcd(*(nearness for row in near for nearness in row)) or 1
        """All worths are multiples of it."""

    def worth(self, counts: bytes) -> int:
        """Nearness of all pairs."""
        total = 0
        taken = [(at, count) for at, count in enumerate(counts) if count]
        for number, (at, count) in enumerate(taken):
            row = self.near[at]
            total += count * (count - 1) // 2 * row[at]
            for other, more in taken[:number]:
                total += count * more * row[other]
        return total

    def listed(
        self, free: bytes, size: int, steps: Steps, fixed: bytes = b"", anchor: int = -1
    ) -> list[tuple[int, bytes]]:
        """(worth, counts) of each group of `size` out of `free`, with those in `fixed` beside them.

        Of class `anchor`, the first that isn't empty, there must be one. The list is cut short when the steps
        are over, with those that hold together first.
        """
        found: list[tuple[int, bytes]] = []
        group = bytearray(len(free))
        after = _sums_behind(free)
        ends, within = self._equal_branches(free, fixed)
        near = self.near

        def walk(at: int, need: int, worth: int, row: list[int]) -> None:
            """Take some of class `at`; `row` is each class's nearness to what is taken already."""
            least = max(need - after[at + 1], int(at == anchor))
            inner = near[at][at]
            for count in range(min(free[at], need), least - 1, -1):
                group[at] = count
                if ends[at] and _turned(group, ends[at]):
                    continue
                now = worth + count * row[at] + count * (count - 1) // 2 * inner
                if count < need:
                    walk(at + 1, need - count, now, _nearer(row, near[at], count) if count else row)
                elif not (within[at] and _turned(group, within[at])):
                    found.append((now, bytes(group)))
                    steps.taken += 1
                if steps.taken >= steps.due and steps.breathe() and found:
                    break
            group[at] = 0

        if size <= after[0]:
            row = [0] * len(free)
            for at, count in enumerate(fixed):
                row = _nearer(row, near[at], count) if count else row
            walk(max(anchor, 0), size, self.worth(fixed), row)
        return found

    def obvious(self, counts: bytes, size: int) -> int:
        """What these are worth in groups of `size` that take the nearest one each time."""
        total, need = 0, 0
        left, row = bytearray(counts), [0] * len(counts)
        for _ in range(sum(counts)):
            if need == 0:
                need, row = size, [0] * len(counts)
            at = max((i for i, count in enumerate(left) if count), key=lambda i: (row[i], -i))
            total += row[at]
            left[at] -= 1
            need -= 1
            row = _nearer(row, self.near[at], 1)
        return total

    def _equal_branches(self, free: bytes, fixed: bytes) -> tuple[list[_Slices], list[_Slices]]:
        """Where a branch equals an earlier one the earlier gives at least as much: such pairs by the later
        one's last class, and by each class before that.
        """
        ends: list[_Slices] = [[] for _ in free]
        within: list[_Slices] = [[] for _ in free]
        for group in self.classes.siblings:
            seen: dict[bytes, int] = {}
            for start in range(group.start, group.start + group.width * group.count, group.width):
                end = start + group.width
                here = free[start:end] + fixed[start:end]
                if here in seen and any(free[start:end]):
                    ends[end - 1].append((seen[here], start, group.width))
                    for at in range(start, end - 1):
                        within[at].append((seen[here], start, group.width))
                seen[here] = start
        return ends, within


def _turned(group: bytearray, slices: _Slices) -> bool:
    """Whether a branch gives more than an equal one before it."""
    return any(group[late : late + width] > group[early : early + width] for early, late, width in slices)


def _nearer(row: list[int], more: Sequence[int], count: int) -> list[int]:
    return [old + count * new for old, new in zip(row, more, strict=True)]


def _sums_behind(counts: bytes) -> list[int]:
    sums = [0] * (len(counts) + 1)
    for at in range(len(counts) - 1, -1, -1):
        sums[at] = sums[at + 1] + counts[at]
    return sums
