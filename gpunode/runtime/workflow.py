"""All steps of one change: lock, recover, find, plan, check, apply, report. One engine or several.

With several, all are planned and validated before the first byte is written, and a failure of one rolls back
the others as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from gpunode.errors import ConfigError, GpunodeError, PreconditionError
from gpunode.facts.registry import ENGINES
from gpunode.host import Host
from gpunode.host.journal import FileEdit, Journal, rollback_command
from gpunode.host.transaction import attempt, begin
from gpunode.output.result import Block, Change, ExitCode, Progress, Result, Style, Text, change_blocks, many
from gpunode.runtime import find
from gpunode.runtime.apply import (
    ApplyOutcome,
    EngineJob,
    apply,
    roll_back_all,
)
from gpunode.runtime.engine import Active, DesiredConfig, Engine, Plan, Request
from gpunode.runtime.restart import Restarter, engine_restart, restarter_of

OPERATION = "configure-runtime"
REMOVAL = "unconfigure-runtime"
"""The names of the two operations in the journal."""

# The result of changing an engine's configuration, as JSON and as text.


@dataclass(frozen=True)
class RestartReport:
    """`verb` is none, reload or restart; `seconds` is 0 if it wasn't performed. `command` performs it."""

    verb: str
    performed: bool
    seconds: float
    command: str
    reason: str


@dataclass(frozen=True)
class ActiveReport:
    """The running daemon's report: its handlers (comma separated names) and its default runtime."""

    handler: tuple[str, ...]
    default: str


@dataclass(frozen=True)
class RuntimeConfiguration:
    """`data` of the envelope.

    `config_version` is null for docker, `active` if the daemon wasn't queried.
    """

    engine: str
    engine_version: str
    config_version: int | None
    config: str
    config_source: str
    changes: tuple[Change, ...]
    restart: RestartReport
    active: ActiveReport | None
    journal: str
    dry_run: bool


@dataclass(frozen=True)
class RuntimeConfigurations:
    """`data` of the envelope when several engines were named, in their order."""

    engines: tuple[RuntimeConfiguration, ...]


def combined(results: Sequence[Result]) -> Result:
    """One result of several engines' results; a single one isn't changed."""
    if len(results) == 1:
        return results[0]
    blocks: list[Block] = []
    for result in results:
        blocks += [Text(f"{result.data.engine}:", Style.HEADING), *result.blocks]
    messages = tuple(dict.fromkeys(message for result in results for message in result.messages))
    return replace(
        results[0],
        kind="RuntimeConfigurations",
        data=RuntimeConfigurations(tuple(result.data for result in results)),
        status=next((result.status for result in results if result.errors), results[0].status),
        exit_code=max(result.exit_code for result in results),
        errors=tuple(error for result in results for error in result.errors),
        messages=messages,
        blocks=tuple(blocks),
    )


def report(task: Task, applied: ApplyOutcome, request: Request, notes: tuple[str, ...]) -> Result:
    """The result of a plan that was carried out, or would be."""
    engine, plan, restarter, kind = task.engine, task.plan, task.restarter, task.intent.kind
    pending = bool(plan.changed) or plan.verb != "none"
    command = restarter.shown(plan.verb) if plan.verb != "none" else ""
    performed = applied.performed and plan.verb not in ("none", "wait")
    active = applied.active or (task.active if plan.verb == "none" else None)
    data = RuntimeConfiguration(
        engine=plan.engine,
        engine_version=engine.daemon.release,
        config_version=plan.config_version,
        config=engine.daemon.config_path,
        config_source=engine.daemon.config_source,
        changes=tuple(shown(edit, kind) for edit in plan.edits),
        restart=RestartReport(plan.verb, performed, round(applied.seconds, 3), command, plan.reason),
        active=ActiveReport(active.handlers, active.default) if active else None,
        journal=applied.journal,
        dry_run=request.dry_run,
    )
    fails = request.dry_run and request.exit_code and pending
    messages = (*plan.notes, *task.intent.notes, *notes)
    blocks = _blocks(plan, data, request, engine.host, kind)
    return Result(
        kind, data, exit_code=ExitCode.FAILED if fails else ExitCode.OK, messages=messages, blocks=blocks
    )


