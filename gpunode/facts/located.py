"""Where a key stands in a TOML file, told from its lines: for errors that name the line, and for edits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import yaml


KeyPath = tuple[str, ...]
_HEADER = re.compile(r"^([ \t]*)(\[\[?)([^\[\]].*?)\]\]?[ \t]*(?:#.*)?$")
_KEY = re.compile(r"""^[ \t]*((?:[A-Za-z0-9_.\- \t]|"(?:[^"\\]|\\.)*"|'[^']*')+?)[ \t]*=""")


def header_path(line: str) -> KeyPath | None:
    """The table that a header line opens; None if the line is no plain ``[table]`` header."""
    found = _HEADER.match(line)
    return _keys(f"[{found[3]}]") if found is not None and found[2] == "[" else None


def headers(lines: list[str]) -> list[tuple[int, KeyPath]]:
    """Line number (from 0) and table of every header."""
    found = (
        (number, header_path(line)) for number, line in enumerate(lines) if line.lstrip().startswith("[")
    )
    return [(number, path) for number, path in found if path]


def key_lines(lines: list[str]) -> list[tuple[int, KeyPath]]:
    """Line number (from 0) and whole path of every key that has a line of its own, dotted or not."""
    return [(number, path) for number, path, is_header in _paths(lines) if not is_header]


def dotted_into(lines: list[str], table: KeyPath) -> tuple[int, KeyPath] | None:
    """The first line whose dotted key lies in `table`, and the header above it; None if no line does."""
    above: KeyPath = ()
    for number, path, is_header in _paths(lines):
        if is_header:
            above = path
        elif len(above) < len(table) < len(path) and path[: len(table)] == table:
            return number, above
    return None


def line_of_key(text: str, path: KeyPath) -> int:
    """The line (from 1) where the key or table at `path` begins, or the table it is written into; 0 if none.

    A key inside an inline table has the line of that table.
    """
    nearest = (0, 0)
    for number, here, _ in _paths(text.removeprefix("\ufeff").splitlines()):
        if here[: len(path)] == path:
            return number + 1
        if path[: len(here)] == here and len(here) > nearest[0]:
            nearest = (len(here), number + 1)
    return nearest[1]


def _paths(lines: list[str]) -> Iterator[tuple[int, KeyPath, bool]]:
    """Number, path and whether it is a header, of every line that opens a table or begins a key."""
    table: KeyPath = ()
    for number, line in enumerate(lines):
        if line.lstrip().startswith("["):
            header = _HEADER.match(line.rstrip("\r\n"))
            table = (_keys(f"[{header[3]}]") if header is not None else None) or table
            yield number, table, True
            continue
        key = _KEY.match(line)
        below = _keys(f"{key[1]} = 0") if key is not None else None
        if below is not None:
            yield number, (*table, *below), False


def line_of_text(text: str, value: str) -> int:
    """The first line (from 1) that isn't a comment and has `value` in quotes; 0 if there is none."""
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.lstrip().startswith("#") and (f'"{value}"' in line or f"'{value}'" in line):
            return number
    return 0


def place(path: str, line: int) -> str:
    """``file:line``, or the file alone where no line is known."""
    return f"{path}:{line}" if line else path


def _keys(text: str) -> KeyPath | None:
    """The key path that one line of TOML without a value of its own makes."""
    import tomllib

    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None
    path = []
    while isinstance(tree, dict) and tree:
        key, tree = next(iter(tree.items()))
        path.append(key)
    return tuple(path)


# A config file's text as a tree in which everything knows its line. Untrusted: bounded in size and depth.
#
# YAML 1.1 and thus JSON. Nothing is constructed from tags; scalars stay text, as only the schema knows what
# they are to mean. What NVIDIA's plugin passes over, a second document and all but the last of several values
# of a key, is passed over here as well, but noted.

MAX_BYTES = 256 * 1024  # a ConfigMap holds at most 1 MiB, of several files
MAX_STREAM_BYTES = 4 << 20  # a few such objects
_MAX_ITEMS = 50_000
_MAX_DEPTH = 32
_MAX_NESTING = 2000  # libyaml's composer recurses on the C stack
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_TAGS = frozenset({"str", "int", "float", "bool", "null", "map", "seq", "timestamp", "merge", "value"})


