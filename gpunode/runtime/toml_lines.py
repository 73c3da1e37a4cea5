"""Changing TOML as lines of text, for files no document model takes; toml_edit.py guards the result."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from gpunode.facts.toml_places import dotted_into, headers, key_lines

Path = tuple[str, ...]
_BARE = re.compile(r"^[A-Za-z0-9_-]+$")


def header_indents(text: str) -> dict[Path, str]:
    """The blanks before each header."""
    lines = text.splitlines()
    return {path: lines[number][: lines[number].index("[")] for number, path in headers(lines)}


def step(indents: dict[Path, str]) -> str:
    """How much a nested table is indented in this file; empty if it isn't."""
    widths = sorted({indent for indent in indents.values() if indent}, key=len)
    return widths[0] if widths else ""


def indent_for(path: Path, indents: dict[Path, str]) -> str:
    """The indentation for a new table: its siblings', else one step more than its nearest parent's."""
    for other, indent in indents.items():
        if len(other) == len(path) and other[:-1] == path[:-1]:
            return indent
    for length in range(len(path) - 1, 0, -1):
        if path[:length] in indents:
            return indents[path[:length]] + step(indents)
    return ""


def dotted(path: Path) -> str:
    """The path as a header writes it, quoted where TOML wants it."""
    return ".".join(key if _BARE.match(key) else _quoted(key) for key in path)


def _quoted(key: str) -> str:
    escaped = key.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def put(text: str, path: Path, value: Any, dump: Callable[[Any], str]) -> str | None:
    """Add a table at the end, or a key below its table's header; a key that is there gets the new value."""
    if isinstance(value, dict):
        return _end_line(text) + "".join(_tables(path, value, dump))
    lines = text.splitlines(keepends=True)
    number = _line_of(lines, path)
    if number is not None:
        return _with_value(lines, number, dump(value))
    line = f"{dotted(path[-1:])} = {dump(value)}\n"
    if len(path) == 1:
        return _put_top(lines, line)
    for number, table in headers([one.rstrip("\r\n") for one in lines]):
        if table == path[:-1]:
            indent = lines[number][: lines[number].index("[")]
            return "".join([*lines[:number], _end_line(lines[number]), indent, line, *lines[number + 1 :]])
    neighbour = dotted_into(lines, path[:-1])
    if neighbour is not None:
        number, above = neighbour
        indent = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
        line = f"{indent}{dotted(path[len(above) :])} = {dump(value)}\n"
        return "".join([*lines[:number], line, *lines[number:]])
    return _end_line(text) + f"\n[{dotted(path[:-1])}]\n{line}"


def _line_of(lines: list[str], path: Path) -> int | None:
    """Number (from 0) of the line that gives the key at `path` its value, dotted or below its header."""
    found = (number for number, here in key_lines(lines) if here == path)
    return next(found, None)


def _with_value(lines: list[str], number: int, value: str) -> str | None:
    """The text with the value of one line replaced, its comment kept; None if it has more than one line."""
    found = re.match(
        r"""(.*?=[ \t]*)("(?:[^"\\]|\\.)*"|'[^']*'|\[[^\]]*\]|[^\s#]+)([ \t]*(?:\#.*)?\r?\n?)$""",
        lines[number],
    )
    if found is None:
        return None
    return "".join([*lines[:number], f"{found[1]}{value}{found[3]}", *lines[number + 1 :]])


def beside_comment(text: str, path: Path, line: str) -> str | None:
    """`line` put behind the first comment in its table that shows the key (``#key = ...``), else None."""
    lines = text.splitlines(keepends=True)
    found = headers([one.rstrip("\r\n") for one in lines])
    ends = [number for number, one in enumerate(lines) if one.lstrip().startswith("[")]
    starts = [number + 1 for number, table in found if table == path[:-1]] if len(path) > 1 else [0]
    for start in starts:
        end = next((number for number in ends if number >= start), len(lines))
        for number in range(start, end):
            shown = re.match(rf"([ \t]*)#[ \t]*{re.escape(dotted(path[-1:]))}[ \t]*=", lines[number])
            if shown:
                before = [*lines[:number], _end_line(lines[number])]
                return "".join([*before, shown[1], line, *lines[number + 1 :]])
    return None


def _put_top(lines: list[str], line: str) -> str:
    """A new top-level key, before the first table."""
    tables = headers([one.rstrip("\r\n") for one in lines])
    end = tables[0][0] if tables else len(lines)
    top = next((n + 1 for n in range(end) if re.match(r"version[ \t]*=", lines[n])), 0)
    return "".join([*lines[:top], line, *lines[top:]])


def _tables(path: Path, tree: dict[str, Any], dump: Callable[[Any], str]) -> list[str]:
    scalars = {key: value for key, value in tree.items() if not isinstance(value, dict)}
    written = []
    if scalars or not tree:
        written.append(f"\n[{dotted(path)}]\n")
        written += [f"{dotted((key,))} = {dump(value)}\n" for key, value in scalars.items()]
    for key, value in tree.items():
        if isinstance(value, dict):
            written += _tables((*path, key), value, dump)
    return written


def remove(text: str, path: Path) -> str | None:
    """Take out the tables under `path` with their lines, and the lines of keys at or below it."""
    lines = text.splitlines(keepends=True)
    found = headers([line.rstrip("\r\n") for line in lines])
    gone: set[int] = set()
    for position, (number, table) in enumerate(found):
        if table[: len(path)] == path:
            end = found[position + 1][0] if position + 1 < len(found) else len(lines)
            gone.update(range(number, _without_trailing_comments(lines, number, end)))
    gone.update(number for number, here in key_lines(lines) if here[: len(path)] == path)
    return "".join(line for number, line in enumerate(lines) if number not in gone) if gone else None


def _without_trailing_comments(lines: list[str], start: int, end: int) -> int:
    """Comments right before the next header belong to that one."""
    while end > start + 1 and lines[end - 1].lstrip().startswith("#"):
        end -= 1
    return end


def _end_line(text: str) -> str:
    return text if not text or text.endswith("\n") else text + "\n"
