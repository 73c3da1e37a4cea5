"""TOML editing with a safety check: the only module that writes TOML.

tomlkit 0.13 to 0.15 moves keys between tables on some valid files (dotted keys beside headers, children
before their parents) without an error. So the change is made twice, on the plain tree and on the document;
the document is dumped, parsed again by Python's own parser and compared. If it differs, the change is tried
as plain lines of text, compared again; if that differs too, the file is refused and not changed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gpunode.errors import ConfigError
from gpunode.facts.toml import (
    BYTE_ORDER_MARK,
    Edit,
    KeyPath,
    Mutation,
    Remove,
    Set,
    Tree,
    as_key,
    as_value,
    dig,
    dotted_into,
    edits,
    headers,
    key_lines,
    mutated,
    parse_toml,
    same,
)
from gpunode.output.typed import toml

# Changing TOML as lines of text, for files that tomlkit can't edit; `edit` checks the result.


def header_indents(text: str) -> dict[KeyPath, str]:
    """The blanks before each header."""
    lines = text.splitlines()
    return {path: lines[number][: lines[number].index("[")] for number, path in headers(lines)}


def step(indents: dict[KeyPath, str]) -> str:
    """How much a nested table is indented in this file; empty if it isn't."""
    widths = sorted({indent for indent in indents.values() if indent}, key=len)
    return widths[0] if widths else ""


def indent_for(path: KeyPath, indents: dict[KeyPath, str]) -> str:
    """The indentation for a new table: its siblings', else one step more than its nearest parent's."""
    for other_path, indent in indents.items():
        if len(other_path) == len(path) and other_path[:-1] == path[:-1]:
            return indent
    for length in range(len(path) - 1, 0, -1):
        if path[:length] in indents:
            return indents[path[:length]] + step(indents)
    return ""


def put(text: str, path: KeyPath, value: Any) -> str | None:
    """Add a table at the end, or a key below its table's header; an existing key gets the new value."""
    if isinstance(value, dict):
        return _end_line(text) + "".join(_tables(path, value))
    lines = text.splitlines(keepends=True)
    number = _line_of(lines, path)
    if number is not None:
        return _with_value(lines, number, as_value(value))
    line = f"{as_key(path[-1:])} = {as_value(value)}\n"
    if len(path) == 1:
        return _put_top(lines, line)
    for number, table in headers(lines):
        if table == path[:-1]:
            indent = lines[number][: lines[number].index("[")]
            return "".join([*lines[:number], _end_line(lines[number]), indent, line, *lines[number + 1 :]])
    neighbour = dotted_into(lines, path[:-1])
    if neighbour is not None:
        number, above = neighbour
        indent = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
        line = f"{indent}{as_key(path[len(above) :])} = {as_value(value)}\n"
        return "".join([*lines[:number], line, *lines[number:]])
    return _end_line(text) + f"\n[{as_key(path[:-1])}]\n{line}"


def _line_of(lines: list[str], path: KeyPath) -> int | None:
    """Number (from 0) of the line that sets the key at `path`, dotted or below its header."""
    numbers = (number for number, here in key_lines(lines) if here == path)
    return next(numbers, None)


def _with_value(lines: list[str], number: int, value: str) -> str | None:
    """The text with the value of one line replaced, its comment kept; None if it has more than one line."""
    match = re.match(
        r"""(.*?=[ \t]*)("(?:[^"\\]|\\.)*"|'[^']*'|\[[^\]]*\]|[^\s#]+)([ \t]*(?:\#.*)?\r?\n?)$""",
        lines[number],
    )
    if match is None:
        return None
    return "".join([*lines[:number], f"{match[1]}{value}{match[3]}", *lines[number + 1 :]])


def beside_comment(text: str, path: KeyPath, line: str) -> str | None:
    """`line` after the first comment in its table that shows the key (``#key = ...``), else None."""
    lines = text.splitlines(keepends=True)
    tables = headers(lines)
    ends = [number for number, text_line in enumerate(lines) if text_line.lstrip().startswith("[")]
    starts = [number + 1 for number, table in tables if table == path[:-1]] if len(path) > 1 else [0]
    for start in starts:
        end = next((number for number in ends if number >= start), len(lines))
        for number in range(start, end):
            match = re.match(rf"([ \t]*)#[ \t]*{re.escape(as_key(path[-1:]))}[ \t]*=", lines[number])
            if match:
                before = [*lines[:number], _end_line(lines[number])]
                return "".join([*before, match[1], line, *lines[number + 1 :]])
    return None


