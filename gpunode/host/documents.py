"""Bounded reader for YAML, and so for JSON, that another user or program wrote.

YAML 1.1. `read` returns a tree in which every node has its line: nothing is constructed from tags, and
scalars stay text, because only the schema knows their meaning. What NVIDIA's plugin ignores (a second
document, all but the last of several values of a key) is ignored here as well, but noted. `load` returns
plain data.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import yaml

MAX_BYTES = 256 * 1024  # a ConfigMap holds at most 1 MiB in several files
MAX_STREAM_BYTES = 4 << 20  # a few such objects
_MAX_ITEMS = 50_000
_MAX_DEPTH = 32
_MAX_SHOWN = 60  # characters of a value in a message
MAX_DATA_BYTES = 16 << 20  # of `load`; a doctor's report of a large node has less than 1 MiB
_MAX_VALUES = 500_000
_MAX_DATA_DEPTH = 64
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_QUOTED = re.compile(r"\s*(\(.*\)|['\"].*['\"])")
_EXPECTED = "did not find expected "  # libyaml ends it with a character or word of YAML, never of the text
_TAGS = frozenset({"str", "int", "float", "bool", "null", "map", "seq", "timestamp", "merge", "value"})


class DocumentError(ValueError):
    """`line` is 1-based, 0 if there is none."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(f"line {line}: {message}" if line else message)
        self.line = line
        self.message = message


class Item(NamedTuple):
    """`kind` is map, list, scalar or null. A mapping's `pairs` are (key, its line, value)."""

    line: int
    kind: str
    text: str = ""
    items: tuple[Item, ...] = ()
    pairs: tuple[tuple[str, int, Item], ...] = ()

    @property
    def what(self) -> str:
        """The kind of value, for messages."""
        shown_text = self.text if len(self.text) <= _MAX_SHOWN else f"{self.text[:_MAX_SHOWN]}..."
        return {"map": "a mapping", "list": "a list", "null": "nothing"}.get(self.kind, repr(shown_text))


EMPTY = Item(1, "null")
Notes = list[tuple[int, str]]
"""(line, what is ignored there)."""


def read(data: bytes, notes: Notes) -> Item:
    """Read the tree. `DocumentError` for anything but a plain YAML document. Appends to `notes`."""
    documents = _documents(_text(data), _MAX_DEPTH, _MAX_ITEMS)
    if len(documents) > 1:
        line = documents[1].start_mark.line + 1
        notes.append((line, "a second document, which is ignored: one file is one document"))
    return _Tree(notes).item(documents[0], ()) if documents else EMPTY


def read_all(data: bytes, notes: Notes) -> tuple[Item, ...]:
    """Every non-empty document of a stream; otherwise as `read`. The limits apply to all of them together."""
    tree = _Tree(notes)
    return tuple(
        tree.item(document, ())
        for document in _documents(_text(data, MAX_STREAM_BYTES), _MAX_DEPTH, _MAX_ITEMS)
    )


def load(text: str, *, max_bytes: int = MAX_DATA_BYTES, secret: bool = False) -> Any:
    """The document of a text as plain data, None for an empty one. `DocumentError` for anything else.

    `secret`: the text contains credentials. An error quotes nothing of it (PyYAML's own errors show the tag
    or the anchor that a password is parsed as), and aliases are refused.
    """
    if len(text) > max_bytes:
        raise DocumentError(0, f"larger than {max_bytes >> 20} MiB")
    documents = _documents(text, _MAX_DATA_DEPTH, _MAX_VALUES, secret)
    if not documents:
        return None
    if len(documents) > 1:
        raise DocumentError(documents[1].start_mark.line + 1, "a second document")
    _Bounds().check(documents[0])
    from yaml.constructor import ConstructorError, SafeConstructor

    try:
        return SafeConstructor().construct_document(documents[0])
    except ConstructorError as error:
        raise DocumentError(*_marked(error, text, secret)) from (None if secret else error)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        # PyYAML's constructors trust tags
        message = "a value doesn't have the type that its tag or form requires"
        raise DocumentError(0, message) from (None if secret else error)


class _Bounds:
    """Counts the values of a document: aliases share one value, but a merge (``<<``) copies each time."""

    def __init__(self) -> None:
        self._entries: dict[int, int] = {}
        self._left = _MAX_VALUES

    def check(self, node: Any, above: tuple[int, ...] = ()) -> None:
        if id(node) in above or len(above) > _MAX_DATA_DEPTH:
            raise DocumentError(node.start_mark.line + 1, "nested too deeply")
        if node.id == "scalar" or id(node) in self._entries:
            return
        pairs = node.value if node.id == "mapping" else [(child,) for child in node.value]
        for pair in pairs:
            for child in pair:
                self.check(child, (*above, id(node)))
        entries = len(pairs) + sum(self._merged(*pair) for pair in pairs if node.id == "mapping")
        self._entries[id(node)] = entries
        self._left -= entries
        if self._left < 0:
            raise DocumentError(
                node.start_mark.line + 1, f"more than {_MAX_VALUES} values, merged ones included"
            )

    def _merged(self, key: Any, value: Any) -> int:
        parts = value.value if value.id == "sequence" else [value]
        return sum(self._entries.get(id(part), 0) for part in parts) if key.tag.endswith(":merge") else 0