def _blocks(
    plan: Plan, data: RuntimeConfiguration, request: Request, host: Host, kind: str
) -> tuple[Block, ...]:
    blocks = edit_blocks(plan.edits, kind, dry_run=request.dry_run)
    blocks += _about_restart(data, request, host.live)
    if request.dry_run:
        return tuple(blocks)
    if data.active is not None:
        handlers = ", ".join(data.active.handler)
        seen = f"{plan.engine} has the runtimes {handlers}; default: {data.active.default}"
        blocks.append(Text(seen, Style.GOOD))
    if data.journal and kind != "Rollback":
        blocks.append(Text(f"undo it with: {rollback_command(host, data.journal)}", Style.DIM))
    if data.active is not None and request.configures:
        blocks.append(Text(f"next: gpunode verify --on {plan.engine}", Style.COMMAND))
    return tuple(blocks)


def shown(edit: FileEdit, kind: str) -> Change:
    """One edit; a rollback's edits are `restored`."""
    change = edit.change()
    restored = kind == "Rollback" and change.action in ("created", "updated")
    return Change(change.path, "restored", change.diff) if restored else change


def edit_blocks(edits: Iterable[FileEdit], kind: str, *, dry_run: bool) -> list[Block]:
    """A line for each edit; in a dry run also its diff."""
    blocks: list[Block] = []
    for edit in edits:
        if edit.before is None and edit.after is None:
            blocks.append(Text(f"{edit.path} unchanged (it does not exist)"))
        else:
            blocks += change_blocks((shown(edit, kind),), dry_run=dry_run)
    return blocks


def _about_restart(data: RuntimeConfiguration, request: Request, live: bool) -> list[Block]:
    restart = data.restart
    if restart.verb == "none":
        return []
    if restart.verb == "wait":
        return [Text(restart.reason, Style.DIM)]
    if restart.performed:
        return [Text(f"{data.engine} {restart.verb}ed in {restart.seconds:.1f} s: {restart.reason}")]
    command, reason = restart.command, Text(f"  {restart.reason}", Style.DIM)
    if live and not command:
        mark = "" if request.dry_run else "not done yet: "
        manual = f"{restart.verb} {data.engine} manually: systemd doesn't run it on this node"
        return [Text(f"{mark}{manual}", Style.PLAIN if request.dry_run else Style.WARN), reason]
    command = command or f"systemctl {restart.verb} {data.engine}"
    if request.dry_run:
        mark = "to run yourself afterwards" if request.no_restart else "would run"
        return [Text(f"{mark}: {command}", Style.COMMAND), reason]
    where = "" if live else " on that node"
    return [Text(f"not done yet, run{where}: {command}", Style.WARN), reason]


class Intent(NamedTuple):
    """One engine's part of a command: its name in the journal, the runtimes, planner and validator.

    `expected` is what the daemon must find in the new files, None for a removal. `require` raises if the node
    lacks something without which the change would do harm. `done` runs after success, also if no file had to
    change. `notes` are for the user. `cdi` names the engines that use the CDI specification from then on.
    """

    operation: str
    names: tuple[str, ...]
    plan: Callable[[Active | None], Plan]
    is_active: Callable[[Active], bool]
    expected: DesiredConfig | None = None
    kind: str = "RuntimeConfiguration"
    require: Callable[[], None] = lambda: None
    done: Callable[[], None] = lambda: None
    notes: tuple[str, ...] = ()
    cdi: tuple[str, ...] = ()


class Task(NamedTuple):
    """One engine's part of a change, planned and not yet started."""

    engine: Engine
    intent: Intent
    plan: Plan
    active: Active | None
    restarter: Restarter


Prepare = Callable[[tuple[Engine, ...], Journal], Iterable[Intent]]


def change(host: Host, request: Request, prepare: Prepare, progress: Progress) -> Result:
    """Carry out what `prepare` returns, an `Intent` for each engine; with `dry_run` only show it.

    Nothing is locked or written in a dry run.
    """
    find.check_names(request.runtimes)
    if not request.dry_run:
        _require_rights(host, request)
    restart = engine_restart(host, progress, request)
    with begin(host, restart, dry_run=request.dry_run) as (journal, notes):
        engines = find.engines(host, request)
        intents = tuple(prepare(engines, journal))
        tasks = tuple(_task(request, *pair) for pair in zip(engines, intents, strict=True))
        if request.dry_run:
            results = [_foreseen(task, request, notes) for task in tasks]
        else:
            results = _carry_out(request, tasks, journal, progress, notes)
    return combined(results)


def _require_rights(host: Host, request: Request) -> None:
    """Only a user's own rootless engine is changed without root."""
    if not host.live or host.is_root:
        return
    if not all(engine.daemon.user for engine in find.engines(host, request)):
        raise PreconditionError(
            "changing a container engine's configuration needs root", hint="run it again with sudo"
        )


