"""A kubeconfig's YAML as plain data, bounded, and without a word of it in an error: it is full of secrets.

PyYAML's own errors show the line, or the tag or anchor that a password is taken for.
"""

from __future__ import annotations

import re
from typing import Any

MAX_BYTES = 4 << 20  # kubeconfigs with many clusters have some hundred KiB
_MAX_DEPTH = 64
_MAX_VALUES = 100_000
_MAX_TEXT = 4 * MAX_BYTES  # with aliases resolved


class NotPlain(Exception):
    """`str` says what is wrong and on which line, and quotes nothing."""


def load(text: str) -> Any:
    """The one document of a text, None for an empty one. `NotPlain`."""
    import yaml

    if len(text) > MAX_BYTES:
        raise NotPlain(f"it is larger than {MAX_BYTES >> 20} MiB")
    kind: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _refuse_nesting(text, kind)
        loader = kind(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _Counted().add(node, 0)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = re.sub(r"\s*(\(.*\)|['\"].*['\"])", "", error.problem or "")
        raise NotPlain(f"line {mark.line + 1}: {problem}" if mark else problem) from None
    except yaml.YAMLError:
        raise NotPlain("it holds a character that can't stand in YAML") from None
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        # PyYAML's constructors take a tag at its word
        raise NotPlain("it holds a value that isn't what its form or tag says") from None


def _refuse_nesting(text: str, kind: Any) -> None:
    """Before libyaml's composer sees it, which recurses on the C stack."""
    import yaml

    depth = 0
    for number, event in enumerate(yaml.parse(text, Loader=kind)):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _MAX_DEPTH or number > 2 * _MAX_VALUES:
            mark: Any = event.start_mark
            raise NotPlain(f"line {mark.line + 1}: nested too deeply, or too many values")


class _Counted:
    """Aliases count each time: what is built shares them, but what merges or shows them doesn't."""

    def __init__(self) -> None:
        self._values = _MAX_VALUES
        self._text = _MAX_TEXT

    def add(self, node: Any, depth: int) -> None:
        self._values -= 1
        self._text -= len(node.value) if node.id == "scalar" else 0
        if self._values < 0 or self._text < 0 or depth > _MAX_DEPTH:
            raise NotPlain("too much of it, with its aliases resolved")
        if node.id == "sequence":
            for one in node.value:
                self.add(one, depth + 1)
        elif node.id == "mapping":
            for pair in node.value:
                for one in pair:
                    self.add(one, depth + 1)
