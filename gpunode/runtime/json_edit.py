"""Editing a JSON object as text: only the keys that change are rewritten, every other byte stays.

So key order, indentation, line ends, a byte order mark, big integers and spellings of numbers survive. The
result is parsed again and compared with the desired object; any difference is refused.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any, NamedTuple

from gpunode.errors import ConfigError
from gpunode.facts.docker import parse_daemon_json
from gpunode.facts.toml import Edit, Mutation, Remove, Tree, edits, mutated, same

_DEFAULT_INDENT = "    "
_BLANK = re.compile(r"[ \t\r\n]*")


class _KeySpan(NamedTuple):
    key: str
    start: int  # of the key's quote
    value: int
    end: int


class _Object(NamedTuple):
    start: int  # of the opening brace
    end: int  # after the closing brace
    members: tuple[_KeySpan, ...]

    def member(self, key: str) -> _KeySpan:
        """An existing member."""
        return next(member for member in self.members if member.key == key)


def edit(text: str, mutate: Mutation, path: str) -> str:
    """`text` with the mutation applied. `ConfigError` if it isn't a JSON object or can't be edited safely."""
    parse_daemon_json(text, path)
    old = _exact(text)
    new = mutated(old, mutate)
    changes = edits(old, new)
    if not changes:
        return text
    result = text
    if not isinstance(_loads(text), dict):  # empty, or null: dockerd reads both as {}
        mark = "\ufeff" if text.startswith("\ufeff") else ""
        result = mark + json.dumps(new, indent=_DEFAULT_INDENT, ensure_ascii=False) + "\n"
    else:
        for change in changes:
            result = _apply(result, change)
    if not same(_exact(result), new):
        keys = ", ".join(".".join(change.path) for change in changes)
        raise ConfigError(
            f"{path} can't be edited without changing other settings; it was not changed",
            hint=f"change {keys} manually: ${{EDITOR:-vi}} {path}; then run the same command again",
        )
    return result


def line_of(text: str, *keys: str) -> int:
    """The line, 1-based, of the existing member at the path `keys`; without keys it is 1.

    The text is known to be an object without duplicate keys.
    """
    start, line = text.find("{"), 1
    for key in keys:
        member = _scan(text, start).member(key)
        line = text.count("\n", 0, member.start) + 1
        start = member.value
    return line


def _loads(text: str) -> Any:
    body = text.removeprefix("\ufeff")
    return json.loads(body, parse_float=Decimal) if body.strip() else None


def _exact(text: str) -> Tree:
    """The object with decimals kept exactly; {} for an empty file and null."""
    loaded = _loads(text)
    return loaded if isinstance(loaded, dict) else {}


def _skip(text: str, position: int) -> int:
    match = _BLANK.match(text, position)
    return match.end() if match else position


def _scan(text: str, start: int) -> _Object:
    """The positions of the members of the object at `start`; the text is known to be valid JSON."""
    decoder = json.JSONDecoder()
    members: list[_KeySpan] = []
    position = _skip(text, start + 1)
    while text[position] != "}":
        if text[position] == ",":
            position = _skip(text, position + 1)
        key, after_key = decoder.raw_decode(text, position)
        value = _skip(text, _skip(text, after_key) + 1)
        end = decoder.raw_decode(text, value)[1]
        members.append(_KeySpan(key, position, value, end))
        position = _skip(text, end)
    return _Object(start, position + 1, tuple(members))


def _apply(text: str, change: Edit) -> str:
    *parents, key = change.path
    here = _scan(text, text.index("{"))
    for parent in parents:
        here = _scan(text, here.member(parent).value)
    if isinstance(change, Remove):
        return _remove(text, here, key)
    if any(member.key == key for member in here.members):
        member = here.member(key)
        indent = _line_indent(text, member.start)
        return text[: member.value] + _dump(text, change.value, here, indent) + text[member.end :]
    return _insert(text, here, len(change.path), key, change.value)


def _remove(text: str, here: _Object, key: str) -> str:
    position = next(index for index, member in enumerate(here.members) if member.key == key)
    if len(here.members) == 1:
        return text[: here.start] + "{}" + text[here.end :]
    if position + 1 < len(here.members):
        return text[: here.members[position].start] + text[here.members[position + 1].start :]
    return text[: here.members[position - 1].end] + text[here.members[position].end :]


def _insert(text: str, here: _Object, depth: int, key: str, value: Any) -> str:
    name = json.dumps(key, ensure_ascii=False) + ": "
    newline = _newline(text)
    if not here.members:
        indent = _unit(text) * depth
        outer = _unit(text) * (depth - 1)
        body = newline + indent + name + _dump(text, value, None, indent) + newline + outer
        return text[: here.start + 1] + body + text[here.end - 1 :]
    last = here.members[-1]
    if _one_line(text, here):
        return text[: last.end] + ", " + name + _dump(text, value, here, "") + text[last.end :]
    indent = _line_indent(text, last.start)
    return (
        text[: last.end] + "," + newline + indent + name + _dump(text, value, here, indent) + text[last.end :]
    )


def _dump(text: str, value: Any, here: _Object | None, indent: str) -> str:
    if here is not None and _one_line(text, here):
        return json.dumps(value, ensure_ascii=False)
    dumped = json.dumps(value, indent=_unit(text), ensure_ascii=False)
    return dumped.replace("\n", _newline(text) + indent)


def _one_line(text: str, here: _Object) -> bool:
    return bool(here.members) and "\n" not in text[here.start : here.members[0].start]


def _newline(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _line_indent(text: str, position: int) -> str:
    """Blanks at the start of the line of `position`."""
    match = re.match(r"[ \t]*", text[text.rfind("\n", 0, position) + 1 :])
    return match[0] if match else ""


def _unit(text: str) -> str:
    """One level of the file's own indentation: the blanks before the outermost object's first key."""
    outer = _scan(text, text.index("{"))
    if not outer.members or _one_line(text, outer):
        return _DEFAULT_INDENT
    return _line_indent(text, outer.members[0].start) or _DEFAULT_INDENT
