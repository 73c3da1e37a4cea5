"""Walks a config file's tree: looks keys up, names what is unknown, collects every problem with its line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from gpunode.facts.yaml_tree import Item
from gpunode.plugin.config.options import Option
from gpunode.plugin.config.problems import Problem, nearest
from gpunode.plugin.config.values import parse

# YAML 1.1's further words for true and false, all of which NVIDIA's plugin takes in a file
_YAML_WORDS = {
    **dict.fromkeys(("y", "Y", "yes", "Yes", "YES", "on", "On", "ON"), "true"),
    **dict.fromkeys(("n", "N", "no", "No", "NO", "off", "Off", "OFF"), "false"),
}


class Reader:
    """`problems` and `warnings` grow while the sections are read. `known` are all keys, for suggestions."""

    def __init__(self, name: str, known: Sequence[str], lenient: bool) -> None:
        self._name = name
        self._known = known
        self._lenient = lenient
        self.problems: list[Problem] = []
        self.warnings: list[Problem] = []

    def where(self, line: int) -> str:
        return f"{self._name}:{line}" if line else self._name

    def wrong(self, line: int, key: str, message: str, hint: str = "") -> None:
        self.problems.append(Problem(self.where(line), key, message, hint, line=line))

    def warn(self, line: int, key: str, message: str, hint: str = "") -> None:
        self.warnings.append(Problem(self.where(line), key, message, hint, line=line))

    # --- structure -------------------------------------------------------------------------------------

    def fields(
        self, item: Item, path: str, known: Iterable[str], *, exact: bool = False
    ) -> Iterator[tuple[str, int, Item]]:
        """The known keys of a mapping, in the spelling of `known`, with their line and value.

        NVIDIA's plugin ignores case, but not in what it decodes by hand (`exact`). Nulls count as not given.
        """
        if item.kind == "null":
            return
        if item.kind != "map":
            self.wrong(item.line, path, f"expected a mapping of {_names(known)}; found {item.what}")
            return
        spelled = {name if exact else name.lower(): name for name in known}
        seen: dict[str, int] = {}
        for key, line, value in item.pairs:
            name = spelled.get(key if exact else key.lower())
            if name is None:
                self._unknown(line, path, key, spelled.values())
            elif name in seen:
                self.wrong(line, joined(path, key), f"the same key as on line {seen[name]}, in other case")
            else:
                seen[name] = line
                yield name, line, value

    def entries(self, item: Item, path: str) -> Iterator[tuple[str, Item]]:
        """The items of a list with their paths; `null` is an empty one."""
        if item.kind == "list":
            yield from ((f"{path}[{number}]", entry) for number, entry in enumerate(item.items))
        elif item.kind != "null":
            self.wrong(item.line, path, f"expected a list; found {item.what}")

    def _unknown(self, line: int, path: str, key: str, siblings: Iterable[str]) -> None:
        message, hint = "unknown key", "--lenient makes a warning of it"
        near = nearest(key, siblings)
        elsewhere = [known for known in self._known if known.rpartition(".")[2].lower() == key.lower()]
        if elsewhere and near.lower() != key.lower():
            message += f"; its place is {' or '.join(elsewhere)}"
            hint = "move it, or indent it so that it stands there"
        elif near:
            message += f"; did you mean {near}?"
        elif far := nearest(key, (known.rpartition(".")[2] for known in self._known)):
            full = next(known for known in self._known if known.rpartition(".")[2] == far)
            message += f"; the nearest is {full}"
        message += (
            f" Known here: {_names(siblings)}" if message[-1] == "?" else f"; known here: {_names(siblings)}"
        )
        if self._lenient:
            self.warn(line, joined(path, key), message.replace("unknown key", "unknown key, ignored", 1))
        else:
            self.wrong(line, joined(path, key), message, hint)

    # --- values ----------------------------------------------------------------------------------------

    def option(self, option: Option, item: Item, path: str) -> Any:
        """The value of an option, None if it isn't one (said) or null."""
        texts = self._texts(option, item, path)
        if texts is None:
            return None
        if option.kind == "xids" and self._lenient:
            texts = self._without_nonsense(option, texts, item, path)
        return self.take(item, path, lambda: parse(option, texts))

    def _texts(self, option: Option, item: Item, path: str) -> list[str] | None:
        if item.kind == "list" and option.takes_many:
            wrong = [one for one in item.items if one.kind != "scalar"]
            for one in wrong:
                self.wrong(one.line, path, f"expected {expected(option)}; found {one.what}")
            return None if wrong else [one.text for one in item.items]
        if item.kind == "null":
            return None
        if item.kind != "scalar":
            self.wrong(item.line, path, f"expected {expected(option)}; found {item.what}")
            return None
        text = _YAML_WORDS.get(item.text, item.text) if option.kind == "boolean" else item.text
        if option.kind in ("hold", "interval") and text.isdecimal():
            text += "ns"  # as in every duration of NVIDIA's format
        return [text]

    def _without_nonsense(self, option: Option, texts: list[str], item: Item, path: str) -> list[str]:
        kept = []
        for text in (word for one in texts for word in one.split(",")):
            try:
                parse(option, [text])
                kept.append(text)
            except ValueError as error:
                self.warn(item.line, path, f"{error}; ignored")
        return kept

    def take(self, item: Item, path: str, make: Callable[[], Any]) -> Any:
        """What `make` gives, None for a ValueError, which becomes a problem of this item."""
        try:
            return make()
        except ValueError as error:
            self.wrong(item.line, path, str(error))
            return None

    def boolean(self, item: Item, path: str) -> bool | None:
        found = self.option(_BOOLEAN, item, path)
        return found if isinstance(found, bool) else None


_BOOLEAN = Option("", ("",), "", "boolean")


def joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def expected(option: Option) -> str:
    """For messages: what an option wants."""
    if option.allowed:
        return ("one or more of " if option.takes_many else "one of ") + ", ".join(option.allowed)
    kinds: Mapping[str, str] = {
        **{"boolean": "true or false", "path": "a path", "socket": "a path", "resource": "a resource's name"},
        **{"seconds": "a number of seconds", "hold": "a duration", "interval": "a duration"},
        **{"integers": "a list of numbers", "xids": "a list of XIDs", "selectors": "a list of GPUs"},
        **{"words": "a list of words", "address": "HOST:PORT"},
    }
    return kinds.get(option.kind, "a string")


def _names(known: Iterable[str]) -> str:
    return ", ".join(known)