class DocumentError(Exception):
    """`line` is 1-based, 0 if there is none."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
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
        """For messages: what is found here."""
        return {"map": "a mapping", "list": "a list", "null": "nothing"}.get(self.kind, repr(self.text))


EMPTY = Item(1, "null")
Notes = list[tuple[int, str]]
"""(line, what is passed over there)."""


def read(data: bytes, notes: Notes) -> Item:
    """The tree. `DocumentError` for what is no plain YAML document. `notes` grow."""
    documents = _documents(_text(data))
    if len(documents) > 1:
        line = documents[1].start_mark.line + 1
        notes.append((line, "a second document, which has no effect: one file is one document"))
    return _Tree(notes).item(documents[0], ()) if documents else EMPTY


def read_all(data: bytes, notes: Notes) -> tuple[Item, ...]:
    """Every document of a stream that isn't empty; otherwise as `read`. Together they are bounded as one."""
    tree = _Tree(notes)
    return tuple(tree.item(one, ()) for one in _documents(_text(data, MAX_STREAM_BYTES)))


def _text(data: bytes, limit: int = MAX_BYTES) -> str:
    if len(data) > limit:
        raise DocumentError(0, f"{len(data)} bytes are more than the {limit} allowed for a config file")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DocumentError(line, "not UTF-8 text") from error
    if text.lstrip()[:1] == "{":
        text = text.replace("\t", " ")  # JSON may be indented with tabs, YAML not
    _refuse_nesting(text)
    return text


def _refuse_nesting(text: str) -> None:
    """Before the composer sees it: a level takes a column at a line's start, or a bracket."""
    columns = max((len(found[0]) for found in re.finditer(r"^[ \-?:]+", text, re.MULTILINE)), default=0)
    if columns + text.count("[") + text.count("{") > _MAX_NESTING:
        raise DocumentError(0, "nested too deeply")


def _documents(text: str) -> list[Any]:
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return [node for node in yaml.compose_all(text, Loader=loader) if not _is_null(node)]
    except yaml.MarkedYAMLError as error:
        raise DocumentError(*_marked(error, text)) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        code = error.character if isinstance(error.character, int) else ord(error.character)
        raise DocumentError(line, f"not YAML: the character U+{code:04X} can't stand in a file") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise DocumentError(0, f"not YAML: {' '.join(str(error).split())}") from error


def _marked(error: yaml.MarkedYAMLError, text: str) -> tuple[int, str]:
    mark = error.problem_mark or error.context_mark
    what = " ".join(part for part in (error.context, error.problem) if part)
    lines = text.splitlines()
    if mark is None:
        return 0, f"not YAML: {' '.join(what.split())}"
    if mark.line < len(lines) and re.match(r"\s*\t", lines[mark.line]):
        what = "a tab can't indent YAML; use spaces"
    elif (begun := error.context_mark) and "block" in (error.context or "") and mark.column != begun.column:
        what = (
            f"this line is indented by {mark.column}, and what it belongs to, which began on line "
            f"{begun.line + 1}, by {begun.column} ({error.problem})"
        )
    elif "mapping values" in (error.problem or ""):
        what = f"a second ':' on a line, or a line that is indented further than its neighbours ({what})"
    return mark.line + 1, f"not YAML: {' '.join(what.split())}"


def _is_null(node: Any) -> bool:
    return node is None or bool(node.id == "scalar" and not node.style and node.value in _NULLS)


class _Tree:
    """Walks the composed nodes; aliases count each time, so that a bomb ends early."""

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
                raise DocumentError(line, "a key must be a word")
            if key.tag.endswith(":merge"):
                merged += self._merged(value, above)
                continue
            if (before := own.pop(key.value, None)) is not None:
                message = f"the key {key.value} stands here again, and counts; on line {before[1]} it doesn't"
                self._notes.append((line, message))
            own[key.value] = key.value, line, self.item(value, above)
        yield from own.values()
        for name, line, item in merged:
            if name not in own:
                own[name] = name, line, item
                yield own[name]

    def _merged(self, node: Any, above: tuple[int, ...]) -> list[tuple[str, int, Item]]:
        found = self.item(node, above)
        parts = found.items if found.kind == "list" else (found,)
        if any(part.kind != "map" for part in parts):
            raise DocumentError(found.line, "<< merges mappings only")
        return [pair for part in parts for pair in part.pairs]