def _text(data: bytes, limit: int = MAX_BYTES) -> str:
    if len(data) > limit:
        raise DocumentError(0, f"{len(data)} bytes exceed the limit of {limit} for a configuration file")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DocumentError(line, "not UTF-8 text") from error
    if text.lstrip()[:1] == "{":
        text = text.replace("\t", " ")  # JSON may be indented with tabs, YAML not
    return text


def _documents(text: str, depth: int, values: int, secret: bool = False) -> list[Any]:
    """The composed documents that aren't empty."""
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's takes a tenth of the time
    try:
        _check_events(yaml.parse(text, Loader=loader), depth, values, aliases=not secret)
        return [node for node in yaml.compose_all(text, Loader=loader) if not _is_null(node)]
    except yaml.MarkedYAMLError as error:
        raise DocumentError(*_marked(error, text, secret)) from (None if secret else error)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        code = error.character if isinstance(error.character, int) else ord(error.character)
        message = f"not YAML: the character U+{code:04X} isn't allowed"
        raise DocumentError(line, message) from (None if secret else error)
    except (yaml.YAMLError, UnicodeEncodeError, RecursionError) as error:
        what = " ".join(str(error).split())
        message = f"not YAML: {_QUOTED.sub('', what) if secret else what}"
        raise DocumentError(0, message) from (None if secret else error)


def _check_events(events: Iterable[Any], depth: int, values: int, aliases: bool) -> None:
    """Checked before libyaml's composer sees the text: it recurses on the C stack, its parser doesn't."""
    import yaml

    level = 0
    for number, event in enumerate(events):
        line = event.start_mark.line + 1
        level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if level > depth:
            raise DocumentError(line, "nested too deeply")
        if number > 2 * values:
            raise DocumentError(line, f"more than {values} values")
        if not aliases and isinstance(event, yaml.AliasEvent):
            raise DocumentError(line, "an alias (*NAME) isn't allowed")


def _marked(error: yaml.MarkedYAMLError, text: str, secret: bool) -> tuple[int, str]:
    mark = error.problem_mark or error.context_mark
    context, problem = error.context or "", error.problem or ""
    if secret:
        context = _QUOTED.sub("", context)
        problem = problem if problem.startswith(_EXPECTED) else _QUOTED.sub("", problem)
    what = f"{context} {problem}".strip()
    if "nesting depth" in problem:
        # libyaml's own limit since 0.2.6, which a long line of brackets reaches before ours
        return (mark.line + 1 if mark else 0), "nested too deeply"
    lines = text.splitlines()
    if mark is None:
        return 0, f"not YAML: {' '.join(what.split())}"
    if mark.line < len(lines) and re.match(r"\s*\t", lines[mark.line]):
        what = "YAML doesn't allow tabs for indentation; use spaces"
    elif (start := error.context_mark) and "block" in context and mark.column != start.column:
        what = (
            f"this line is indented by {mark.column}, but the block that started on line {start.line + 1} "
            f"by {start.column} ({problem})"
        )
    elif "mapping values" in problem:
        what = f"a second ':' on a line, or a line that is indented further than the lines around it ({what})"
    return mark.line + 1, f"not YAML: {' '.join(what.split())}"


def _is_null(node: Any) -> bool:
    return node is None or bool(node.id == "scalar" and not node.style and node.value in _NULLS)


class _Tree:
    """Walks the composed nodes; aliases count each time, so that an alias bomb is refused early."""

    def __init__(self, notes: Notes) -> None:
        self._left = _MAX_ITEMS
        self._notes = notes

    def item(self, node: Any, above: tuple[int, ...]) -> Item:
        line = node.start_mark.line + 1
        self._left -= 1
        if self._left < 0:
            raise DocumentError(line, f"more than {_MAX_ITEMS} values, aliases resolved")
        if len(above) >= _MAX_DEPTH or id(node) in above:
            raise DocumentError(line, "nested too deeply")
        if node.tag.removeprefix("tag:yaml.org,2002:") not in _TAGS:
            raise DocumentError(line, f"the tag {node.tag.replace('tag:yaml.org,2002:', '!!')} isn't allowed")
        inside = (*above, id(node))
        if node.id == "mapping":
            return Item(line, "map", pairs=tuple(self._pairs(node, inside)))
        if node.id == "sequence":
            return Item(line, "list", items=tuple(self.item(child, inside) for child in node.value))
        return Item(line, "null") if _is_null(node) else Item(line, "scalar", node.value)

    def _pairs(self, node: Any, above: tuple[int, ...]) -> Iterator[tuple[str, int, Item]]:
        own: dict[str, tuple[str, int, Item]] = {}
        merged: list[tuple[str, int, Item]] = []
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.id != "scalar":
                raise DocumentError(line, "a key must be a string")
            if key.tag.endswith(":merge"):
                merged += self._merged(value, above)
                continue
            if (before := own.pop(key.value, None)) is not None:
                message = (
                    f"duplicate key {key.value}: this value is used, the one on line {before[1]} is ignored"
                )
                self._notes.append((line, message))
            own[key.value] = key.value, line, self.item(value, above)
        yield from own.values()
        for name, line, item in merged:
            if name not in own:
                own[name] = name, line, item
                yield own[name]

    def _merged(self, node: Any, above: tuple[int, ...]) -> list[tuple[str, int, Item]]:
        item = self.item(node, above)
        parts = item.items if item.kind == "list" else (item,)
        if any(part.kind != "map" for part in parts):
            raise DocumentError(item.line, "<< can merge only mappings")
        return [pair for part in parts for pair in part.pairs]