def _put_top(lines: list[str], line: str) -> str:
    """A new top-level key, before the first table."""
    tables = headers(lines)
    end = tables[0][0] if tables else len(lines)
    top = next((n + 1 for n in range(end) if re.match(r"version[ \t]*=", lines[n])), 0)
    return "".join([*lines[:top], line, *lines[top:]])


def _tables(path: KeyPath, tree: dict[str, Any]) -> list[str]:
    scalars = {key: value for key, value in tree.items() if not isinstance(value, dict)}
    written = []
    if scalars or not tree:
        written.append(f"\n[{as_key(path)}]\n")
        written += [f"{as_key((key,))} = {as_value(value)}\n" for key, value in scalars.items()]
    for key, value in tree.items():
        if isinstance(value, dict):
            written += _tables((*path, key), value)
    return written


def remove(text: str, path: KeyPath) -> str | None:
    """Remove the tables under `path` with their lines, and the lines of keys at or below it."""
    lines = text.splitlines(keepends=True)
    tables = headers(lines)
    deleted: set[int] = set()
    for position, (number, table) in enumerate(tables):
        if table[: len(path)] == path:
            end = tables[position + 1][0] if position + 1 < len(tables) else len(lines)
            deleted.update(range(number, _without_trailing_comments(lines, number, end)))
    deleted.update(number for number, here in key_lines(lines) if here[: len(path)] == path)
    return "".join(line for number, line in enumerate(lines) if number not in deleted) if deleted else None


def _without_trailing_comments(lines: list[str], start: int, end: int) -> int:
    """Comments right before the next header belong to that one."""
    while end > start + 1 and lines[end - 1].lstrip().startswith("#"):
        end -= 1
    return end


def _end_line(text: str) -> str:
    return text if not text or text.endswith("\n") else text + "\n"


def edit(text: str, mutate: Mutation, path: str, hint: str = "", *, beside_comments: bool = False) -> str:
    """`text` with the mutation applied, comments and order kept.

    With `beside_comments` a new key is added after the comment that shows it (``#key = ...``), if there is
    one. `ConfigError` names the file if it isn't TOML (with line and column) or can't be edited without
    changing something else; its hint is then `hint`, or else what to change manually.
    """
    old = parse_toml(text, path)
    new = mutated(old, mutate)
    changes = edits(old, new)
    if not changes:
        return text
    body = text.removeprefix(BYTE_ORDER_MARK)
    first = (_beside_comments,) if beside_comments else ()
    if all(len(change.path) == 1 and _is_new_line(change, old) for change in changes):
        first = (*first, _with_lines)  # tomlkit would add an empty line after it
    with_empty = (*changes, *_emptied(changes, new))
    ways = [(attempt, changes) for attempt in (*first, _with_tomlkit, _with_lines)]
    for attempt, desired in (*ways, (_with_lines, with_empty)):
        result = attempt(body, desired)
        if result is not None and _is(result, new):
            styled = _with_line_ends_of(body, result)
            accepted = styled if _is(styled, new) else result
            return text[: len(text) - len(body)] + accepted
    raise ConfigError(
        f"{path} can't be edited without changing other settings; it was not changed",
        hint=hint or f"in {path}, {', and '.join(map(_manually, changes))}; then run the same command again",
        code="toml-guard",
    )


def edit_or_remove(text: str, mutate: Mutation, path: str) -> str | None:
    """As `edit`; None if the mutation leaves nothing but a version, so that the file can be removed."""
    after = edit(text, mutate, path)
    return None if after != text and parse_toml(after, path).keys() <= {"version"} else after


@dataclass(frozen=True)
class Changes:
    """Mutations collected per file, then carried out at once."""

    mutations: dict[str, list[Mutation]] = field(default_factory=dict)

    def add(self, path: str, mutate: Mutation) -> None:
        """Change this file too."""
        self.mutations.setdefault(path, []).append(mutate)

    def texts(self, known: Mapping[str, str]) -> dict[str, str | None]:
        """New text of every file that changes; `known` has the present ones."""

        def mutate(tree: Tree, path: str) -> None:
            for mutation in self.mutations[path]:
                mutation(tree)

        return {path: edit(known.get(path, ""), partial(mutate, path=path), path) for path in self.mutations}


def _manually(change: Edit) -> str:
    """One change as an instruction for a person."""
    if isinstance(change, Remove):
        return f"remove {as_key(change.path)}"
    table = f"below [{as_key(change.path[:-1])}] " if change.path[:-1] else ""
    return f"{table}set {as_key(change.path[-1:])} = {_on_one_line(change.value)}"


def _on_one_line(value: Any) -> str:
    if not isinstance(value, dict):
        return as_value(value)
    return f"{{ {', '.join(f'{as_key((key,))} = {_on_one_line(inner)}' for key, inner in value.items())} }}"


