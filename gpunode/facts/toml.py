"""Parser for TOML files, the line numbers of their keys for errors and edits, and their plain trees."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime, time
from typing import Any, NamedTuple

from gpunode.errors import ConfigError
from gpunode.output.typed import toml

KeyPath = tuple[str, ...]
_HEADER = re.compile(r"^([ \t]*)(\[\[?)([^\[\]].*?)\]\]?[ \t]*(?:#.*)?$")
_PART = r"""(?:[A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*"|'[^']*')"""
_KEY = re.compile(rf"^[ \t]*({_PART}(?:[ \t]*\.[ \t]*{_PART})*)[ \t]*=")
# what may open or close a value of several lines; strings and comments are passed over. A quote that nothing
# ends, which no TOML has, takes the rest of the line: to search on behind it takes quadratic time
_TOKEN = re.compile(r"""\"{3}|'{3}|"(?:[^"\\]|\\.)*"?|'[^']*'?|[\[\]{}]|#.*""")
_NESTING = {"[": 1, "{": 1, "]": -1, "}": -1}
_STRING_ENDS = {  # a multi-line string may end with two quotes of its own
    '"""': re.compile(r'(?:[^"\\]|\\.|"(?!""))*"{3,5}'),
    "'''": re.compile(r"(?:[^']|'(?!''))*'{3,5}"),
}
_BARE = re.compile(r"[A-Za-z0-9_-]+")
LARGEST = 512 << 10  # characters; the largest known file has 80 KB, and editing takes 4 s per megabyte
BYTE_ORDER_MARK = "\ufeff"  # containerd skips one at the start of its file, Python's parser does not


def _dotted(key: re.Match[str]) -> str:
    return ".".join(re.findall(r"'([^']*)'", key[0]))


def parse_toml(text: str, path: str) -> dict[str, Any]:
    """The plain tree of a TOML file; `ConfigError` with file, line and column, or if it is far too large."""
    if len(text) > LARGEST:
        raise ConfigError(
            f"{path} has {len(text) >> 10} KB, too large for an engine's configuration",
            hint=f"inspect the file: head -c 500 {path}",
        )
    try:
        return toml(text.removeprefix(BYTE_ORDER_MARK))
    except ValueError as error:
        position = re.search(r"^(.*?) \(at line (\d+), column (\d+)\)$", str(error))
        end = (max(1, len(text.splitlines())), 1)
        line, column = (int(position[2]), int(position[3])) if position else end
        reason = position[1] if position else str(error).removesuffix(" (at end of document)")
        # a key, as a tuple in Python's form
        reason = re.sub(r"\((?:'[^']*'(?:, |,?(?=\))))+\)", _dotted, reason)
        raise ConfigError(
            f"{path}:{line}:{column}: {reason[:1].lower()}{reason[1:]}",
            hint=f"correct that line: ${{EDITOR:-vi}} +{line} {path}",
        ) from error
    except RecursionError as error:
        raise ConfigError(
            f"{path}: nested too deeply for a configuration file",
            hint=f"inspect the file: less {path}",
        ) from error


def as_key(path: KeyPath) -> str:
    """A dotted key as TOML writes it."""
    return ".".join(key if _BARE.fullmatch(key) else _quoted(key) for key in path)


def as_value(value: Any) -> str:
    """A value of a parsed file as TOML writes it, on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, list):
        return f"[{', '.join(map(as_value, value))}]"
    if isinstance(value, dict):
        pairs = (f"{as_key((key,))} = {as_value(below)}" for key, below in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    return str(value)


def _quoted(text: str) -> str:
    """JSON's strings are TOML's, but for one control character that JSON allows."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def headers(lines: list[str]) -> list[tuple[int, KeyPath]]:
    """Line number (from 0) and table of every plain ``[table]`` header."""
    matches = ((number, _HEADER.match(line)) for number, line in _starts(lines))
    plain = ((number, _keys(f"[{match[3]}]")) for number, match in matches if match and match[2] == "[")
    return [(number, path) for number, path in plain if path]


def key_lines(lines: list[str]) -> list[tuple[int, KeyPath]]:
    """Line number (from 0) and whole path of every key that has a line of its own, dotted or not."""
    return [(number, path) for number, path, is_header in _paths(lines) if not is_header]


def dotted_into(lines: list[str], table: KeyPath) -> tuple[int, KeyPath] | None:
    """The first line with a dotted key in `table`, and the header above it; None if there is none."""
    above: KeyPath = ()
    for number, path, is_header in _paths(lines):
        if is_header:
            above = path
        elif len(above) < len(table) < len(path) and path[: len(table)] == table:
            return number, above
    return None


def line_of_key(text: str, path: KeyPath) -> int:
    """The line (from 1) where the key or table at `path` starts, or the table that contains it; 0 if there is
    none.

    A key inside an inline table has the line of that table.
    """
    nearest = (0, 0)
    for number, here, _ in _paths(text.removeprefix(BYTE_ORDER_MARK).splitlines()):
        if here[: len(path)] == path:
            return number + 1
        if path[: len(here)] == here and len(here) > nearest[0]:
            nearest = (len(here), number + 1)
    return nearest[1]


def _paths(lines: list[str]) -> Iterator[tuple[int, KeyPath, bool]]:
    """Number, path and whether it is a header, of every line that opens a table or begins a key."""
    table: KeyPath = ()
    for number, line in _starts(lines):
        if line.lstrip().startswith("["):
            header = _HEADER.match(line)
            table = (_keys(f"[{header[3]}]") if header is not None else None) or table
            yield number, table, True
            continue
        key = _KEY.match(line)
        below = _keys(f"{key[1]} = 0") if key is not None else None
        if below is not None:
            yield number, (*table, *below), False


def _starts(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Number and text, without its line end, of every line that doesn't continue the value of another one."""
    string, depth = "", 0
    for number, line in enumerate(lines):
        if not string and depth <= 0:
            yield number, line.rstrip("\r\n")
        string, depth = _unclosed(line, string, depth)


def _unclosed(line: str, string: str, depth: int) -> tuple[str, int]:
    """What a line leaves open for the next one: the quotes of a multi-line string, and the number of arrays
    and inline tables. `string` and `depth` are what the line before it left open."""
    position = 0
    while True:
        if string:
            end = _STRING_ENDS[string].match(line, position)
            if end is None:
                return string, depth
            string, position = "", end.end()
        token = _TOKEN.search(line, position)
        if token is None or token[0].startswith("#"):
            return "", depth
        position = token.end()
        if token[0] in _STRING_ENDS:
            string = token[0]
        else:
            depth += _NESTING.get(token[0], 0)


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
    """The key path of one line of TOML that has no value of its own."""
    try:
        tree = toml(text)
    except ValueError:
        return None
    path = []
    while isinstance(tree, dict) and tree:
        key, tree = next(iter(tree.items()))
        path.append(key)
    return tuple(path)


# Plain trees (dicts, lists, scalars) of TOML and JSON: values, comparison and differences.

Tree = dict[str, Any]
Mutation = Callable[[Tree], None]


class Set(NamedTuple):
    """Set the key at `path` to this value; a dict is a whole new table."""

    path: tuple[str, ...]
    value: Any


class Remove(NamedTuple):
    """Remove the key at `path`."""

    path: tuple[str, ...]


Edit = Set | Remove


def dig(tree: Any, *keys: str) -> Any:
    """The value under nested tables, None if one is missing or not a table."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def leaves(tree: Mapping[str, Any], above: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every value that isn't a table, with its path."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, (*above, key))
        else:
            yield (*above, key), value


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
