"""The whole way of one change: lock, recover, find, plan, check, apply, report. One engine or several.

With several, all are planned and validated before the first byte is written, and a failure of one takes the
others back as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext

from gpunode.dataclass import dataclass, replace
from gpunode.errors import GpunodeError, PreconditionError
from gpunode.host import Host
from gpunode.journal import Journal, lock_path
from gpunode.result import ExitCode, Progress, Result
from gpunode.runtime import find
from gpunode.runtime.apply import Applied, Job, apply, take_back_all
from gpunode.runtime.engine import Active, Engine, Plan, Wanted
from gpunode.runtime.recovery import ask_if_up, half_done, restarter_of, take_back
from gpunode.runtime.refusals import refuse
from gpunode.runtime.report import combined, report
from gpunode.runtime.request import Request
from gpunode.runtime.restart import Restarter

LOCK_SECONDS = 30.0
# Their answer decides about the verb, and so about running containers, even where files change. The others
# restart then whatever they say, and asking takes time.
_ASKED_ANYWAY = ("docker", "crio")


@dataclass(frozen=True)
class Intent:
    """What a command wants of one engine: its name for the journal, the runtimes, its planner and its judge.

    `expected` is what the daemon must find in the new files, None for a removal. `require` raises if the node
    lacks something without which the change would do harm. `done` runs after success. `notes` are for people.
    `cdi` names the engines that use the CDI specification from then on.
    """

    operation: str
    names: tuple[str, ...]
    plan: Callable[[Active | None], Plan]
    in_force: Callable[[Active], bool]
    expected: Wanted | None = None
    kind: str = "RuntimeConfiguration"
    require: Callable[[], None] = lambda: None
    done: Callable[[], None] = lambda: None
    notes: tuple[str, ...] = ()
    cdi: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """One engine's part of a change, planned and not yet begun."""

    engine: Engine
    intent: Intent
    plan: Plan
    active: Active | None
    restarter: Restarter


Prepare = Callable[[tuple[Engine, ...], Journal], Iterable[Intent]]


def change(host: Host, request: Request, prepare: Prepare, progress: Progress) -> Result:
    """Carry out what `prepare` intends, an `Intent` for each engine; with `dry_run` only show it.

    Nothing is locked or written in a dry run.
    """
    find.check_names(request.runtimes)
    journal = Journal.of(host)
    if not request.dry_run:
        _require_rights(host, request)
    with nullcontext() if request.dry_run else host.lock(lock_path(host), LOCK_SECONDS):
        notes = (
            half_done(host, journal)
            if request.dry_run
            else take_back(host, request.restart_command, journal, progress)
        )
        engines = find.engines(host, request)
        intents = tuple(prepare(engines, journal))
        tasks = tuple(_task(host, request, *one) for one in zip(engines, intents, strict=True))
        if request.dry_run:
            results = [_foreseen(task, request, notes) for task in tasks]
        else:
            results = _carry_out(host, request, tasks, journal, progress, notes)
    return combined(results)


def _require_rights(host: Host, request: Request) -> None:
    """Only a user's own rootless engine is changed without root."""
    if not host.live or host.is_root:
        return
    if not all(engine.daemon.user for engine in find.engines(host, request)):
        raise PreconditionError(
            "changing a container engine's configuration needs root", hint="run it again with sudo"
        )


def _task(host: Host, request: Request, engine: Engine, intent: Intent) -> Task:
    shown = intent.plan(None) if request.dry_run and engine.daemon.name not in _ASKED_ANYWAY else None
    quick = shown is not None and shown.changed
    active = None if quick else ask_if_up(engine)
    plan = shown if quick and shown else intent.plan(active)
    return Task(engine, intent, plan, active, restarter_of(host, request.restart_command, engine))


def _carry_out(
    host: Host,
    request: Request,
    tasks: tuple[Task, ...],
    journal: Journal,
    progress: Progress,
    notes: tuple[str, ...],
) -> list[Result]:
    checked: list[tuple[str, ...]] = []
    for task in tasks:
        task.intent.require()
        refuse(task.engine, task.plan, task.active, task.restarter, request)
        own = task.plan.own
        checked.append(task.engine.validate(own, task.intent.expected) if own.changed else ())
    done: list[tuple[Job, Applied]] = []
    try:
        for task in tasks:
            job = _job(host, request, task, progress)
            acts = task.plan.changed or (task.plan.verb != "none" and job.restarter is not None)
            done.append((job, apply(job, journal) if acts else Applied(active=task.active)))
    except BaseException as error:
        take_back_all(done, journal, error)
        raise
    for task, (_, applied) in zip(tasks, done, strict=True):
        if applied.journal or applied.performed:
            task.intent.done()
    return [
        report(task, applied, request, notes + said)
        for task, (_, applied), said in zip(tasks, done, checked, strict=True)
    ]


def _job(host: Host, request: Request, task: Task, progress: Progress) -> Job:
    acts = host.live and not request.no_restart
    engine, plan, intent, active = task.engine, task.plan, task.intent, task.active
    context = {
        "engine": plan.engine,
        "manager": engine.daemon.manager,
        "config": engine.daemon.config_path,
        "socket": engine.daemon.socket,
        "verb": plan.verb if acts else "none",
        "restartCommand": request.restart_command,
        "runtimes": list(intent.names),
        "hadRuntime": plan.had_runtime,
        "activeBefore": {"handlers": list(active.handlers), "default": active.default} if active else None,
        "previousDefault": plan.previous_default,
        "switchedCdi": plan.switched_cdi,
        "units": list(plan.units),
        "cdi": list(intent.cdi),
    }
    return Job(
        host,
        engine,
        plan,
        intent.operation,
        lambda answer: intent.in_force(answer.without(plan.remaining)),
        task.restarter if acts else None,
        progress,
        not request.no_verify,
        context,
    )


def _foreseen(task: Task, request: Request, notes: tuple[str, ...]) -> Result:
    """The result of a dry run: the plan, and exit code 3 with the errors that a real run would stop at."""
    engine, plan, active = task.engine, task.plan, task.active
    refusals = []
    for check in (task.intent.require, lambda: refuse(engine, plan, active, task.restarter, request)):
        try:
            check()
        except GpunodeError as error:
            info = error.info()
            refusals.append(replace(info, message=f"a real run would refuse this: {info.message}"))
    if plan.own.changed and engine.host.live:
        notes = (
            *notes,
            f"not validated: {plan.engine} itself reads staged copies first when this is not a dry run",
        )
    result = report(task, Applied(active=active), request, notes)
    if not refusals:
        return result
    return replace(result, status="fail", exit_code=ExitCode.PRECONDITION, errors=tuple(refusals))
