"""A good division to begin with: the nearest GPUs together, then exchanges while they make it better.

What is worth less needn't be looked at by the search, and it is the answer where the search is given up.
"""

from __future__ import annotations

from collections.abc import Sequence

_MOST_ROUNDS = 40
Matrix = Sequence[Sequence[int]]


def seed(matrix: Matrix, fixed: Sequence[int], free: Sequence[int], size: int) -> list[list[int]]:
    """Groups of `size`, the first with all of `fixed`, the last of what remains; no exchange of two GPUs
    that aren't fixed makes it better.
    """
    groups = _nearest(matrix, fixed, free, size)
    where = {at: number for number, group in enumerate(groups) for at in group}
    near = [
        [sum(row[at] for at in group) for row in matrix] for group in groups
    ]  # each GPU to each group, itself included
    for _ in range(_MOST_ROUNDS):
        if not _exchanged(matrix, free, where, near):
            break
    return [[at for at in where if where[at] == number] for number in range(len(groups))]


def _nearest(matrix: Matrix, fixed: Sequence[int], free: Sequence[int], size: int) -> list[list[int]]:
    groups, group, left = [], list(fixed), list(free)
    row = [sum(matrix[at][other] for other in fixed) for at in range(len(matrix))]
    while left:
        if len(group) == size:
            groups.append(group)
            group, row = [], [0] * len(matrix)
        at = max(left, key=lambda at: (row[at], -at))
        left.remove(at)
        group.append(at)
        row = [old + new for old, new in zip(row, matrix[at], strict=True)]
    return [*groups, group]


def _exchanged(matrix: Matrix, free: Sequence[int], where: dict[int, int], near: list[list[int]]) -> bool:
    """One round over all pairs; True if there was anything to gain."""
    gained = False
    for number, a in enumerate(free):
        for b in free[:number]:
            one, other = where[a], where[b]
            if one == other:
                continue
            gain = near[other][a] + near[one][b] - near[one][a] - near[other][b] - 2 * matrix[a][b]
            if gain > 0:
                where[a], where[b] = other, one
                for at, row in enumerate(matrix):
                    change = row[b] - row[a]
                    near[one][at] += change
                    near[other][at] -= change
                gained = True
    return gained
