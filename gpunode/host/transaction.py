"""A change of files as a transaction: lock, recover, journal, write, act, commit; or roll back everything."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple, TypeVar

from gpunode.errors import (
    ConfigError,
    DaemonError,
    GpunodeError,
    NotRestoredError,
    PreconditionError,
    RolledBackError,
    Unreadable,
)
from gpunode.host import Host
from gpunode.host.journal import OPEN_STATES, Entry, FileEdit, Journal, lock_path, rollback_command
from gpunode.host.process import SIGNALS, signal_handlers
from gpunode.output.result import Change

LOCK_SECONDS = 30.0
_SYSTEMCTL_SECONDS = 60.0
# must be called under the lock that the installing command holds, and has nothing to do before the next boot
_NOT_NOW = frozenset({"gpunode-mig.service"})

_Outcome = TypeVar("_Outcome")
Restart = Callable[[Entry], None]
"""Lets the daemon of an entry read its restored files; `GpunodeError` if the daemon doesn't run with them."""


@contextmanager
def uninterrupted(report: Callable[[str], None] = lambda _name: None) -> Iterator[None]:
    """Ignore Ctrl-C, SIGTERM and SIGHUP: an incomplete rollback is worse than none, and the command ends
    after it anyway.

    `report` is called with the signal's name at once.
    """
    # not SIG_IGN: a daemon that a child starts now would inherit that, and ignore SIGTERM as well
    with signal_handlers(
        {number: lambda number, _: report(signal.Signals(number).name) for number in SIGNALS}
    ):
        yield


def attempt(
    do: Callable[[], _Outcome],
    undo: Callable[[BaseException], None],
    shield: Callable[[], AbstractContextManager[None]] = uninterrupted,
) -> _Outcome:
    """Return what `do` returns. If it fails or is interrupted, run `undo` to its end, then raise the error.

    What `undo` raises replaces the error. `shield` ignores signals during `undo`; those that come between the
    error and the shield are ignored as well, so a second Ctrl-C can't prevent the undo. If `do` catches an
    interruption and goes on, the next signal interrupts it again.
    """
    undoing = False
    interruption: BaseException | None = None

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interruption
        if undoing or (interruption is not None and _is_handled(interruption)):
            return
        try:
            previous[signal.Signals(number)](number, frame)
        except BaseException as error:
            interruption = error
            raise

    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    previous = {number: handler for number, handler in handlers.items() if callable(handler)}
    with signal_handlers(dict.fromkeys(previous, interrupt)):
        try:
            return do()
        except BaseException as error:
            undoing = True
            with shield():
                undo(error)
            raise


def _is_handled(interruption: BaseException) -> bool:
    """Whether an ``except`` or ``finally`` that this exception reached is running now."""
    error = sys.exc_info()[1]
    while error is not None and error is not interruption:
        error = error.__context__
    return error is not None


@dataclass(frozen=True)
class UnitChanges:
    """Effects of a change of files on systemd units: those to enable, to disable, and only to reload."""

    enable: tuple[str, ...] = ()
    disable: tuple[str, ...] = ()
    read: tuple[str, ...] = ()

    @classmethod
    def of_edits(cls, units: Sequence[str], edits: Iterable[FileEdit]) -> UnitChanges:
        """For the units that have their files among the edits."""
        stays = {edit.path.rpartition("/")[2]: edit.after is not None for edit in edits}
        return cls(
            enable=tuple(unit for unit in units if stays.get(unit) is True),
            disable=tuple(unit for unit in units if stays.get(unit) is False),
        )

    @classmethod
    def of_undo(cls, entry: Entry) -> UnitChanges:
        """When an entry's files are restored. Units of which the state before isn't known were enabled;
        `restore_unit_states` does the rest for the others."""
        files = {file.path.rpartition("/")[2]: file for file in entry.files}
        units = [unit for unit in entry.units if unit in files]
        enable = tuple(unit for unit in units if not files[unit].after and unit not in entry.units_before)
        return cls(
            enable=enable,
            disable=tuple(unit for unit in units if not files[unit].existed),
            read=tuple(unit for unit in units if files[unit].existed and unit not in enable),
        )

    def before_files(self, host: Host) -> None:
        """systemctl can stop and disable a unit only while its file exists; a unit that isn't enabled is
        fine."""
        if self.disable and _acts(host):
            host.run(("systemctl", "disable", "--now", *self.disable), timeout=_SYSTEMCTL_SECONDS)

    def after_files(self, host: Host) -> None:
        """`DaemonError` if systemd refuses a unit that is to be enabled."""
        if not _acts(host) or not (self.enable or self.disable or self.read):
            return
        commands: list[tuple[str, ...]] = [("daemon-reload",)]
        now = tuple(unit for unit in self.enable if unit not in _NOT_NOW)
        later = tuple(unit for unit in self.enable if unit in _NOT_NOW)
        commands += [("enable", "--now", *now)] if now else []
        commands += [("enable", *later)] if later else []
        for command in commands:
            try:
                systemctl(host, *command)
            except DaemonError:
                if self.enable:
                    raise