def _task(request: Request, engine: Engine, intent: Intent) -> Task:
    restarter = restarter_of(engine, request.restart_command)
    if request.dry_run and not ENGINES[engine.daemon.name].asked:
        plan = intent.plan(None)
        if plan.changed:
            return Task(engine, intent, plan, None, restarter)
    active = engine.query_if_up()
    return Task(engine, intent, intent.plan(active), active, restarter)


def _carry_out(
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
    done: list[tuple[EngineJob, ApplyOutcome]] = []

    def each() -> None:
        for task in tasks:
            job = _job(request, task, progress)
            acts = task.plan.changed or (task.plan.verb != "none" and job.restarter is not None)
            done.append((job, apply(job, journal) if acts else ApplyOutcome(active=task.active)))

    attempt(each, lambda error: roll_back_all(done, journal, error))
    for task in tasks:
        task.intent.done()
    return [
        report(task, applied, request, notes + check_notes)
        for task, (_, applied), check_notes in zip(tasks, done, checked, strict=True)
    ]


def _job(request: Request, task: Task, progress: Progress) -> EngineJob:
    engine, plan, intent, active = task.engine, task.plan, task.intent, task.active
    acts = engine.host.live and not request.no_restart
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
    return EngineJob(
        engine=engine,
        plan=plan,
        operation=intent.operation,
        is_active=lambda answer: intent.is_active(answer.without(plan.remaining)),
        restarter=task.restarter if acts else None,
        progress=progress,
        query=not request.no_verify,
        context=context,
    )


def _foreseen(task: Task, request: Request, notes: tuple[str, ...]) -> Result:
    """The result of a dry run: the plan, and exit code 3 with the errors that would stop a real run."""
    engine, plan, active = task.engine, task.plan, task.active
    refusals = []
    for check in (task.intent.require, lambda: refuse(engine, plan, active, task.restarter, request)):
        try:
            check()
        except GpunodeError as error:
            info = error.info()
            refusals.append(info._replace(message=f"a real run would be refused: {info.message}"))
    if plan.own.changed and engine.host.live:
        notes = (
            *notes,
            f"not validated yet: a real run has {plan.engine} check the new file before it is written",
        )
    result = report(task, ApplyOutcome(active=active), request, notes)
    if not refusals:
        return result
    return replace(result, status="fail", exit_code=ExitCode.PRECONDITION, errors=tuple(refusals))


# Refusals of a change, before the first byte is written.


def refuse(engine: Engine, plan: Plan, active: Active | None, restarter: Restarter, request: Request) -> None:
    """`ConfigError` or `PreconditionError` if the files can't be written or the daemon can't be restarted."""
    for edit in plan.changed if engine.host.is_root or not request.dry_run else ():
        _refuse_unwritable(engine.host, edit.path)
    if plan.confirm and not request.agreed(f"{plan.confirm}. Continue?"):
        raise PreconditionError(
            plan.confirm,
            hint="remove them first, or continue with --yes",
            code="containers-running",
        )
    if plan.verb in ("none", "wait") or request.no_restart or not engine.host.live:
        return
    restarter.require(plan.verb, request.restart_hint)
    daemon = engine.daemon
    if request.socket and daemon.process and engine.host.socket_state(daemon.socket) == "absent":
        raise PreconditionError(
            f"{daemon.name} runs (pid {daemon.process.pid}) and {daemon.socket} does not exist",
            hint="leave out --socket, or name the daemon's own",
        )
    if active is None or plan.verb != "restart" or active.live_restore:
        return
    count = active.running_containers
    question = f"Restart {plan.engine} and stop {many(count, 'container')}?"
    if count > 0 and not request.agreed(question):
        raise PreconditionError(
            f"restarting {plan.engine} stops its {many(count, 'running container')}: {plan.reason}",
            hint="continue with --yes, or write now and restart later with --no-restart",
            code="containers-running",
        )


def _refuse_unwritable(host: Host, path: str) -> None:
    if host.is_symlink(path) and not host.exists(path):
        raise ConfigError(
            f"{path} is a symlink to {host.readlink(path)}, which does not exist",
            hint=f"create its target or remove the link: rm {path}",
        )
    if not host.writable(path):
        there = path if host.exists(path) else path.rpartition("/")[0]
        reason = "immutable, or on a read-only file system" if host.is_root else "closed to this user"
        look = f"lsattr -d {there}; findmnt -T {there}" if host.is_root else f"ls -ld {there}"
        raise PreconditionError(f"can't write {path}: it is {reason}", hint=f"look at it: {look}")
