"""Execution of a plan: journal, write, restart or reload the daemon, query it; and a rollback if any of it
fails."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gpunode.errors import (
    ConfigError,
    DaemonError,
    GpunodeError,
    NotRestoredError,
    RolledBackError,
)
from gpunode.host.journal import Entry, Journal
from gpunode.host.transaction import Transaction, not_restored, roll_back_entry
from gpunode.output.result import Progress
from gpunode.runtime.engine import Active, Engine, Plan
from gpunode.runtime.restart import NOT_RESTARTED, RELOAD_SECONDS, UNRESTORED, Restarter, reload_undo

_ANSWER_SECONDS = 30.0
WITHOUT_CRI = "cri-disabled"  # the code of a containerd that runs and has no CRI
_SETTLE_SECONDS = 8.0  # a daemon that answers but lacks the runtime may still be reading its files


class ApplyOutcome(NamedTuple):
    """The result. `seconds` is the restart's duration; `active` is None if the daemon wasn't queried."""

    journal: str = ""
    performed: bool = False
    seconds: float = 0.0
    active: Active | None = None


@dataclass(frozen=True)
class EngineJob:
    """A plan with everything needed to carry it out and to roll it back.

    `is_active` judges the daemon's answer. Without a `restarter` only files are written.
    """

    engine: Engine
    plan: Plan
    operation: str
    is_active: Callable[[Active], bool]
    restarter: Restarter | None
    progress: Progress
    query: bool = True
    context: Mapping[str, Any] = field(default_factory=dict)


def apply(job: EngineJob, journal: Journal) -> ApplyOutcome:
    """Carry the plan out under the lock that the caller holds.

    `RolledBackError` if the daemon doesn't run with the new files and everything was rolled back, else
    `NotRestoredError`. An interruption rolls back as well and is raised again.
    """
    if not job.plan.changed:
        try:
            seconds, active = _activate(job)
        except DaemonError as error:
            look = job.restarter.look if job.restarter else ""
            raise DaemonError(error.message, hint=error.hint or look, code=error.code) from error
        return ApplyOutcome("", job.restarter is not None, seconds, active)
    log: list[str] = []

    def restart(entry: Entry) -> None:
        log.append(job.restarter.last_words() if job.restarter else "")
        _restart_with_old_files(job, entry)

    change = Transaction(journal, job.operation, job.plan.changed, job.context, restart)
    try:
        seconds, active = change.run(lambda: _activate(job))
    except NotRestoredError as error:
        raise NotRestoredError("\n".join(filter(None, (error.message, *log))), hint=error.hint) from error
    except KeyboardInterrupt:
        if change.rolled_back:
            job.progress.note("interrupted: the files are as before")
        raise
    except GpunodeError as error:
        if isinstance(error, ConfigError) or not change.rolled_back:
            raise
        message = f"{error}; the files are as before and {job.plan.engine} runs with them"
        if error.code == NOT_RESTARTED:
            raise RolledBackError(message, hint=error.hint) from error
        raise RolledBackError(
            "\n".join(filter(None, (message, *log))),
            hint="correct what the daemon complains about, then run this again",
        ) from error
    return ApplyOutcome(change.open().id, job.restarter is not None, seconds, active)


def _activate(job: EngineJob) -> tuple[float, Active | None]:
    """Restart or reload, and wait until the daemon reports the new configuration."""
    if job.restarter is None or job.plan.verb == "none":
        return 0.0, None
    seconds = 0.0
    if job.plan.verb != "wait":
        with job.progress.step(job.restarter.shown(job.plan.verb)):
            seconds = job.restarter.perform(job.plan.verb)
    if not job.query:
        job.engine.host.sleep(RELOAD_SECONDS if job.plan.verb == "reload" else 0.0)
        return seconds, None
    with job.progress.step(f"querying {job.plan.engine}"):
        patience = _ANSWER_SECONDS if job.plan.verb == "wait" else _SETTLE_SECONDS
        active = wait_for_answer(job.engine, job.is_active, patience)
    if not job.is_active(active):
        listed = ", ".join(active.handlers) or "none"
        raise DaemonError(
            f"{job.plan.engine} answers, but not with what was configured (runtimes: {listed};"
            f" default: {active.default or 'none'})",
            hint=job.restarter.look,
        )
    return seconds, active


def wait_for_answer(engine: Engine, good: Callable[[Active], bool], patience: float) -> Active:
    """The daemon's answer once it is `good`, else the last one. `DaemonError` if it doesn't answer.

    `patience` is for how many seconds it may answer without the desired configuration.
    """
    host = engine.host
    deadline = host.monotonic() + _ANSWER_SECONDS
    settle: float | None = None
    while True:
        try:
            active = engine.query()
        except DaemonError as error:
            if error.code == WITHOUT_CRI:  # an answer too, and one that rarely changes
                settle = settle or host.monotonic() + patience
            if host.monotonic() >= min(settle or deadline, deadline):
                raise
        else:
            settle = settle or host.monotonic() + patience
            if good(active) or host.monotonic() >= min(settle, deadline):
                return active
        host.sleep(0.1)


def roll_back_all(
    done: Sequence[tuple[EngineJob, ApplyOutcome]], journal: Journal, error: BaseException
) -> None:
    """Roll back the engines that were changed before the one that failed with `error`, the last first."""
    problems: list[GpunodeError] = []
    written = [(job, applied) for job, applied in done if applied.journal]
    for job, applied in reversed(written):
        engine = job.plan.engine
        try:
            entry = next(entry for entry in journal.entries() if entry.id == applied.journal)
            restart = functools.partial(_restart_with_old_files, job)
            remaining = roll_back_entry(journal, entry, restart).problems
        except GpunodeError as failure:  # the others must be rolled back all the same
            remaining = (GpunodeError(f"{engine} was not rolled back: {failure.message}", hint=failure.hint),)
        else:
            job.progress.note(f"{engine} was rolled back as well")
        problems += remaining
    if problems:
        raise not_restored(error, problems) from error
    if written and isinstance(error, GpunodeError) and not isinstance(error, _ROLLED_BACK):
        raise RolledBackError(str(error), hint=error.hint) from error


_ROLLED_BACK = (RolledBackError, NotRestoredError)


def _restart_with_old_files(job: EngineJob, entry: Entry) -> None:
    """Restart with the old files, if the daemon may have read the new ones.

    The reload reads the plan's own edits and fails if another program has changed a file since;
    `restart._restart_after_recovery` has no plan and reloads the present file. `GpunodeError` if the daemon
    doesn't answer then.
    """
    if entry.state == "begun" or job.restarter is None or job.plan.verb == "none":
        return
    try:
        if job.plan.verb == "reload" and job.engine.query_if_up() is not None:
            reload_undo(job.plan.changed, job.restarter)
        elif job.plan.verb != "wait":
            job.restarter.perform("restart")
        wait_until_up(job.engine)
    except GpunodeError as error:
        if error.code == UNRESTORED:
            raise
        is_up = job.engine.query_if_up() is not None
        if error.code == NOT_RESTARTED and job.plan.verb == "restart" and is_up:
            return  # the daemon never read the new files
        state = "did not read the old files again" if is_up else "does not run"
        raise DaemonError(f"{job.plan.engine} {state}: {error.message}", hint=job.restarter.look) from error


def wait_until_up(engine: Engine) -> None:
    """Wait for any answer; a containerd with the CRI disabled counts as running too."""

    def answers() -> bool:
        try:
            engine.query()
        except DaemonError as error:
            return error.code == WITHOUT_CRI
        return True

    if not engine.host.wait_until(answers, _ANSWER_SECONDS, 0.1):
        engine.query()  # reports the reason
