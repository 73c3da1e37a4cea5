"""Carrying out a plan: journal, write, restart, ask the daemon; and back again if any of it fails."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from gpunode.errors import (
    ConfigError,
    DaemonError,
    GpunodeError,
    PreconditionError,
    RolledBackError,
    Unreadable,
)
from gpunode.host import Host
from gpunode.host.journal import Entry, FileEdit, Journal, lock_path, state_of
from gpunode.output.result import Progress
from gpunode.runtime import find
from gpunode.runtime.engine import Active, Engine, Plan, decode
from gpunode.runtime.removal import kinds_of, runtimes_of
from gpunode.runtime.restart import Restarter

# Restoring a journal entry: later entries that wrote the same files are taken back with it.


@dataclass(frozen=True)
class Past:
    """The way back to the node before `entries[-1]`. `entries` are taken back, the newest first."""

    entries: tuple[Entry, ...]
    edits: tuple[FileEdit, ...]

    @property
    def entry(self) -> Entry:
        """The one that was asked for."""
        return self.entries[-1]

    @property
    def names(self) -> tuple[str, ...]:
        """The runtimes that any of the entries was about."""
        listed = (name for entry in self.entries for name in runtimes_of(entry.manifest))
        return tuple(dict.fromkeys(listed))

    @property
    def units(self) -> tuple[str, ...]:
        """The systemd units that any of the entries brought or removed."""
        return tuple(dict.fromkeys(unit for entry in self.entries for unit in entry.units))

    def finish(self, journal: Journal) -> None:
        """Give the files their owners and modes of then; the entries count as rolled back."""
        for entry in self.entries:
            journal.own(entry)
            journal.tidy(entry)
            journal.mark(entry, "rolled-back")


def past(host: Host, journal: Journal, entry: Entry) -> Past:
    """The way back to before `entry`. `ConfigError` if somebody else changed one of its files since."""
    entries = _with_later(journal, entry)
    _refuse_other_engines(entry, entries)
    now: dict[str, bytes | None] = {}
    then: dict[str, bytes | None] = {}
    kinds: dict[str, tuple[bool, bool]] = {}
    foreign: list[str] = []
    for one in entries:
        for file in one.files:
            path = file["path"]
            present = then.get(path, now.setdefault(path, host.read_bytes(path)))
            state = state_of(file, present)
            foreign += [path] if state == "foreign" else []
            then[path] = journal.original(one, file) if state == "ours" else present
            kinds[path] = kinds_of(file)
    if foreign:
        raise ConfigError(
            f"{', '.join(dict.fromkeys(foreign))} changed after {entry.id}; nothing was restored",
            hint=f"see what gpunode had written: gpunode journal show {entry.id}",
        )
    edits = tuple(
        FileEdit(path, now[path], then[path], generated=kinds[path][0], beside=kinds[path][1])
        for path in then
    )
    return Past(entries, edits)


def _with_later(journal: Journal, entry: Entry) -> tuple[Entry, ...]:
    """`entry` and every later one in force that shares a file with what is taken back, newest first."""
    later = [one for one in journal.entries() if one.sequence > entry.sequence]
    in_force = [one for one in later if one.state == "committed" and one.undoable]
    chosen = [entry]
    paths = {file["path"] for file in entry.files}
    for one in in_force:
        own = {file["path"] for file in one.files if not file.get("generated")}
        if own & paths:
            chosen.insert(0, one)
            paths |= own
    return tuple(chosen)


def _refuse_other_engines(entry: Entry, entries: tuple[Entry, ...]) -> None:
    """One engine is asked and restarted; an entry of another one must go first, by itself."""
    keys = ("engine", "manager", "config")
    wanted = tuple(entry.manifest.get(key) or "" for key in keys)
    for one in entries:
        if tuple(one.manifest.get(key) or "" for key in keys) != wanted:
            raise ConfigError(
                f"{one.id} wrote the same files later, for something else; nothing was restored",
                hint=f"roll that back first: gpunode rollback {one.id}",
            )


# systemd units that come and go with a change: enabled after their files, disabled before them.

_SECONDS = 60.0
# takes the lock that whoever installs it holds, and has nothing to do before the next boot
_NOT_NOW = frozenset({"gpunode-mig.service"})


@dataclass(frozen=True)
class Moves:
    """What a change of files means for units: those to enable, to disable, and only to be read anew."""

    coming: tuple[str, ...] = ()
    going: tuple[str, ...] = ()
    staying: tuple[str, ...] = ()

    def prepare(self, host: Host) -> None:
        """Before the files change: a unit can be stopped and disabled only while its file is there.

        One that isn't enabled is fine.
        """
        if self.going and _acts(host):
            host.run(("systemctl", "disable", "--now", *self.going), timeout=_SECONDS)

    def settle(self, host: Host) -> None:
        """After the files have changed. `DaemonError` if systemd refuses a unit that comes."""
        if not _acts(host) or not (self.coming or self.going or self.staying):
            return
        commands: list[tuple[str, ...]] = [("systemctl", "daemon-reload")]
        now = tuple(unit for unit in self.coming if unit not in _NOT_NOW)
        later = tuple(unit for unit in self.coming if unit in _NOT_NOW)
        commands += [("systemctl", "enable", "--now", *now)] if now else []
        commands += [("systemctl", "enable", *later)] if later else []
        for argv in commands:
            answer = host.run(argv, timeout=_SECONDS)
            if not answer.ok and self.coming:
                said = (answer.stderr or answer.stdout).strip()[-500:]
                raise DaemonError(
                    f"{' '.join(argv)} failed: {said or f'status {answer.code}'}",
                    hint=f"look at them: systemctl status {' '.join(self.coming)}",
                )


def forth(units: Sequence[str], edits: Iterable[FileEdit]) -> Moves:
    """What becomes of those units whose files are among the edits."""
    stays = {edit.path.rpartition("/")[2]: edit.after is not None for edit in edits}
    return Moves(
        coming=tuple(unit for unit in units if stays.get(unit) is True),
        going=tuple(unit for unit in units if stays.get(unit) is False),
    )


def back(entry: Entry) -> Moves:
    """What becomes of an entry's units when its files are restored: a mere rewriting enabled none."""
    files = {file["path"].rpartition("/")[2]: file for file in entry.files}
    known = [unit for unit in entry.units if unit in files]
    return Moves(
        coming=tuple(unit for unit in known if not files[unit]["after"]),
        going=tuple(unit for unit in known if not files[unit]["existed"]),
        staying=tuple(unit for unit in known if files[unit]["existed"] and files[unit]["after"]),
    )


