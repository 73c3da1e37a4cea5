"""Carrying out a plan: journal, write, restart, ask the daemon; and back again if any of it fails."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from gpunode.dataclass import dataclass, field
from gpunode.errors import ConfigError, DaemonError, GpunodeError, RolledBackError
from gpunode.host import Host
from gpunode.journal import Entry, Journal
from gpunode.result import Progress
from gpunode.runtime import units
from gpunode.runtime.engine import Active, Engine, FileEdit, Plan
from gpunode.runtime.restart import Restarter

_ANSWER_SECONDS = 30.0
_RELOAD_SECONDS = 0.5  # a reload gives no sign when it is done and no runtime that would show it
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
        moves = units.forth(job.plan.units, job.plan.changed)
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
    moves = units.back(entry)
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
    try:
        restarter.perform("reload")
        host.sleep(_RELOAD_SECONDS)
    finally:  # also where the reload fails
        for edit in edits:
            if edit.undo is not None:
                write(host, edit, edit.before, edit.undo)


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
            moves = units.back(entry)
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
