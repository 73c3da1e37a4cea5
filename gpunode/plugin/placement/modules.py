"""Which GPUs are interchangeable: what a machine's regularity is worth to a search.

GPUs that are equally near to every other one are *twins*: only how many of a class of twins are taken
matters. Twins taken together may be twins of another class, and so on: a machine of two sockets with four
PCIe switches each is a tree, whose equal branches may be exchanged for each other. So a set of GPUs is
written as one count per class, in an order that is the same for all that can be exchanged; there are a few
hundred such sets on sixteen GPUs, not 65536. Where that ends, blocks are looked for that can be exchanged
as a whole (`exchange`). Where nothing is regular each GPU is a class of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise
from typing import Any

from gpunode.plugin.placement.exchange import exchangeable, families

Matrix = Sequence[Sequence[int]]
"""Nearness of each two GPUs by position: symmetric, not negative, higher is nearer."""


@dataclass(frozen=True)
class _Node:
    """A set of GPUs that all others see alike. `shape` is the same for sets that can be exchanged."""

    shape: tuple[Any, ...]
    leaf: int | None = None
    children: tuple[_Node, ...] = ()
    regular: bool = True

    @cached_property
    def members(self) -> tuple[int, ...]:
        if self.leaf is not None:
            return (self.leaf,)
        return tuple(sorted(member for child in self.children for member in child.members))


@dataclass(frozen=True)
class Siblings:
    """`count` exchangeable neighbours in a count vector, `width` classes each, from `start` on."""

    start: int
    width: int
    count: int


@dataclass(frozen=True)
class Classes:
    """`members` of each class, lowest position first; `siblings` from the innermost outwards.

    `orbit` numbers the classes so that exchangeable ones have the same number.
    """

    members: tuple[tuple[int, ...], ...]
    siblings: tuple[Siblings, ...]
    orbit: tuple[int, ...]

    def counts(self, positions: Sequence[int]) -> bytes:
        """How many of each class these positions are."""
        wanted = set(positions)
        return bytes(len(wanted.intersection(members)) for members in self.members)

    def canonical(self, counts: bytes) -> bytes:
        """The same for all sets that can be exchanged for each other."""
        for group in self.siblings:
            start, width = group.start, group.width
            end = start + width * group.count
            if width == 1:
                part = bytes(sorted(counts[start:end], reverse=True))
            else:
                slices = [counts[at : at + width] for at in range(start, end, width)]
                part = b"".join(sorted(slices, reverse=True))
            counts = counts[:start] + part + counts[end:]
        return counts

    @cached_property
    def _scattered(self) -> tuple[Siblings, ...]:
        """Those whose GPUs aren't numbered in the order of their classes."""
        return tuple(
            group
            for group in self.siblings
            if (span := self.members[group.start : group.start + group.width * group.count])
            if any(one[-1] > other[0] for one, other in pairwise(span))
        )

    def exchanged(self, counts: bytes, *others: bytes) -> Iterator[bytes]:
        """What `counts` become when two branches that are equal in all `others` are exchanged, where that
        may lead to lower positions.
        """
        for group in self._scattered:
            width, end = group.width, group.start + group.width * group.count
            for a, b in combinations(range(group.start, end, width), 2):
                one, other = slice(a, a + width), slice(b, b + width)
                if counts[one] != counts[other] and all(some[one] == some[other] for some in others):
                    yield (
                        counts[:a] + counts[other] + counts[a + width : b] + counts[one] + counts[b + width :]
                    )


def classes_of(matrix: Matrix) -> Classes:
    """Merge twins until there are none."""
    items = [_Node((), leaf=position) for position in range(len(matrix))]
    while len(items) > 1:
        merged = _merge(items, matrix)
        if len(merged) == len(items):
            items = [_Node((), children=tuple(_blocks(items, matrix)), regular=False)]
            break
        items = merged
    layout = _Layout()
    if items:
        layout.place(items[0])
    return Classes(
        tuple(layout.members), tuple(layout.siblings), _orbits(len(layout.members), layout.siblings)
    )