def unit_states(host: Host, units: Iterable[str]) -> dict[str, tuple[str, str]]:
    """What ``systemctl is-enabled`` and ``is-active`` report, by unit; {} where systemd doesn't run."""

    def state(verb: str, unit: str) -> str:
        return host.run(("systemctl", verb, unit), timeout=_SYSTEMCTL_SECONDS).stdout.strip()

    states = {unit: (state("is-enabled", unit), state("is-active", unit)) for unit in units if _acts(host)}
    return {unit: words for unit, words in states.items() if all(words)}


def restore_unit_states(host: Host, states: Mapping[str, Sequence[str]]) -> None:
    """Enable or disable, start or stop each unit, so that it is as `unit_states` found it. `DaemonError` if
    systemd refuses."""
    for unit, (enabled, active) in states.items():
        if enabled in ("enabled", "enabled-runtime", "disabled"):  # others, such as static, are not changed
            systemctl(host, "disable" if enabled == "disabled" else "enable", unit)
        if active not in ("active", "reloading", "activating", "refreshing"):
            systemctl(host, "stop", unit)
        elif unit not in _NOT_NOW:
            # the run of a oneshot service may take longer than our time limit
            systemctl(host, "start", *(("--no-block",) if active == "activating" else ()), unit)


def systemctl(host: Host, *arguments: str) -> None:
    """Run systemctl. `DaemonError` with its output if it fails."""
    answer = host.run(("systemctl", *arguments), timeout=_SYSTEMCTL_SECONDS)
    if not answer.ok:
        output = (answer.stderr or answer.stdout).strip()[-500:] or f"status {answer.code}"
        units = [word for word in arguments[1:] if not word.startswith("-")]
        raise DaemonError(
            f"systemctl {' '.join(arguments)} failed: {output}",
            hint=f"see why: {' '.join(('systemctl status', *units))}",
        )


def _acts(host: Host) -> bool:
    return host.live and host.systemd_runs()


def write(host: Host, edit: FileEdit, content: bytes | None, expect: bytes | None) -> None:
    """Write this content to an edit's file (None: remove it). `ConfigError` if it no longer has `expect`."""
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


class RollbackReport(NamedTuple):
    """What the rollback of an entry could not restore.

    An error by path for each file that another program changed, which is left unchanged; and the errors of
    systemd's units and of the daemon.
    """

    foreign: Mapping[str, ConfigError]
    units: GpunodeError | None
    daemon: GpunodeError | None

    @property
    def problems(self) -> tuple[GpunodeError, ...]:
        """Everything that wasn't restored."""
        return (*self.foreign.values(), *filter(None, (self.daemon, self.units)))


def roll_back_entry(
    journal: Journal, entry: Entry, restart: Restart, state: str = "rolled-back"
) -> RollbackReport:
    """Restore an entry's files and units, then restart its daemon; `state` is the entry's state afterwards.

    `ConfigError`, before anything is changed, if a copy is damaged.
    """
    host = journal.host
    journal.plan_undo((entry,), recovery=True)
    with uninterrupted():
        if entry.state not in OPEN_STATES:
            entry = journal.mark(entry, "applied")  # if this run is killed, the next one continues
        units = UnitChanges.of_undo(entry)
        units.before_files(host)
        foreign = {path: _foreign_error(entry, path) for path in journal.restore_files(entry)}
        daemon = _error_of(lambda: restart(entry))
        enabling = _error_of(lambda: units.after_files(host))
        states = _error_of(lambda: restore_unit_states(host, entry.units_before))
        journal.mark(entry, state)
    return RollbackReport(foreign, enabling or states, daemon)


