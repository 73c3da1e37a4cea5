"""The TOML guard: the only place that writes TOML.

tomlkit 0.13 to 0.15 moves keys between tables on some valid files (dotted keys beside headers, children
before their parents) without an error. So the change is made twice, on the plain tree and on the document;
the document is dumped, parsed again by tomllib and compared. If it differs, the change is tried as plain
lines of text, compared again; if that differs too, the file is refused and left alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gpunode.errors import ConfigError
from gpunode.facts.containerd import BYTE_ORDER_MARK, dig, parse_toml
from gpunode.runtime import toml_lines
from gpunode.runtime.trees import Edit, Mutation, Remove, Set, Tree, edits, mutated, same


def edit(text: str, mutate: Mutation, path: str, hint: str = "", *, beside_comments: bool = False) -> str:
    """`text` with the mutation applied, comments and order kept.

    With `beside_comments` a new key goes behind the comment that shows it (``#key = ...``), if there is one.
    `ConfigError` names the file if it isn't TOML (with line and column) or can't be edited without changing
    something else; `hint` then says what to do instead.
    """
    old = parse_toml(text, path)
    new = mutated(old, mutate)
    changes = edits(old, new)
    if not changes:
        return text
    body = text.removeprefix(BYTE_ORDER_MARK)
    first = (_beside_comments,) if beside_comments else ()
    if all(len(change.path) == 1 and _is_new_line(change, old) for change in changes):
        first = (*first, _with_lines)  # tomlkit would put an empty line behind it
    with_empty = (*changes, *_emptied(changes, new))
    ways = [(attempt, changes) for attempt in (*first, _with_tomlkit, _with_lines)]
    for attempt, wanted in (*ways, (_with_lines, with_empty)):
        result = attempt(body, wanted)
        if result is not None and _is(result, new):
            styled = _with_line_ends_of(body, result)
            kept = styled if _is(styled, new) else result
            return text[: len(text) - len(body)] + kept
    raise ConfigError(
        f"{path} can't be edited without changing something else in it; it was left alone",
        hint=hint or "make the change by hand: gpunode configure-runtime --dry-run shows what belongs there",
        code="toml-guard",
    )


def _is_new_line(change: Edit, old: Tree) -> bool:
    return isinstance(change, Set) and not isinstance(change.value, dict) and change.path[0] not in old


def _emptied(changes: Sequence[Edit], new: Tree) -> list[Edit]:
    """Tables that lost all they had: they go with their last header unless they get one of their own."""
    above = dict.fromkeys(change.path[:-1] for change in changes if isinstance(change, Remove))
    return [Set(path, {}) for path in above if path and dig(new, *path) == {}]


def _with_line_ends_of(text: str, result: str) -> str:
    """New lines end as all the others do where every line ends with CR LF."""
    if "\n" not in text or re.search(r"(?<!\r)\n", text):
        return result
    return re.sub(r"(?<!\r)\n", "\r\n", result)


def document(tree: Tree, path: str, heading: str = "") -> str:
    """A new file that holds `tree`, after `heading` as comment lines."""
    start = "".join(f"# {line}\n" for line in heading.splitlines())
    return edit(start, lambda empty: empty.update(tree), path)


def _is(text: str, wanted: Tree) -> bool:
    import tomllib

    try:
        return same(tomllib.loads(text), wanted)
    except tomllib.TOMLDecodeError:
        return False


def _beside_comments(text: str, changes: Sequence[Edit]) -> str | None:
    """New keys put behind the comments that show them, and everything else by tomlkit."""
    import tomlkit

    left = []
    for change in changes:
        placed = None
        if not isinstance(change, Remove) and not isinstance(change.value, dict):
            name = toml_lines.dotted(change.path[-1:])
            line = f"{name} = {tomlkit.item(change.value).as_string()}\n"
            placed = toml_lines.beside_comment(text, change.path, line)
        if placed is None or not _parses(placed):  # it doesn't where the key is there already
            left.append(change)
        else:
            text = placed
    if any(not isinstance(change, Remove) and isinstance(change.value, dict) for change in left):
        text = f"{text.rstrip()}\n\n" if text.strip() else text  # an empty line before a table of one's own
    return _with_tomlkit(text, left) if left else text


def _parses(text: str) -> bool:
    import tomllib

    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return True


def _with_tomlkit(text: str, changes: Sequence[Edit]) -> str | None:
    """The changes made in a tomlkit document; None where tomlkit can't read the file or loses its way."""
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    indents = toml_lines.header_indents(text)
    try:
        parsed = tomlkit.parse(text)
        for change in changes:
            _apply(parsed, change, indents)
        return tomlkit.dumps(parsed)
    except (TOMLKitError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return None  # it fails with any of these on valid files; the caller has another way


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
            here[key].trivia.trail = " "  # tomlkit forgets the blank before the brace
    elif isinstance(change.value, dict):
        here[key] = table = _table(change.value)
        _indent(table, toml_lines.indent_for(change.path, indents), toml_lines.step(indents))
    elif isinstance(change.value, list) and isinstance(here.get(key), Array):
        _amend(here[key], change.value)
    else:
        here[key] = change.value


def _amend(array: Any, wanted: list[Any]) -> None:
    """Take out and append elements one by one: a whole new array would lose the comments between them."""
    for one in [one for one in array.unwrap() if one not in wanted]:
        array.remove(one)
    for one in wanted:
        if one not in array.unwrap():
            array.append(one)


def _table(tree: Tree) -> Any:
    """A table with headers; one that holds only tables needs none of its own."""
    import tomlkit

    table = tomlkit.table(
        is_super_table=bool(tree) and all(isinstance(value, dict) for value in tree.values())
    )
    for key, value in sorted(tree.items(), key=lambda pair: isinstance(pair[1], dict)):  # scalars first
        table[key] = _table(value) if isinstance(value, dict) else value
    return table


def _indent(table: Any, indent: str, step: str) -> None:
    """Indent a table that is in its place already like its neighbours; placing it changes indentation."""
    table.trivia.indent = indent
    deeper = indent if table.is_super_table() else indent + step
    for _, item in table.value.body:
        if hasattr(item, "is_super_table"):
            _indent(item, deeper, step)
        else:
            item.trivia.indent = indent + step


def _with_lines(text: str, changes: Sequence[Edit]) -> str | None:
    """The changes made as lines of text; None where they can't be expressed so."""
    import tomlkit

    result: str | None = text
    for change in changes:
        if result is None:
            return None
        if isinstance(change, Remove):
            result = toml_lines.remove(result, change.path)
        else:
            result = toml_lines.put(
                result, change.path, change.value, lambda v: str(tomlkit.item(v).as_string())
            )
    return result
