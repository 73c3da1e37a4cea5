"""Blocks of GPUs that can be exchanged for each other as a whole, where single ones can't.

With a bridge from each GPU of one socket to its partner on the other no two GPUs are twins, but the pairs can
be exchanged: GPU 0 for 1 and, with it, 0's partner for 1's. An exchange is a mapping that is its own reverse
and leaves all nearness as it is.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

Rows = Sequence[Sequence[int]]
Block = tuple[int, ...]
_MOST_TRIES = 300  # mappings tried for two GPUs; a real machine takes a few dozen


def families(rows: Rows, shapes: Sequence[Hashable]) -> list[list[Block]]:
    """Disjoint families of two or more blocks of equal length. Any two blocks of a family can be exchanged,
    first for first and so on, while all else stays. Items of different `shapes` are never exchanged.
    """
    found: list[list[Block]] = []
    taken: set[int] = set()
    for item in range(len(rows)):
        if item not in taken:
            family = _family(item, rows, shapes, taken)
            if family:
                found.append(family)
                taken.update(at for block in family for at in block)
    return found


def exchangeable(rows: Rows, shapes: Sequence[Hashable], one: Block, other: Block) -> bool:
    """Whether these can be exchanged, first for first and so on."""
    if len(one) != len(other) or any(shapes[a] != shapes[b] for a, b in zip(one, other, strict=True)):
        return False
    to = list(range(len(rows)))
    for a, b in zip(one, other, strict=True):
        to[a], to[b] = b, a
    return all(rows[to[a]][to[b]] == rows[a][b] for a in (*one, *other) for b in range(len(rows)))


def _family(item: int, rows: Rows, shapes: Sequence[Hashable], taken: set[int]) -> list[Block]:
    exchanges = [
        found
        for other in range(item + 1, len(rows))
        if other not in taken and shapes[other] == shapes[item]
        if (found := _Exchange(rows, shapes, taken).of(item, other))
    ]
    if not exchanges:
        return []
    length = min(map(len, exchanges))
    shortest = [found for found in exchanges if len(found) == length]
    first = tuple(sorted(set.intersection(*map(set, shortest))))
    if 2 * len(first) != length:
        shortest = shortest[:1]
        first = tuple(sorted(a for a, b in shortest[0].items() if a < b))
    family = [first]
    for found in shortest:
        block = tuple(found[at] for at in first)
        if not any(set(block).intersection(other) for other in family):
            family.append(block)
    return family if len(family) > 1 else []


class _Exchange:
    """Searches for one that moves few items, none of `fixed`."""

    def __init__(self, rows: Rows, shapes: Sequence[Hashable], fixed: set[int]) -> None:
        self._rows = rows
        self._shapes = shapes
        self._fixed = fixed
        self._tries = 0

    def of(self, one: int, other: int) -> dict[int, int]:
        """What moves where, with `one` to `other`; empty if there is none."""
        return self._extended({one: other, other: one})

    def _extended(self, moved: dict[int, int]) -> dict[int, int]:
        self._tries += 1
        if self._tries > _MOST_TRIES:
            return {}
        rows = self._rows
        still = [at for at in range(len(rows)) if at not in moved]
        torn = next((at for at in still if any(rows[a][at] != rows[b][at] for a, b in moved.items())), None)
        if torn is None:
            return moved
        if torn in self._fixed:
            return {}
        for at in still:
            if at == torn or at in self._fixed or self._shapes[at] != self._shapes[torn]:
                continue
            if all(rows[a][torn] == rows[b][at] for a, b in moved.items()):
                found = self._extended({**moved, torn: at, at: torn})
                if found:
                    return found
        return {}