def _error_of(do: Callable[[], None]) -> GpunodeError | None:
    try:
        do()
    except GpunodeError as error:
        return error
    return None


def _foreign_error(entry: Entry, path: str) -> ConfigError:
    backup = next(file.backup for file in entry.files if file.path == path)
    look = f"diff {entry.directory}/{backup} {path}" if backup else f"ls -l {path}"
    return ConfigError(
        f"{path} was changed by another program since and was left alone", hint=f"look at it: {look}"
    )


def not_restored(error: BaseException, problems: Sequence[GpunodeError]) -> NotRestoredError:
    """The error of a change that failed with `error` and was rolled back, except for these problems."""
    if isinstance(error, RolledBackError) and error.__cause__ is not None:
        error = error.__cause__  # its own message says that the node is unchanged
    message = _message(error)
    rest = "; ".join(problem.message.removesuffix(f": {message}") for problem in problems)
    but = "" if isinstance(error, NotRestoredError) else "rolled back, but "
    return NotRestoredError(f"{message}; {but}{rest}", hint=problems[0].hint)


def _message(error: BaseException) -> str:
    if isinstance(error, GpunodeError):
        return error.message
    return f"{type(error).__name__}: {error}" if isinstance(error, Exception) else "interrupted"


class Transaction:
    """One change and its journal entry, under the lock that `begin` has taken.

    A change without files has no entry before `open`. `rolled_back` is whether the files were restored. With
    `stays` the entry counts as committed even then, because packages are left.
    """

    def __init__(
        self,
        journal: Journal,
        operation: str,
        edits: Sequence[FileEdit],
        context: Mapping[str, Any],
        restart: Restart = lambda _entry: None,
    ) -> None:
        self.journal, self.operation, self.edits, self.context = journal, operation, edits, context
        self.entry: Entry | None = None
        self.rolled_back = False
        self.stays = False
        self._written: list[str] = []
        self._acted = False
        self._restart = restart

    def open(self) -> Entry:
        """The entry, which is on disk when this returns, with the units' present state."""
        if self.entry is None:
            existing = [edit for edit in self.edits if edit.before is not None]
            units = UnitChanges.of_edits(self.context.get("units", ()), existing)
            names = dict.fromkeys((*units.enable, *units.disable, *self.context.get("stopped", ())))
            context = {**self.context, "unitsBefore": unit_states(self.journal.host, names)}
            self.entry = self.journal.begin(self.operation, self.edits, context)
        return self.entry

    def run(self, act: Callable[[], _Outcome]) -> _Outcome:
        """Write the files, `act` on them, commit. A failure or an interruption restores the files.

        `NotRestoredError` if something was not restored.
        """
        return attempt(lambda: self._forward(act), self._roll_back)

    def _forward(self, act: Callable[[], _Outcome]) -> _Outcome:
        host = self.journal.host
        if self.edits:
            units = UnitChanges.of_edits(self.open().units, self.edits)
            units.before_files(host)
            for edit in self.edits:
                self._write(edit, edit.after if edit.interim is None else edit.interim, edit.before)
            self.entry = self.journal.mark(self.open(), "applied")
            units.after_files(host)
        outcome = act()
        self._acted = True
        for edit in self.edits:
            if edit.interim is not None:
                self._write(edit, edit.after, edit.interim)
        if self.entry is not None:
            with uninterrupted():  # from here on it is committed; exit code 130 means that it was rolled back
                self.journal.mark(self.entry, "committed")
                self._end_superseded()
                self.journal.prune()
        return outcome

    def _end_superseded(self) -> None:
        """Mark rolled-back entries of which only the daemon's restart failed: it has read new files since.

        Without a restart (`context` has the verb none) they stay open: `recover` reports that there was none.
        """
        paths = {edit.path for edit in self.edits if self.context.get("verb") != "none"}
        for entry in self.journal.unfinished():
            if paths.intersection(file.path for file in entry.files):
                self.journal.mark(entry, "rolled-back")

    def _write(self, edit: FileEdit, content: bytes | None, expect: bytes | None) -> None:
        write(self.journal.host, edit, content, expect)
        self._written.append(edit.path)

    def _roll_back(self, error: BaseException) -> None:
        if self._acted and self.context.get("stays"):
            return  # the packages are installed: the next run finds the open entry and commits it
        if self.entry is None:
            return
        state = "committed" if self.stays else "rolled-back"
        try:
            report = roll_back_entry(self.journal, self.entry, self._restart, state)
        except (GpunodeError, OSError) as failure:
            hint = f"correct it, then run: {rollback_command(self.journal.host, self.entry.id)}"
            message = f"{_message(error)}; not rolled back: {_message(failure)}"
            raise NotRestoredError(message, hint=hint) from error
        self.rolled_back = True
        written = {path: problem for path, problem in report.foreign.items() if path in self._written}
        problems = report._replace(foreign=written).problems
        if problems:
            raise not_restored(error, problems) from error


