"""Plain configuration trees (dicts, lists, scalars), of TOML and JSON: comparison and differences."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpunode.facts.toml import dig

Tree = dict[str, Any]
Mutation = Callable[[Tree], None]


@dataclass(frozen=True)
class Set:
    """Set the key at `path` to this value; a dict is a whole new table."""

    path: tuple[str, ...]
    value: Any


@dataclass(frozen=True)
class Remove:
    """Remove the key at `path`."""

    path: tuple[str, ...]


Edit = Set | Remove


def prune(tree: Tree, path: tuple[str, ...]) -> None:
    """Remove the table at `path` and those above it as far as they are empty, from the inside out."""
    for depth in range(len(path) - 1, -1, -1):
        parent = dig(tree, *path[:depth])
        if isinstance(parent, dict) and parent.get(path[depth]) == {}:
            del parent[path[depth]]


def mutated(tree: Tree, mutate: Mutation) -> Tree:
    """A deep copy of `tree` after `mutate`."""
    result = copy.deepcopy(tree)
    mutate(result)
    return result


def same(left: Any, right: Any) -> bool:
    """Equal in value and type: True is not 1, and 1 is not 1.0. The order of keys doesn't count."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(value, right[key]) for key, value in left.items())
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right) or (left != left and right != right)  # TOML has nan, which equals nothing


def edits(old: Tree, new: Tree, above: tuple[str, ...] = ()) -> tuple[Edit, ...]:
    """The smallest set of key changes that turns `old` into `new`; removals first."""
    result: list[Edit] = [Remove((*above, key)) for key in old if key not in new]
    for key, value in new.items():
        here = (*above, key)
        if key not in old:
            result.append(Set(here, value))
        elif isinstance(value, dict) and isinstance(old[key], dict):
            result += edits(old[key], value, here)
        elif not same(old[key], value):
            result.append(Set(here, value))
    return tuple(result)
