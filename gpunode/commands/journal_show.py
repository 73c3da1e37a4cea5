"""`gpunode journal show [ID]`: one change, file by file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpunode.commands.journal_list import EntryLine, line, load
from gpunode.errors import ConfigError, GpunodeError, UsageError
from gpunode.host import Host
from gpunode.host.journal import LIST_HINT, Entry, Journal, digest
from gpunode.output.result import Block, Diff, Progress, Result, Style, Table, Text
from gpunode.runtime.engine import FileEdit

# what a person wants to know of a manifest, and how it is called
_FACTS = (
    ("config", "configuration"), ("runtimes", "runtimes"), ("runtime", "runtimes"), ("settings", "settings"),
    ("previousDefault", "default before"), ("verb", "the engine was told to"), ("units", "systemd units"),
    ("restartCommand", "restart command"), ("socket", "socket"),
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """`id` empty is the last entry."""

    id: str = ""


@dataclass(frozen=True)
class JournalFile:
    """One file of an entry. `now` is ours, before, changed or unreadable: what it holds at present.

    `action` is created, updated or removed; `diff` is empty where either side isn't known any more, and
    `problem` then says why.
    """

    path: str
    action: str
    now: str
    diff: str
    problem: str


@dataclass(frozen=True)
class JournalEntry:
    """`data` of the envelope; `details` are the manifest's own facts as the operation wrote them."""

    entry: EntryLine
    files: tuple[JournalFile, ...]
    details: Mapping[str, Any]


def run(host: Host, options: Options, progress: Progress) -> Result:
    """Show one entry; kind JournalEntry. `UsageError` for one that isn't there."""
    journal, entries = load(host)
    entry = _chosen(journal, entries, options.id)
    files = tuple(_file(host, journal, entry, file, entries) for file in entry.files)
    details = {key: value for key, value in entry.manifest.items() if key != "files"}
    data = JournalEntry(line(journal, entry), files, details)
    return Result("JournalEntry", data, blocks=_blocks(data))


def _chosen(journal: Journal, entries: Sequence[Entry], name: str) -> Entry:
    found = [entry for entry in entries if entry.id == name] if name else list(entries[-1:])
    if not found:
        raise UsageError(
            f"no such journal entry: {name}" if name else f"the journal has no entries: {journal.directory}",
            hint="list them: gpunode journal list" if entries else journal.elsewhere() or LIST_HINT,
        )
    return found[0]


def _file(
    host: Host, journal: Journal, entry: Entry, file: Mapping[str, Any], entries: Sequence[Entry]
) -> JournalFile:
    path = str(file["path"])
    action = "removed" if not file["after"] else "updated" if file["existed"] else "created"
    try:
        present = host.read_bytes(path)
    except GpunodeError as error:
        return JournalFile(path, action, "unreadable", "", error.message)
    current = digest(present)
    now = "ours" if current == file["after"] else "before" if current == file["before"] else "changed"
    try:
        before = journal.original(entry, file)
        after = present if now == "ours" else _written(journal, entry, file, entries)
    except ConfigError as error:
        return JournalFile(path, action, now, "", error.message)
    if digest(after) != file["after"]:
        return JournalFile(
            path, action, now, "", "what was written then is not kept, and the file has changed"
        )
    return JournalFile(path, action, now, FileEdit(path, before, after).diff(), "")


def _written(
    journal: Journal, entry: Entry, file: Mapping[str, Any], entries: Sequence[Entry]
) -> bytes | None:
    """What this entry had written, from the copy that a later entry made of it; None if there is none."""
    for later in entries:
        for other in later.files if later.sequence > entry.sequence else ():
            if other["path"] == file["path"] and other["before"] == file["after"]:
                return journal.original(later, other)
    return None


def _blocks(data: JournalEntry) -> tuple[Block, ...]:
    one = data.entry
    rows = [("operation", one.operation), ("when", one.when), ("state", one.state)]
    rows += [("engine", one.engine)] if one.engine else []
    for key, name in _FACTS:
        value = data.details.get(key)
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        if isinstance(shown, str) and shown not in ("", "none", "wait"):
            rows.append((name, shown))
    rows.append(("can be rolled back", "yes" if one.rollback else f"no: {one.reason}"))
    blocks: list[Block] = [Text(one.id, Style.HEADING), Table(("", ""), tuple(rows))]
    for file in data.files:
        state = {"before": "is as before again", "changed": "has changed since"}.get(file.now, "")
        blocks.append(Text(f"{file.path} {file.action}{f'; it {state}' if state else ''}", Style.HEADING))
        blocks.append(
            Diff(file.diff) if file.diff else Text(f"  {file.problem or 'no difference'}", Style.DIM)
        )
    return tuple(blocks)
