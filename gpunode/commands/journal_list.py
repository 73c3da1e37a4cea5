"""`gpunode journal list`: what gpunode changed on this node, and what of it can be taken back now."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpunode.errors import GpunodeError, PreconditionError, Unreadable
from gpunode.host import Host
from gpunode.host.journal import OPEN_STATES, Entry, Journal
from gpunode.output.result import Cell, Progress, Result, Style, Table, Text
from gpunode.runtime.apply import past

_NAME = re.compile(r"(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)(\d\d)Z-")


@dataclass(frozen=True)
class Options:
    """There are none."""


@dataclass(frozen=True)
class EntryLine:
    """One entry. `when` is UTC; `engine` is empty for a change that no engine reads.

    `rollback` is whether `gpunode rollback ID` would work now, `reason` why not.
    """

    id: str
    when: str
    operation: str
    engine: str
    state: str
    files: tuple[str, ...]
    rollback: bool
    reason: str


@dataclass(frozen=True)
class JournalList:
    """`data` of the envelope: the entries, oldest first, and directories that hold no readable manifest."""

    directory: str
    entries: tuple[EntryLine, ...]
    damaged: tuple[str, ...]


def run(host: Host, options: Options, progress: Progress) -> Result:
    """List the journal; kind Journal. `PreconditionError` if this user may not read it."""
    journal, entries = load(host)
    lines = tuple(line(journal, entry) for entry in entries)
    known = {entry.id for entry in entries}
    damaged = tuple(name for name in host.listdir(journal.directory) if name not in known)
    data = JournalList(journal.directory, lines, damaged)
    notes = tuple(
        f"{journal.directory}/{name} is no journal entry, or its manifest is damaged" for name in damaged
    )
    if not lines and journal.elsewhere():
        notes = (*notes, journal.elsewhere())
    return Result("Journal", data, messages=notes, blocks=(_block(lines, journal.directory),))


def load(host: Host) -> tuple[Journal, tuple[Entry, ...]]:
    """The journal and all its entries, oldest first."""
    journal = Journal.of(host)
    try:
        return journal, journal.entries()
    except Unreadable as error:
        raise PreconditionError(
            f"only root may read the journal: {error.message}", hint="run it again with sudo"
        ) from error


def line(journal: Journal, entry: Entry) -> EntryLine:
    """What the list shows of an entry."""
    reason = obstacle(journal, entry)
    return EntryLine(
        id=entry.id,
        when=when(entry.id),
        operation=str(entry.manifest.get("operation", "")),
        engine=str(entry.manifest.get("manager") or entry.manifest.get("engine") or ""),
        state=entry.state,
        files=tuple(str(file["path"]) for file in entry.files),
        rollback=not reason,
        reason=reason,
    )


def when(name: str) -> str:
    """The time in an entry's name as ISO 8601; empty for a name that bears none."""
    found = _NAME.match(name)
    return "{}-{}-{}T{}:{}:{}Z".format(*found.groups()) if found else ""


def obstacle(journal: Journal, entry: Entry) -> str:
    """Why `gpunode rollback` would refuse this entry now; empty if it wouldn't."""
    if entry.of_packages:
        return "it changed packages: their own command takes it back"
    if not entry.undoable:
        return "a rollback is not rolled back"
    if entry.state in OPEN_STATES:
        return "it runs now, or was killed half-way: the next run takes it back"
    if entry.state != "committed":
        return "it is rolled back already" if entry.state == "rolled-back" else f"it is {entry.state}"
    try:
        past(journal.host, journal, entry)
    except GpunodeError as error:
        return error.message.removesuffix("; nothing was restored")
    return ""


def _block(lines: tuple[EntryLine, ...], directory: str) -> Text | Table:
    if not lines:
        return Text(f"nothing was changed yet: {directory} has no entries")
    rows = tuple(
        (
            one.id,  # which tells when and what
            one.engine or "-",
            ", ".join(one.files),
            Cell("yes", Style.GOOD) if one.rollback else Cell(f"no: {one.reason}", Style.DIM),
        )
        for one in lines
    )
    return Table(("ID", "ENGINE", "FILES", "ROLLBACK"), rows)
