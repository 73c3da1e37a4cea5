"""The whole way of one change: lock, recover, find, plan, check, apply, report."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

from gpunode.errors import ConfigError, GpunodeError, PreconditionError
from gpunode.host import Host
from gpunode.journal import Journal, lock_path
from gpunode.result import Progress, Result
from gpunode.runtime import find
from gpunode.runtime.apply import Applied, Job, apply
from gpunode.runtime.engine import Active, Engine, Plan, Wanted
from gpunode.runtime.recovery import ask_if_up, half_done, restarter_of, take_back
from gpunode.runtime.report import report
from gpunode.runtime.restart import Restarter

LOCK_SECONDS = 30.0


@dataclass(frozen=True)
class Request:
    """The options that every change takes, whatever it changes."""

    runtime: str = "auto"
    config: str = ""
    drop_in_config: str = ""
    socket: str = ""
    restart_command: str = ""
    dry_run: bool = False
    exit_code: bool = False
    no_restart: bool = False
    no_verify: bool = False
    yes: bool = False
    configures: bool = False


@dataclass(frozen=True)
class Intent:
    """What a command wants of one engine: its name for the journal, the runtime, its planner and its judge.

    `expected` is what the daemon must find in the new files, None for a removal. `require` raises if the node
    lacks something without which the change would do harm. `done` runs after success.
    """

    operation: str
    runtime_name: str
    plan: Callable[[Active | None], Plan]
    in_force: Callable[[Active], bool]
    expected: Wanted | None = None
    kind: str = "RuntimeConfiguration"
    require: Callable[[], None] = lambda: None
    done: Callable[[], None] = lambda: None


Prepare = Callable[[Engine, Journal], Intent]


def change(host: Host, request: Request, prepare: Prepare, progress: Progress) -> Result:
    """Carry out what `prepare` intends; with `dry_run` only show it: nothing is locked or written then."""
    find.check_name(request.runtime)
    journal = Journal.of(host)
    if not request.dry_run and host.live and not host.is_root:
        raise PreconditionError(
            "changing a container engine's configuration needs root", hint="run it again with sudo"
        )
    held = nullcontext() if request.dry_run else host.lock(lock_path(host), LOCK_SECONDS)
    with held:
        notes = (
            half_done(host, journal)
            if request.dry_run
            else take_back(host, request.restart_command, journal, progress)
        )
        engine = find.engine(host, request.runtime, request.config, request.drop_in_config, request.socket)
        intent = prepare(engine, journal)
        # what a daemon says can't change a plan that changes files, and asking takes time
        shown = intent.plan(None) if request.dry_run else None
        quick = shown is not None and shown.changed
        active = None if quick else ask_if_up(engine)
        plan = shown if quick and shown else intent.plan(active)
        restarter = restarter_of(host, request.restart_command, engine)
        if request.dry_run:
            notes += _foreseen(engine, plan, active, restarter, request, intent)
            return report(engine, plan, Applied(active=active), restarter, request, intent.kind, notes)
        intent.require()
        _refuse(engine, plan, active, restarter, request)
        applied = Applied(active=active)
        if plan.changed or (plan.verb != "none" and not request.no_restart and host.live):
            notes += engine.validate(plan, intent.expected) if plan.changed else ()
            applied = apply(_job(host, request, intent, engine, plan, active, progress), journal)
            intent.done()
        return report(engine, plan, applied, restarter, request, intent.kind, notes)


def _job(
    host: Host,
    request: Request,
    intent: Intent,
    engine: Engine,
    plan: Plan,
    active: Active | None,
    progress: Progress,
) -> Job:
    acts = host.live and not request.no_restart
    context = {
        "engine": plan.engine,
        "config": engine.daemon.config_path,
        "socket": engine.daemon.socket,
        "verb": plan.verb if acts else "none",
        "restartCommand": request.restart_command,
        "runtime": intent.runtime_name,
        "hadRuntime": plan.had_runtime,
        "activeBefore": {"handlers": list(active.handlers), "default": active.default} if active else None,
        "previousDefault": plan.previous_default,
    }
    restarter = restarter_of(host, request.restart_command, engine) if acts else None
    return Job(
        host,
        engine,
        plan,
        intent.operation,
        intent.in_force,
        restarter,
        progress,
        not request.no_verify,
        context,
    )


def _refuse(
    engine: Engine, plan: Plan, active: Active | None, restarter: Restarter, request: Request
) -> None:
    """Everything that speaks against the change is said before the first byte is written."""
    for edit in plan.changed if engine.host.is_root or not request.dry_run else ():
        _refuse_unwritable(engine.host, edit.path)
    if plan.verb == "none" or request.no_restart or not engine.host.live:
        return
    restarter.require(plan.verb)
    stops = active is not None and active.running_containers > 0 and not active.live_restore
    if plan.verb == "restart" and stops and active is not None and not request.yes:
        raise PreconditionError(
            f"restarting Docker stops its {active.running_containers} running container(s): {plan.reason}",
            hint="go on all the same with --yes, or write now and restart later with --no-restart",
            code="containers-running",
        )


def _foreseen(
    engine: Engine,
    plan: Plan,
    active: Active | None,
    restarter: Restarter,
    request: Request,
    intent: Intent,
) -> tuple[str, ...]:
    """What would become of the shown change: a refusal that is known already, and what wasn't checked."""
    notes = []
    if active is None and plan.verb == "restart" and engine.daemon.name == "docker":
        active = ask_if_up(engine)  # only Docker's containers end with it
    for check in (intent.require, lambda: _refuse(engine, plan, active, restarter, request)):
        try:
            check()
        except GpunodeError as error:
            notes.append(f"a real run would refuse this: {error.message}; {error.hint}")
    if plan.changed and engine.host.live:
        notes.append(
            f"not validated: {plan.engine} itself reads staged copies first when this is not a dry run"
        )
    return tuple(notes)


def _refuse_unwritable(host: Host, path: str) -> None:
    if host.is_symlink(path) and not host.exists(path):
        raise ConfigError(
            f"{path} is a symlink to {host.readlink(path)}, which does not exist",
            hint=f"create its target or remove the link: rm {path}",
        )
    if not host.writable(path):
        raise PreconditionError(f"can't write {path}", hint=f"look at it: ls -ld {path}; findmnt -T {path}")