def _is_new_line(change: Edit, old: Tree) -> bool:
    return isinstance(change, Set) and not isinstance(change.value, dict) and change.path[0] not in old


def _emptied(changes: Sequence[Edit], new: Tree) -> list[Edit]:
    """Tables that lost all keys: removed with their last header unless they get one of their own."""
    above = dict.fromkeys(change.path[:-1] for change in changes if isinstance(change, Remove))
    return [Set(path, {}) for path in above if path and dig(new, *path) == {}]


def _with_line_ends_of(text: str, result: str) -> str:
    """New lines end with CR LF if every other line does."""
    if "\n" not in text or re.search(r"(?<!\r)\n", text):
        return result
    return re.sub(r"(?<!\r)\n", "\r\n", result)


def document(tree: Tree, path: str, heading: str = "") -> str:
    """A new file with `tree`, after `heading` as comment lines."""
    start = "".join(f"# {line}\n" for line in heading.splitlines())
    return edit(start, lambda empty: empty.update(tree), path)


def _is(text: str, desired: Tree) -> bool:
    try:
        return same(toml(text), desired)
    except ValueError:
        return False


def _beside_comments(text: str, changes: Sequence[Edit]) -> str | None:
    """Add new keys after the comments that show them, and make all other changes with tomlkit."""
    left = []
    for change in changes:
        placed = None
        if not isinstance(change, Remove) and not isinstance(change.value, dict):
            line = f"{as_key(change.path[-1:])} = {as_value(change.value)}\n"
            placed = beside_comment(text, change.path, line)
        if placed is None or not _parses(placed):  # it doesn't if the key exists already
            left.append(change)
        else:
            text = placed
    if any(not isinstance(change, Remove) and isinstance(change.value, dict) for change in left):
        text = f"{text.rstrip()}\n\n" if text.strip() else text  # an empty line before a separate table
    return _with_tomlkit(text, left) if left else text


def _parses(text: str) -> bool:
    try:
        toml(text)
    except ValueError:
        return False
    return True


def _with_tomlkit(text: str, changes: Sequence[Edit]) -> str | None:
    """The changes made in a tomlkit document; None if tomlkit can't read or edit the file."""
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    indents = header_indents(text)
    try:
        parsed = tomlkit.parse(text)
        for change in changes:
            _apply(parsed, change, indents)
        return tomlkit.dumps(parsed)
    except (TOMLKitError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return None  # it raises any of these on valid files; the caller has an alternative


def _apply(parsed: Any, change: Edit, indents: dict[tuple[str, ...], str]) -> None:
    from tomlkit.items import Array, InlineTable

    here = parsed
    for key in change.path[:-1]:
        here = here[key]
    key = change.path[-1]
    if isinstance(change, Remove):
        del here[key]
    elif isinstance(here, InlineTable):
        spaced = here.as_string().endswith(" }")
        here[key] = change.value
        if spaced:
            here[key].trivia.trail = " "  # tomlkit drops the blank before the brace
    elif isinstance(change.value, dict):
        here[key] = table = _table(change.value)
        _indent(table, indent_for(change.path, indents), step(indents))
    elif isinstance(change.value, list) and isinstance(here.get(key), Array):
        _amend(here[key], change.value)
    else:
        here[key] = change.value


def _amend(array: Any, desired: list[Any]) -> None:
    """Remove and append elements one by one: a whole new array would lose the comments between them."""
    for element in [element for element in array.unwrap() if element not in desired]:
        array.remove(element)
    for element in desired:
        if element not in array.unwrap():
            array.append(element)


def _table(tree: Tree) -> Any:
    """A table with headers; one that has only tables needs none of its own."""
    import tomlkit

    table = tomlkit.table(
        is_super_table=bool(tree) and all(isinstance(value, dict) for value in tree.values())
    )
    for key, value in sorted(tree.items(), key=lambda pair: isinstance(pair[1], dict)):  # scalars first
        table[key] = _table(value) if isinstance(value, dict) else value
    return table


def _indent(table: Any, indent: str, step: str) -> None:
    """Indent a table that is already in its place like its neighbors; placing it changes indentation."""
    table.trivia.indent = indent
    deeper = indent if table.is_super_table() else indent + step
    for _, item in table.value.body:
        if hasattr(item, "is_super_table"):
            _indent(item, deeper, step)
        else:
            item.trivia.indent = indent + step


def _with_lines(text: str, changes: Sequence[Edit]) -> str | None:
    """The changes made as lines of text; None if that isn't possible."""
    result: str | None = text
    for change in changes:
        if result is None:
            return None
        if isinstance(change, Remove):
            result = remove(result, change.path)
        else:
            result = put(result, change.path, change.value)
    return result