def _merge(items: Sequence[_Node], matrix: Matrix) -> list[_Node]:
    """One round: every class of twins becomes one item."""
    first = [item.members[0] for item in items]
    rows = [[matrix[a][b] for b in first] for a in first]
    groups: list[list[int]] = []
    for here in range(len(items)):
        for group in groups:
            if _twins(rows, group[0], here):
                group.append(here)
                break
        else:
            groups.append([here])
    return [_joined([items[i] for i in group], rows[group[0]][group[-1]]) for group in groups]


def _twins(rows: Sequence[list[int]], a: int, b: int) -> bool:
    """Whether every third one is as far from `a` as from `b`."""
    one, other = rows[a], rows[b]
    return one[:a] == other[:a] and one[a + 1 : b] == other[a + 1 : b] and one[b + 1 :] == other[b + 1 :]


def _blocks(items: Sequence[_Node], matrix: Matrix) -> list[_Node]:
    """Items without twins: those that can be exchanged in blocks together, families of blocks likewise."""
    first = [item.members[0] for item in items]
    rows = [[matrix[a][b] for b in first] for a in first]
    shapes = [item.shape for item in items]
    alike: list[list[list[tuple[int, ...]]]] = []
    for family in families(rows, shapes):
        flat = tuple(at for block in family for at in block)
        for others in alike:
            same = tuple(at for block in others[0] for at in block)
            if len(others[0]) == len(family) and exchangeable(rows, shapes, same, flat):
                others.append(family)
                break
        else:
            alike.append([family])
    nodes = []
    for number, found in enumerate(alike):
        made = [_family([[items[at] for at in block] for block in family], number) for family in found]
        nodes.append(made[0] if len(made) == 1 else _Node((-1, number), children=tuple(made)))
    taken = {at for found in alike for family in found for block in family for at in block}
    return nodes + [item for at, item in enumerate(items) if at not in taken]


def _family(blocks: Sequence[Sequence[_Node]], number: int) -> _Node:
    """Blocks side by side; each is laid out in the order in which the exchange pairs its items."""
    made = [_Node((-2, number), children=tuple(block), regular=False) for block in blocks]
    return _Node((-3, number), children=tuple(made))


def _joined(nodes: Sequence[_Node], weight: int) -> _Node:
    if len(nodes) == 1:
        return nodes[0]
    ordered = sorted(nodes, key=lambda node: (node.shape, node.members))
    return _Node((weight, tuple(node.shape for node in ordered)), children=tuple(ordered))


class _Layout:
    """Puts the classes of a tree in a row, so that exchangeable branches are neighbours of equal width."""

    def __init__(self) -> None:
        self.members: list[tuple[int, ...]] = []
        self.siblings: list[Siblings] = []

    def place(self, node: _Node) -> None:
        leaves = [child for child in node.children if child.leaf is not None]
        if node.leaf is not None:
            self.members.append(node.members)
        elif node.regular and leaves:
            self.members.append(tuple(sorted(leaf.members[0] for leaf in leaves)))
        inner = [child for child in node.children if not (node.regular and child.leaf is not None)]
        at = 0
        while at < len(inner):
            alike = [child for child in inner[at:] if node.regular and child.shape == inner[at].shape]
            self._place_all(alike or [inner[at]])
            at += len(alike) or 1

    def _place_all(self, nodes: Sequence[_Node]) -> None:
        start = len(self.members)
        for node in nodes:
            self.place(node)
        if len(nodes) > 1:
            width = (len(self.members) - start) // len(nodes)
            self.siblings.append(Siblings(start, width, len(nodes)))


def _orbits(count: int, siblings: Sequence[Siblings]) -> tuple[int, ...]:
    orbit = list(range(count))
    for group in reversed(siblings):  # outermost first, so that inner ones are numbered alike in each branch
        for at in range(group.start, group.start + group.width * group.count):
            orbit[at] = orbit[group.start + (at - group.start) % group.width]
    return tuple(orbit)
