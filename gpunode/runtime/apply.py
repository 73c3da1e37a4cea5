"""Carrying out a plan: journal, write, restart, ask the daemon; and back again if any of it fails."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpunode.errors import (
    ConfigError,
    DaemonError,
    GpunodeError,
    RolledBackError,
)
from gpunode.host import Host
from gpunode.host.journal import Entry, FileEdit, Journal
from gpunode.host.transaction import Restored, Transaction, restore, write
from gpunode.output.result import Progress
from gpunode.runtime import find
from gpunode.runtime.engine import Active, Engine, Plan, decode
from gpunode.runtime.restart import Restarter

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
    words: list[str] = []

    def back(entry: Entry) -> str:
        words.append(job.restarter.last_words() if job.restarter else "")
        return _bring_back(job, entry)

    change = Transaction(journal, job.operation, job.plan.changed, job.context, back)
    try:
        seconds, active = change.run(lambda: _activate(job))
    except BaseException as error:
        if change.restored is not None:
            _explain(job, change.restored, words[0], error)
        raise
    return Applied(change.open().id, job.restarter is not None, seconds, active)


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


def _explain(job: Job, restored: Restored, words: str, error: BaseException) -> None:
    """Say that the files are as before, or raise it with what the daemon said and what is still wrong."""
    trouble = _trouble(job, restored)
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


def _trouble(job: Job, restored: Restored) -> str:
    """What is wrong after going back; empty if nothing is."""
    for path in restored.foreign:
        job.progress.note(f"{path} was changed by someone else meanwhile and was left alone")
    return restored.daemon or (f"the files are as before, but {restored.units}" if restored.units else "")


def take_back_all(done: Sequence[tuple[Job, Applied]], journal: Journal, error: BaseException) -> None:
    """Take back the engines that were changed before the one that failed with `error`, the last first."""
    troubles = []
    written = [(job, applied.journal) for job, applied in done if applied.journal]
    for job, name in reversed(written):
        try:
            entry = next(one for one in journal.entries() if one.id == name)
            restored = restore(journal, entry, functools.partial(_bring_back, job))
            troubles.append(_trouble(job, restored))
            job.progress.note(f"{job.plan.engine} was taken back as well")
        except GpunodeError as failure:  # the others must be taken back all the same
            troubles.append(f"{job.plan.engine} was not taken back: {failure.message}")
    wrong = "; ".join(filter(None, troubles))
    if wrong:
        raise RolledBackError(f"{error}; {wrong}", hint="look at the daemon's own log") from error
    if written and isinstance(error, GpunodeError) and not isinstance(error, RolledBackError):
        raise RolledBackError(str(error), hint=error.hint) from error


def _bring_back(job: Job, entry: Entry) -> str:
    """Restart with the old files, if the daemon may have seen the new ones; what is wrong if it still doesn't
    answer."""
    if entry.state == "begun" or job.restarter is None or job.plan.verb == "none":
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


def engine_restart(host: Host, progress: Progress, command: str = "") -> Callable[[Entry], None]:
    """Lets the engine of a killed run read the files again, once they are as before.

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

    return restart