def _acts(host: Host) -> bool:
    return host.live and host.systemd_runs()


_ANSWER_SECONDS = 30.0
_RELOAD_SECONDS = 0.5  # a reload gives no sign when it is done and no runtime that would show it
_UNRESTORED = "not-restored"  # the code of a file that still holds what it held for a reload
WITHOUT_CRI = "cri-disabled"  # the code of a containerd that runs and has no CRI
_SETTLE_SECONDS = 8.0  # a daemon that answers but lacks the runtime may still be reading its files


@dataclass(frozen=True)
class Applied:
    """What was done. `seconds` is how long the restart took; `active` is None if nobody was asked."""

    journal: str = ""
    performed: bool = False
    seconds: float = 0.0
    active: Active | None = None


@dataclass(frozen=True)
class Job:
    """A plan with everything needed to carry it out and to take it back.

    `in_force` judges what the daemon answers. Without a `restarter` files are written and nothing is asked.
    """

    host: Host
    engine: Engine
    plan: Plan
    operation: str
    in_force: Callable[[Active], bool]
    restarter: Restarter | None
    progress: Progress
    ask: bool = True
    context: Mapping[str, Any] = field(default_factory=dict)


def apply(job: Job, journal: Journal) -> Applied:
    """Carry the plan out under the lock that the caller holds.

    `RolledBackError` if the daemon didn't come back with what was wanted; everything is as before then. An
    interruption rolls back as well and goes on its way.
    """
    if not job.plan.changed:
        try:
            seconds, active = _activate(job)
        except DaemonError as error:
            look = job.restarter.look if job.restarter else ""
            raise DaemonError(error.message, hint=error.hint or look, code=error.code) from error
        return Applied("", job.restarter is not None, seconds, active)
    entry: Entry | None = None
    try:
        entry = journal.begin(job.operation, job.plan.changed, job.context)
        moves = forth(job.plan.units, job.plan.changed)
        moves.prepare(job.host)
        for edit in job.plan.changed:
            write(job.host, edit, edit.interim if edit.interim is not None else edit.after, edit.before)
        entry = journal.mark(entry, "applied")
        moves.settle(job.host)
        seconds, active = _activate(job)
        for edit in job.plan.changed:
            if edit.interim is not None:
                write(job.host, edit, edit.after, edit.interim)
        with uninterrupted():  # from here on it is done, and what says 130 has been rolled back
            journal.mark(entry, "committed")
            journal.prune()
    except BaseException as error:
        if entry is not None:
            _roll_back(job, journal, entry, error)
        raise
    return Applied(entry.id, job.restarter is not None, seconds, active)


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


