"""What the translations of other plugins' configurations share: the outcome, and reading the tree."""

from __future__ import annotations

import re
from typing import Any

from gpunode.dataclass import dataclass, field
from gpunode.facts.yaml_tree import EMPTY, DocumentError, Item, Notes, read_all

_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_BOOLEANS = {"true": True, "false": False}
TOP = ("version", "flags", "resources", "sharing", "imex", "health")
"""The order of our file's sections."""


@dataclass(frozen=True)
class Left:
    """What has no counterpart in our file, or not quite. `key`: as the other file has it."""

    key: str
    why: str
    hint: str = ""

    @property
    def text(self) -> str:
        return f"{self.key}: {self.why}" + (f" ({self.hint})" if self.hint else "")


@dataclass(frozen=True)
class Translation:
    """`config` is our file as a tree. With `problems` there is none: what is wrong with the other file."""

    config: dict[str, Any] = field(default_factory=dict)
    left: tuple[Left, ...] = ()
    problems: tuple[str, ...] = ()
    name: str = ""
    """Which of several configurations it is."""


class WrongInput(Exception):
    """The other file can't be meant; the message says what is wrong, `hint` what to do."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


def documents(data: bytes) -> tuple[Item, ...]:
    """The file's documents. `WrongInput` for what is no YAML or JSON."""
    notes: Notes = []
    try:
        found = read_all(data, notes)
    except DocumentError as error:
        raise WrongInput(f"line {error.line}: {error.message}" if error.line else error.message) from error
    if not found:
        raise WrongInput("the file is empty")
    return found


def get(item: Item, *path: str, fold: bool = False) -> Item:
    """The value below these keys, `EMPTY` where there is none; with `fold` in any case, as Go has it."""
    for key in path:
        exact = [value for name, _, value in item.pairs if name == key]
        folded = [value for name, _, value in item.pairs if fold and name.lower() == key.lower()]
        item = (exact or folded or [EMPTY])[-1]
    return item


def keys(item: Item) -> tuple[str, ...]:
    return tuple(name for name, _, _ in item.pairs)


def plain(item: Item) -> Any:
    """Plain values. Quoted text isn't told from text without: to our reader a number is one in either."""
    if item.kind == "map":
        return {name: plain(value) for name, _, value in item.pairs}
    if item.kind == "list":
        return [plain(one) for one in item.items]
    if item.kind == "null":
        return None
    if _NUMBER.fullmatch(item.text):
        return int(item.text)
    return _BOOLEANS.get(item.text, item.text)


def put(config: dict[str, Any], key: str, value: Any) -> Any:
    """Set a dotted key in whatever case it is written there, making what is above it; gives what stood there
    before."""
    *above, last = key.split(".")
    for part in above:
        part = _spelled(config, part)
        inner = config.get(part)
        if not isinstance(inner, dict):
            inner = config[part] = {}
        config = inner
    last = _spelled(config, last)
    before = config.get(last)
    config[last] = value
    return before


def _spelled(config: dict[str, Any], key: str) -> str:
    return next((name for name in config if name.lower() == key.lower()), key)


def take(config: Any, path: str) -> bool:
    """Take out what a path such as ``sharing.mps.resources[0].name`` names; False if nothing is there."""
    steps = [int(one[1:-1]) if one[0] == "[" else one for one in re.findall(r"\[\d+\]|[^.\[\]]+", path)]
    if not steps:
        return False
    for step in steps[:-1]:
        config = _inner(config, step)
    last = steps[-1]
    if isinstance(config, dict) and last in config:
        del config[last]
        return True
    return False


def _inner(config: Any, step: int | str) -> Any:
    if isinstance(config, list) and isinstance(step, int):
        return config[step] if step < len(config) else None
    if isinstance(config, dict) and isinstance(step, str):
        return config.get(_spelled(config, step))
    return None


def ordered(config: dict[str, Any]) -> dict[str, Any]:
    """With a version first, and the sections as people write them."""
    whole = {"version": "v1", **config}
    known = {name: whole[name] for name in TOP if name in whole}
    return known | {name: value for name, value in whole.items() if name not in known}
