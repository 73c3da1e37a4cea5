"""Plain configuration trees (dicts, lists, scalars): exact comparison and differences."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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


def mutated(tree: Tree, mutate: Mutation) -> Tree:
    """A deep copy of `tree` after `mutate`."""
    result = copy.deepcopy(tree)
    mutate(result)
    return result


def same(one: Any, other: Any) -> bool:
    """Equal in value and type: True is not 1, and 1 is not 1.0. The order of keys doesn't count."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or (one != one and other != other)  # TOML has nan, which equals nothing


def edits(old: Tree, new: Tree, above: tuple[str, ...] = ()) -> tuple[Edit, ...]:
    """The smallest set of key changes that turns `old` into `new`; removals first."""
    found: list[Edit] = [Remove((*above, key)) for key in old if key not in new]
    for key, value in new.items():
        here = (*above, key)
        if key not in old:
            found.append(Set(here, value))
        elif isinstance(value, dict) and isinstance(old[key], dict):
            found += edits(old[key], value, here)
        elif not same(old[key], value):
            found.append(Set(here, value))
    return tuple(found)