def _activate(job: Job) -> tuple[float, Active | None]:
    """Restart or reload, and wait until the daemon says that it has what was wanted."""
    if job.restarter is None or job.plan.verb == "none":
        return 0.0, None
    seconds = 0.0
    if job.plan.verb != "wait":
        with job.progress.step(job.restarter.shown(job.plan.verb)):
            seconds = job.restarter.perform(job.plan.verb)
    if not job.ask:
        job.host.sleep(_RELOAD_SECONDS if job.plan.verb == "reload" else 0.0)
        return seconds, None
    with job.progress.step(f"asking {job.plan.engine}"):
        patience = _ANSWER_SECONDS if job.plan.verb == "wait" else _SETTLE_SECONDS
        active = wait_for_answer(job.host, job.engine, job.in_force, patience)
    if not job.in_force(active):
        listed = ", ".join(active.handlers) or "none"
        raise DaemonError(
            f"{job.plan.engine} answers, but not with what was configured (runtimes: {listed};"
            f" default: {active.default or 'none'})",
            hint=job.restarter.look,
        )
    return seconds, active


def wait_for_answer(
    host: Host, engine: Engine, good: Callable[[Active], bool], patience: float = _SETTLE_SECONDS
) -> Active:
    """The daemon's answer once it is `good`, else the last one. `DaemonError` if it stays silent.

    `patience` is for how many seconds it may answer and still lack what is wanted.
    """
    deadline = host.monotonic() + _ANSWER_SECONDS
    settle: float | None = None
    while True:
        try:
            active = engine.ask()
        except DaemonError as error:
            if error.code == WITHOUT_CRI:  # an answer too, and seldom one that waiting changes
                settle = settle or host.monotonic() + patience
            if host.monotonic() >= min(settle or deadline, deadline):
                raise
        else:
            settle = settle or host.monotonic() + patience
            if good(active) or host.monotonic() >= min(settle, deadline):
                return active
        host.sleep(0.1)


def _roll_back(job: Job, journal: Journal, entry: Entry, error: BaseException) -> None:
    """Restore the files and, if the daemon may have seen the new ones, start it again with the old."""
    with uninterrupted():
        words = job.restarter.last_words() if job.restarter else ""
        trouble = _restore(job, journal, entry)
    if isinstance(error, (ConfigError, KeyboardInterrupt, SystemExit)) and not trouble:
        if isinstance(error, KeyboardInterrupt):
            job.progress.note("interrupted: the files are as before")
        return
    if not isinstance(error, GpunodeError) and not trouble:
        return
    said = f"\n{words}" if words else ""
    state = (
        trouble.removesuffix(f": {error}") or f"the files are as before and {job.plan.engine} runs with them"
    )
    raise RolledBackError(
        f"{error}; {state}{said}", hint="correct what the daemon complains about, then run this again"
    ) from error


def _restore(job: Job, journal: Journal, entry: Entry) -> str:
    """The files as they were, read by the daemon; what is wrong if it doesn't run with them."""
    foreign = journal.foreign(entry)
    moves = back(entry)
    moves.prepare(job.host)
    journal.restore(entry)
    trouble = _bring_back(job) if entry.state != "begun" else ""
    try:
        moves.settle(job.host)
    except DaemonError as error:
        trouble = trouble or f"the files are as before, but {error.message}"
    journal.mark(entry, "rolled-back")
    for path in foreign:
        job.progress.note(f"{path} was changed by someone else meanwhile and was left alone")
    return trouble


