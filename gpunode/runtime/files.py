"""A change of files that no daemon has to read: lock, recover, plan, journal, write; back if it fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

from gpunode.dataclass import dataclass
from gpunode.errors import DaemonError, PreconditionError, RolledBackError
from gpunode.host import Host
from gpunode.journal import Entry, Journal, lock_path
from gpunode.result import Progress
from gpunode.runtime import units
from gpunode.runtime.apply import uninterrupted, write
from gpunode.runtime.engine import FileEdit
from gpunode.runtime.recovery import half_done, take_back

LOCK_SECONDS = 30.0


@dataclass(frozen=True)
class FilesChanged:
    """The edits that were planned, the journal entry that undoes them (empty if none), and what to tell."""

    edits: tuple[FileEdit, ...]
    journal: str = ""
    notes: tuple[str, ...] = ()


def change_files(
    host: Host,
    operation: str,
    plan: Callable[[], Sequence[FileEdit]],
    progress: Progress,
    *,
    context: Mapping[str, Any] | None = None,
    named_units: Sequence[str] = (),
    activate: Callable[[], None] = lambda: None,
    done: Callable[[], None] = lambda: None,
    dry_run: bool = False,
) -> FilesChanged:
    """Carry out what `plan` gives once the lock is held; with `dry_run` nothing is locked or written.

    `context` goes into the journal's manifest, where ``engine`` is empty: a rollback restores files only.
    Of `named_units` those are enabled whose files come, and those disabled whose files go.
    `activate` is called when the files are written: what it raises takes them back. `done` is called after
    success, still under the lock.
    `PreconditionError` for files that this user may not write; whatever fails while writing leaves all of
    them as they were.
    """
    journal = Journal.of(host)
    if not dry_run and host.live and not host.is_root:
        _require_rights(host, plan())
    with nullcontext() if dry_run else host.lock(lock_path(host), LOCK_SECONDS):
        notes = half_done(host, journal) if dry_run else take_back(host, "", journal, progress)
        edits = tuple(plan())
        changed = tuple(edit for edit in edits if edit.action != "unchanged")
        if dry_run or not changed:
            return FilesChanged(edits, "", notes)
        manifest = {"engine": "", "units": list(named_units), **(context or {})}
        written = _apply(host, journal, operation, changed, manifest, activate)
        done()
        return FilesChanged(edits, written, notes)


def _require_rights(host: Host, edits: Sequence[FileEdit]) -> None:
    """Before anything is locked or made: a user's own file is changed without root, the node's are not."""
    for edit in edits:
        if edit.action != "unchanged" and not host.writable(edit.path):
            raise PreconditionError(f"changing {edit.path} needs root", hint="run it again with sudo")


def _apply(
    host: Host,
    journal: Journal,
    operation: str,
    edits: Sequence[FileEdit],
    context: Mapping[str, Any],
    activate: Callable[[], None],
) -> str:
    entry: Entry | None = None
    try:
        entry = journal.begin(operation, edits, context)
        moves = units.forth(entry.units, edits)
        moves.prepare(host)
        for edit in edits:
            write(host, edit, edit.after, edit.before)
        moves.settle(host)
        activate()
        with uninterrupted():
            journal.mark(entry, "committed")
            journal.prune()
    except BaseException as error:
        if entry is not None:
            with uninterrupted():
                _take_back(host, journal, entry, error)
        raise
    return entry.id


def _take_back(host: Host, journal: Journal, entry: Entry, error: BaseException) -> None:
    moves = units.back(entry)
    moves.prepare(host)
    journal.restore(entry)
    with suppress(DaemonError):  # the same systemd has just said so, or nobody has touched its units
        moves.settle(host)
    journal.mark(entry, "rolled-back")
    if isinstance(error, DaemonError):
        hint = f"look at it: systemctl status {' '.join(entry.units)}" if entry.units else error.hint
        raise RolledBackError(f"{error}; the files are as before", hint=hint) from error
