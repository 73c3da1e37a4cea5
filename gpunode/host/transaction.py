"""A change of files as a transaction: lock, recover, journal, write, act, commit; or everything as before.

Whoever changes files plans them as `FileEdit`s, and gives what else belongs to the change as functions: what
acts on the new files, and what brings a daemon back to the old ones.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from gpunode.errors import (
    ConfigError,
    DaemonError,
    GpunodeError,
    PreconditionError,
    RolledBackError,
    Unreadable,
)
from gpunode.host import Host
from gpunode.host.journal import Entry, FileEdit, Journal, lock_path

LOCK_SECONDS = 30.0
_SYSTEMCTL_SECONDS = 60.0
# takes the lock that whoever installs it holds, and has nothing to do before the next boot
_NOT_NOW = frozenset({"gpunode-mig.service"})

_Outcome = TypeVar("_Outcome")
BringBack = Callable[[Entry], str | None]
"""Lets a daemon read an entry's files once they are restored; gives what is wrong with it then."""


@contextmanager
def uninterrupted(tell: Callable[[str], None] = lambda _name: None) -> Iterator[None]:
    """Ignore Ctrl-C, SIGTERM and SIGHUP: an incomplete rollback is worse than none, and the command ends
    after it anyway.

    `tell` is called with the signal's name at once.
    """
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # not SIG_IGN: a daemon that a child starts now would inherit that, and ignore SIGTERM as well
    before = {one: signal.signal(one, lambda number, _: tell(signal.Signals(number).name)) for one in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def attempt(
    do: Callable[[], _Outcome],
    undo: Callable[[BaseException], None],
    shield: Callable[[], AbstractContextManager[None]] = uninterrupted,
) -> _Outcome:
    """What `do` gives. If it fails or is interrupted, `undo` runs to its end before the error goes on.

    What `undo` raises takes the error's place. `shield` lets signals wait meanwhile.
    """
    try:
        return do()
    except BaseException as error:
        with shield():
            undo(error)
        raise


@dataclass(frozen=True)
class UnitChanges:
    """What a change of files means for systemd units: those to enable, to disable, and only to read again."""

    enable: tuple[str, ...] = ()
    disable: tuple[str, ...] = ()
    read: tuple[str, ...] = ()

    @classmethod
    def of_edits(cls, units: Sequence[str], edits: Iterable[FileEdit]) -> UnitChanges:
        """For those units that have their files among the edits."""
        stays = {edit.path.rpartition("/")[2]: edit.after is not None for edit in edits}
        return cls(
            enable=tuple(unit for unit in units if stays.get(unit) is True),
            disable=tuple(unit for unit in units if stays.get(unit) is False),
        )

    @classmethod
    def of_restoring(cls, entry: Entry) -> UnitChanges:
        """When an entry's files are restored; a change of a unit that was there has enabled nothing."""
        files = {file["path"].rpartition("/")[2]: file for file in entry.files}
        known = [unit for unit in entry.units if unit in files]
        return cls(
            enable=tuple(unit for unit in known if not files[unit]["after"]),
            disable=tuple(unit for unit in known if not files[unit]["existed"]),
            read=tuple(unit for unit in known if files[unit]["existed"] and files[unit]["after"]),
        )

    def before_files(self, host: Host) -> None:
        """A unit can be stopped and disabled only while its file is there; one that isn't enabled is fine."""
        if self.disable and _acts(host):
            host.run(("systemctl", "disable", "--now", *self.disable), timeout=_SYSTEMCTL_SECONDS)

    def after_files(self, host: Host) -> None:
        """`DaemonError` if systemd refuses a unit that is to be enabled."""
        if not _acts(host) or not (self.enable or self.disable or self.read):
            return
        commands: list[tuple[str, ...]] = [("systemctl", "daemon-reload")]
        now = tuple(unit for unit in self.enable if unit not in _NOT_NOW)
        later = tuple(unit for unit in self.enable if unit in _NOT_NOW)
        commands += [("systemctl", "enable", "--now", *now)] if now else []
        commands += [("systemctl", "enable", *later)] if later else []
        for argv in commands:
            answer = host.run(argv, timeout=_SYSTEMCTL_SECONDS)
            if not answer.ok and self.enable:
                said = (answer.stderr or answer.stdout).strip()[-500:]
                raise DaemonError(
                    f"{' '.join(argv)} failed: {said or f'status {answer.code}'}",
                    hint=f"look at them: systemctl status {' '.join(self.enable)}",
                )


def _acts(host: Host) -> bool:
    return host.live and host.systemd_runs()


def write(host: Host, edit: FileEdit, content: bytes | None, expect: bytes | None) -> None:
    """Give an edit's file this content (None: remove it). `ConfigError` if it no longer holds `expect`."""
    if content is None:
        if host.read_bytes(edit.path) != expect:
            raise ConfigError(
                f"{edit.path} changed while gpunode was working on it; it was left alone",
                hint="run the same command again",
            )
        host.remove(edit.path)
        return
    host.make_dirs(edit.path.rpartition("/")[0] or "/")
    host.write_atomic(edit.path, content, expect=expect or b"", above=True)


@dataclass(frozen=True)
class Restored:
    """What came of restoring an entry: what is wrong with the daemon and with systemd's units, in words, and
    the files that somebody else had changed, which were left alone."""

    daemon: str
    units: str
    foreign: tuple[str, ...]


def restore(journal: Journal, entry: Entry, bring_back: BringBack, state: str = "rolled-back") -> Restored:
    """Put an entry's files and units back, then its daemon; the entry has this `state` from then on."""
    host, trouble = journal.host, ""
    with uninterrupted():
        foreign = journal.foreign(entry)
        units = UnitChanges.of_restoring(entry)
        units.before_files(host)
        journal.restore(entry)
        daemon = bring_back(entry) or ""
        try:
            units.after_files(host)
        except DaemonError as error:
            trouble = error.message
        journal.mark(entry, state)
    return Restored(daemon, trouble, foreign)


class Transaction:
    """One change and its journal entry, under the lock that `begin` has taken.

    A change without files has no entry before `open`. `restored` is what came of going back, None unless it
    did. With `stays` the entry counts as committed even then, because something else than files is left.
    """

    def __init__(
        self,
        journal: Journal,
        operation: str,
        edits: Sequence[FileEdit],
        context: Mapping[str, Any],
        bring_back: BringBack = lambda _entry: None,
    ) -> None:
        self.journal, self.operation, self.edits, self.context = journal, operation, edits, context
        self.entry: Entry | None = None
        self.restored: Restored | None = None
        self.stays = False
        self._acted = False
        self._bring_back = bring_back

    def open(self) -> Entry:
        """The entry, which is on disk from then on."""
        if self.entry is None:
            self.entry = self.journal.begin(self.operation, self.edits, self.context)
        return self.entry

    def run(self, act: Callable[[], _Outcome]) -> _Outcome:
        """Write the files, `act` on them, commit. What fails, or an interruption, restores the files."""
        return attempt(lambda: self._forward(act), self._back)

    def _forward(self, act: Callable[[], _Outcome]) -> _Outcome:
        host = self.journal.host
        if self.edits:
            units = UnitChanges.of_edits(self.open().units, self.edits)
            units.before_files(host)
            for edit in self.edits:
                write(host, edit, edit.after if edit.interim is None else edit.interim, edit.before)
            self.entry = self.journal.mark(self.open(), "applied")
            units.after_files(host)
        outcome = act()
        self._acted = True
        for edit in self.edits:
            if edit.interim is not None:
                write(host, edit, edit.after, edit.interim)
        if self.entry is not None:
            with uninterrupted():  # from here on it is done, and what says 130 has been rolled back
                self.journal.mark(self.entry, "committed")
                self.journal.prune()
        return outcome

    def _back(self, _error: BaseException) -> None:
        if self._acted and self.context.get("stays"):
            return  # the packages are installed: the next run finds the open entry and commits it
        if self.entry is not None:
            state = "committed" if self.stays else "rolled-back"
            self.restored = restore(self.journal, self.entry, self._bring_back, state)


# Before a change: the lock, and what a run that was killed has left.


@contextmanager
def begin(
    host: Host, bring_back: BringBack, *, dry_run: bool = False
) -> Iterator[tuple[Journal, tuple[str, ...]]]:
    """The journal, under the lock, once what a killed run left is taken back; with notes for a person.

    A dry run takes no lock and only has the notes.
    """
    journal = Journal.of(host)
    if dry_run:
        yield journal, half_done(host, journal)
        return
    with host.lock(lock_path(host), LOCK_SECONDS):
        yield journal, recover(host, journal, bring_back)


def recover(host: Host, journal: Journal, bring_back: BringBack) -> tuple[str, ...]:
    """Undo what a killed process left half done; gives what a person should know. Needs the lock."""
    notes = _without_leftovers(host, journal)
    for entry in journal.unfinished():
        killed = f"an earlier run was killed half-way ({entry.id})"
        if entry.stays:
            journal.mark(entry, "committed")
            notes.append(f"{killed}; {_packages_stay(entry)}")
            continue
        restored = restore(journal, entry, bring_back)
        notes.append(f"{killed}; what it had written was taken back")
        notes += [restored.units] if restored.units else []
        notes += [f"{path} was changed since and was left alone" for path in restored.foreign]
    return tuple(notes)


def _without_leftovers(host: Host, journal: Journal) -> list[str]:
    """Remove temporary files of killed runs. Those of earlier releases are beside the configuration file,
    where CRI-O reads them, and an entry that was rolled back since may have one."""
    removed: list[str] = []
    for path in sorted({str(file["path"]) for entry in journal.entries() for file in entry.files}):
        with suppress(GpunodeError):  # an unreadable directory must not stop the recovery
            removed += host.remove_leftovers(path)
    return [f"{path}, the temporary file of a killed run, was removed" for path in removed]


def half_done(host: Host, journal: Journal) -> tuple[str, ...]:
    """What a dry run says of an operation that has begun and not ended; nothing if it may not look."""
    try:
        found = journal.unfinished()
    except Unreadable:
        return ()
    return tuple(
        f"{entry.id} runs now or was killed half-way; if so, "
        + (_packages_stay(entry) if entry.stays else f"the next run first takes back {_written(entry)}")
        for entry in found
    )


def _packages_stay(entry: Entry) -> str:
    """What a person does about packages of a run that was killed."""
    verb = str(entry.manifest.get("operation", "")).replace("-", " ", 1)
    return f"what it installed stays, and gpunode {verb} goes on from there"


def _written(entry: Entry) -> str:
    return "what it wrote to " + ", ".join(str(file["path"]) for file in entry.files)


# A whole change of files that no daemon has to read.


@dataclass(frozen=True)
class FilesChanged:
    """The edits that were planned, the journal entry that undoes them (empty if none), and notes."""

    edits: tuple[FileEdit, ...]
    journal: str = ""
    notes: tuple[str, ...] = ()


def change_files(
    host: Host,
    operation: str,
    plan: Callable[[], Sequence[FileEdit]],
    bring_back: BringBack,
    *,
    context: Mapping[str, Any] | None = None,
    named_units: Sequence[str] = (),
    activate: Callable[[], None] = lambda: None,
    done: Callable[[], None] = lambda: None,
    dry_run: bool = False,
) -> FilesChanged:
    """Carry out what `plan` gives once the lock is held; with `dry_run` nothing is locked or written.

    `bring_back` is for a killed run of another command. `context` goes into the journal's manifest, where
    ``engine`` is empty: a rollback restores files only.
    Of `named_units` those are enabled that get a file, and those disabled that lose theirs.
    `activate` is called when the files are written: what it raises takes them back. `done` is called after
    success, still under the lock.
    `PreconditionError` for files that this user may not write; whatever fails while writing leaves all of
    them as they were.
    """
    if not dry_run and host.live and not host.is_root:
        _require_rights(host, plan())
    with begin(host, bring_back, dry_run=dry_run) as (journal, notes):
        edits = tuple(plan())
        changed = tuple(edit for edit in edits if edit.action != "unchanged")
        if dry_run or not changed:
            return FilesChanged(edits, "", notes)
        manifest = {"engine": "", "units": list(named_units), **(context or {})}
        change = Transaction(journal, operation, changed, manifest)
        try:
            change.run(activate)
        except DaemonError as error:
            units = " ".join(named_units)
            hint = f"look at it: systemctl status {units}" if units else error.hint
            raise RolledBackError(f"{error}; the files are as before", hint=hint) from error
        done()
        return FilesChanged(edits, change.open().id, notes)


def _require_rights(host: Host, edits: Sequence[FileEdit]) -> None:
    """Before anything is locked or made: a user's own file is changed without root, the node's are not."""
    for edit in edits:
        if edit.action != "unchanged" and not host.writable(edit.path):
            raise PreconditionError(f"changing {edit.path} needs root", hint="run it again with sudo")