def take_back_all(done: Sequence[tuple[Job, Applied]], journal: Journal, error: BaseException) -> None:
    """Take back the engines that were changed before the one that failed with `error`, the last first."""
    troubles = []
    written = [(job, applied.journal) for job, applied in done if applied.journal]
    with uninterrupted():
        for job, name in reversed(written):
            try:
                entry = next(one for one in journal.entries() if one.id == name)
                troubles.append(_restore(job, journal, entry))
                job.progress.note(f"{job.plan.engine} was taken back as well")
            except GpunodeError as failure:  # the others must be taken back all the same
                troubles.append(f"{job.plan.engine} was not taken back: {failure.message}")
    wrong = "; ".join(filter(None, troubles))
    if wrong:
        raise RolledBackError(f"{error}; {wrong}", hint="look at the daemon's own log") from error
    if written and isinstance(error, GpunodeError) and not isinstance(error, RolledBackError):
        raise RolledBackError(str(error), hint=error.hint) from error


def _bring_back(job: Job) -> str:
    """Restart with the old files; what is wrong if the daemon still doesn't answer."""
    if job.restarter is None or job.plan.verb == "none":
        return ""
    try:
        if job.plan.verb == "reload" and _answers(job.engine):
            reload_undo(job.host, job.plan.changed, job.restarter)
        elif job.plan.verb != "wait":
            job.restarter.perform("restart")
        wait_until_up(job.host, job.engine)
    except GpunodeError as error:
        if error.code == _UNRESTORED:
            return error.message
        state = "did not read them again" if _answers(job.engine) else "does not run"
        return f"the files are as before, but {job.plan.engine} {state}: {error.message}"
    return ""


def wait_until_up(host: Host, engine: Engine) -> None:
    """Wait for any answer; a containerd whose file switches the CRI off is up as well."""

    def answers() -> bool:
        try:
            engine.ask()
        except DaemonError as error:
            return error.code == WITHOUT_CRI
        return True

    if not host.wait_until(answers, _ANSWER_SECONDS, 0.1):
        engine.ask()  # says why not


def reload_undo(host: Host, edits: tuple[FileEdit, ...], restarter: Restarter) -> None:
    """Let a daemon reload the old files; `undo` texts spell out what it would otherwise remember."""
    for edit in edits:
        if edit.undo is not None:
            write(host, edit, edit.undo, edit.before)
    reload_error = ""
    try:
        restarter.perform("reload")
        host.sleep(_RELOAD_SECONDS)
    except GpunodeError as error:
        reload_error = f"; {error.message}"
        raise
    finally:  # also where the reload fails
        for edit in edits:
            if edit.undo is not None:
                _restore_after_reload(host, edit, reload_error)


def _restore_after_reload(host: Host, edit: FileEdit, reload_error: str) -> None:
    try:
        write(host, edit, edit.before, edit.undo)
    except GpunodeError as error:
        raise ConfigError(
            f"{edit.path} was not restored after the reload: {error.message}{reload_error}",
            hint=error.hint,
            code=_UNRESTORED,
        ) from error


def _answers(engine: Engine) -> bool:
    try:
        engine.ask()
    except DaemonError:
        return False
    return True