# Before a change: the lock, and the recovery of a run that was killed.


@contextmanager
def begin(
    host: Host, restart: Restart, *, dry_run: bool = False
) -> Iterator[tuple[Journal, tuple[str, ...]]]:
    """The journal, under the lock, after rolling back killed runs; with notes for the user.

    A dry run takes no lock and only returns the notes.
    """
    journal = Journal.of(host)
    if dry_run:
        yield journal, unfinished_notes(journal)
        return
    with host.lock(lock_path(host), LOCK_SECONDS):
        yield journal, recover(host, journal, restart)


def recover(host: Host, journal: Journal, restart: Restart) -> tuple[str, ...]:
    """Roll back killed runs; returns notes for the user. Needs the lock.

    An entry stays unfinished if its daemon's restart failed. If a later run changed one of its files, all of
    them were restored before that, and the daemon isn't restarted: with the later files that is for the user
    to decide.
    """
    notes = _without_leftovers(host, journal)
    for entry in journal.unfinished()[::-1]:
        killed = f"an earlier run was killed half-way ({entry.id})"
        state, what = _kept(journal, entry)
        if state:
            journal.mark(entry, state)
            notes.append(f"{killed}; {what}")
            continue
        report = roll_back_entry(journal, entry, restart)
        notes.append(f"{killed}; its files were rolled back")
        notes += [f"{problem.message}; {problem.hint}" for problem in report.problems]
        if report.daemon is not None:
            journal.mark(entry, entry.state)
            notes.append(f"the next run tries again, or run: {rollback_command(host, entry.id)}")
    return tuple(notes)


def _without_leftovers(host: Host, journal: Journal) -> list[str]:
    """Remove temporary files of killed runs. Those of earlier releases are beside the configuration file,
    where CRI-O reads them, and an entry that was rolled back since may have one."""
    removed: list[str] = []
    for path in sorted({file.path for entry in journal.entries() for file in entry.files}):
        with suppress(GpunodeError):  # an unreadable directory must not stop the recovery
            removed += host.remove_leftovers(path)
    return [f"{path}, the temporary file of a killed run, was removed" for path in removed]


def unfinished_notes(journal: Journal) -> tuple[str, ...]:
    """Notes of a dry run about unfinished operations; none if this user may not read the journal."""
    try:
        entries = journal.unfinished()
    except Unreadable:
        return ()
    notes = []
    for entry in entries:
        paths = ", ".join(file.path for file in entry.files)
        what = _kept(journal, entry)[1] or f"the next run first rolls back {paths}"
        notes.append(f"{entry.id} runs now or was killed half-way; if so, {what}")
    return tuple(notes)