@contextmanager
def uninterrupted(tell: Callable[[str], None] = lambda _name: None) -> Iterator[None]:
    """Pass over Ctrl-C and SIGTERM: half a roll-back is worse than none, and what it belongs to ends anyway.

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


def packages_stay(entry: Entry) -> str:
    """What a person does about packages of a run that was killed."""
    verb = str(entry.manifest.get("operation", "")).replace("-", " ", 1)
    return f"what it installed stays, and gpunode {verb} goes on from there"


def recover(host: Host, journal: Journal, restart: Callable[[Entry], None]) -> tuple[str, ...]:
    """Undo what a killed process left half done; gives what a person should know. Needs the lock."""
    notes = _without_leftovers(host, journal)
    for entry in journal.unfinished():
        if entry.stays:
            journal.mark(entry, "committed")
            notes.append(f"an earlier run was killed half-way ({entry.id}); {packages_stay(entry)}")
            continue
        with uninterrupted():
            foreign = journal.foreign(entry)
            moves = back(entry)
            moves.prepare(host)
            journal.restore(entry)
            restart(entry)
            trouble = ""
            try:
                moves.settle(host)
            except DaemonError as error:
                trouble = error.message
            journal.mark(entry, "rolled-back")
        notes.append(f"an earlier run was killed half-way ({entry.id}); what it had written was taken back")
        notes += [trouble] if trouble else []
        notes += [f"{path} was changed since and was left alone" for path in foreign]
    return tuple(notes)


def _without_leftovers(host: Host, journal: Journal) -> list[str]:
    """Remove temporary files of killed runs. Those of earlier releases are beside the configuration file,
    where CRI-O reads them, and an entry that was rolled back since may have one."""
    removed: list[str] = []
    for path in sorted({str(file["path"]) for entry in journal.entries() for file in entry.files}):
        with suppress(GpunodeError):  # an unreadable directory must not stop the recovery
            removed += host.remove_leftovers(path)
    return [f"{path}, the temporary file of a killed run, was removed" for path in removed]


# What happens to a run that was killed half-way: its files are put back and its daemon reads them again.

_OF_THE_ENGINE = ("config", "socket", "restartCommand", "verb")


def restarter_of(host: Host, command: str, engine: Engine) -> Restarter:
    """How `engine` is restarted: by the user's own `command`, else as this node does it."""
    again = functools.partial(find.finder_of(engine.daemon), host, engine.daemon.config_path)
    return Restarter(host, engine.daemon, again, command)


def ask_if_up(engine: Engine) -> Active | None:
    """What the daemon says now; None if it doesn't run, isn't reachable or must not be contacted."""
    if not engine.host.live:
        return None
    try:
        return engine.ask()
    except DaemonError:
        return None


def _bring_back_daemon(engine: Engine, restarter: Restarter, verb: str) -> None:
    """A reload is taken back by a reload: a restart of Docker would stop its containers."""
    if verb == "wait":
        return  # whoever applies the files sees the old ones
    if verb != "reload" or ask_if_up(engine) is None:
        restarter.perform("restart")
        return
    from gpunode.runtime.docker import for_reload

    path = engine.daemon.config_path
    content = engine.host.read_bytes(path)
    undo = for_reload(decode(content, path), path).encode()
    reload_undo(engine.host, (FileEdit(path, content, content, None, undo),), restarter)


def take_back(host: Host, command: str, journal: Journal, progress: Progress) -> tuple[str, ...]:
    """Take back what a killed run left behind, and let its daemon read the files again. Needs the lock.

    `command` is the user's own for the restart, empty for the one that the killed run was given.
    """

    def restart(entry: Entry) -> None:
        known = {key: str(entry.manifest.get(key) or "") for key in _OF_THE_ENGINE}
        if entry.state != "applied" or known["verb"] in ("", "none") or not host.live:
            return  # the daemon never saw the new files
        name = find.name_of(entry.manifest)
        try:
            # an engine that was removed since must not stop every later run
            engine = find.engine(host, name, known["config"], "", known["socket"])
            own = command or known["restartCommand"]
            with progress.step(f"bringing {name} back to its files of before"):
                _bring_back_daemon(engine, restarter_of(host, own, engine), known["verb"])
        except GpunodeError as error:
            progress.note(f"{name} could not be restarted: {error.message}")

    return recover(host, journal, restart)


def half_done(host: Host, journal: Journal) -> tuple[str, ...]:
    """What a dry run says of an operation that has begun and not ended; nothing if it may not look."""
    try:
        found = journal.unfinished()
    except Unreadable:
        return ()
    return tuple(
        f"{entry.id} runs now or was killed half-way; if so, "
        + (packages_stay(entry) if entry.stays else f"the next run first takes back {_written(entry)}")
        for entry in found
    )


def _written(entry: Entry) -> str:
    return "what it wrote to " + ", ".join(str(file["path"]) for file in entry.files)


# A change of files that no daemon has to read: lock, recover, plan, journal, write; back if it fails.

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
        moves = forth(entry.units, edits)
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
    moves = back(entry)
    moves.prepare(host)
    journal.restore(entry)
    with suppress(DaemonError):  # the same systemd has just said so, or nobody has touched its units
        moves.settle(host)
    journal.mark(entry, "rolled-back")
    if isinstance(error, DaemonError):
        hint = f"look at it: systemctl status {' '.join(entry.units)}" if entry.units else error.hint
        raise RolledBackError(f"{error}; the files are as before", hint=hint) from error