def _kept(journal: Journal, entry: Entry) -> tuple[str, str]:
    """The state that an unfinished entry gets without being rolled back, and the note about what stays; both
    empty if it is to be rolled back."""
    if entry.stays:
        verb = entry.operation.replace("-", " ", 1)
        return "committed", f"what it installed stays, and gpunode {verb} goes on from there"
    paths = {file.path for file in entry.files}
    later = (other for other in journal.entries() if other.sequence > entry.sequence)
    superseding = (other for other in later if other.state == "committed")
    if not any(file.path in paths for other in superseding for file in other.files):
        return "", ""
    engine = entry.manager or entry.engine
    unread = f"; {engine} may not have read them yet: see gpunode doctor" if engine else ""
    return "rolled-back", f"later runs changed its files, which stay{unread}"


# A complete change of files that no daemon reads.


@dataclass(frozen=True)
class FilesChanged:
    """The planned edits, the journal entry that undoes them (empty if none), and notes."""

    edits: tuple[FileEdit, ...]
    journal: str = ""
    notes: tuple[str, ...] = ()

    @property
    def changes(self) -> tuple[Change, ...]:
        """The edits as they are shown."""
        return tuple(edit.change() for edit in self.edits)


def marked_edit(host: Host, path: str, after: bytes | None, marker: str) -> FileEdit:
    """The edit of a file that begins with gpunode's `marker`. `ConfigError` for an existing one without."""
    before = host.read_bytes(path)
    if before is not None and not before.startswith(marker.encode()):
        raise ConfigError(
            f"{path} exists and gpunode did not create it",
            hint=f"read it, and move it away if it is not needed: cat {path}",
        )
    return FileEdit(path, before, after)


def change_files(
    host: Host,
    operation: str,
    plan: Callable[[], Sequence[FileEdit]],
    restart: Restart,
    *,
    context: Mapping[str, Any] | None = None,
    named_units: Sequence[str] = (),
    stopped_units: Sequence[str] = (),
    activate: Callable[[], None] = lambda: None,
    always_activate: bool = False,
    done: Callable[[], None] = lambda: None,
    dry_run: bool = False,
) -> FilesChanged:
    """Carry out what `plan` returns once the lock is held; with `dry_run` nothing is locked or written.

    `restart` is for a killed run of another command. `context` goes into the journal's manifest, where
    ``engine`` is empty: a rollback restores files only.
    Of `named_units` those are enabled that get a file, and those disabled that lose theirs.
    `activate` is called when the files are written; if it raises, they are rolled back. `stopped_units` are
    other units that it stops and disables, which a rollback undoes; with these it is called, and recorded in
    the journal, even if no file changes. With `always_activate` it is called even without those, and recorded
    only if it succeeds, because there is nothing to roll back. `done` is called after success, also if
    nothing had to change, still under the lock.
    `PreconditionError` for files that this user may not write. `RolledBackError` or `NotRestoredError` if
    `activate` fails with a `DaemonError` after something was changed.
    """
    if not dry_run and host.live and not host.is_root:
        _require_rights(host, plan())
    with begin(host, restart, dry_run=dry_run) as (journal, notes):
        edits = tuple(plan())
        changed = tuple(edit for edit in edits if edit.action != "unchanged")
        if dry_run:
            return FilesChanged(edits, "", notes)
        undoable = bool(changed or stopped_units)
        if not undoable and not always_activate:
            done()
            return FilesChanged(edits, "", notes)
        manifest = {"engine": "", "units": list(named_units), **(context or {})}
        manifest |= {"stopped": list(stopped_units)} if stopped_units else {}
        change = Transaction(journal, operation, changed, manifest)

        def act() -> None:
            if undoable:
                change.open()
            activate()
            change.open()

        try:
            change.run(act)
        except DaemonError as error:
            if not undoable:
                raise
            units = " ".join(named_units)
            hint = f"look at it: systemctl status {units}" if units else error.hint
            raise RolledBackError(f"{error}; the files are as before", hint=hint) from error
        done()
        return FilesChanged(edits, change.open().id if undoable else "", notes)


def _require_rights(host: Host, edits: Sequence[FileEdit]) -> None:
    """Check permissions before anything is locked or created.

    A user's own file is changed without root, the node's are not.
    """
    for edit in edits:
        if edit.action != "unchanged" and not host.writable(edit.path):
            raise PreconditionError(f"changing {edit.path} needs root", hint="run it again with sudo")
