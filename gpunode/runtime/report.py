"""What a change of an engine's configuration came to, for programs and for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpunode.dataclass import dataclass, replace
from gpunode.result import Block, Change, Diff, ExitCode, Result, Style, Text
from gpunode.runtime.apply import Applied
from gpunode.runtime.engine import FileEdit, Plan
from gpunode.runtime.request import Request

if TYPE_CHECKING:
    from gpunode.runtime.workflow import Task


@dataclass(frozen=True)
class RestartReport:
    """`verb` is none, reload or restart; `seconds` is 0 if it wasn't performed. `command` is what does it."""

    verb: str
    performed: bool
    seconds: float
    command: str
    reason: str


@dataclass(frozen=True)
class ActiveReport:
    """What the running daemon said: its handlers (comma separated names) and its default runtime."""

    handler: tuple[str, ...]
    default: str


@dataclass(frozen=True)
class RuntimeConfiguration:
    """`data` of the envelope. `config_version` is null for docker, `active` if the daemon wasn't asked."""

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
    """`data` of the envelope when several engines were named; the order is theirs."""

    engines: tuple[RuntimeConfiguration, ...]


def combined(results: Sequence[Result]) -> Result:
    """One result of several engines' results; a single one is left as it is."""
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


def report(task: Task, applied: Applied, request: Request, notes: tuple[str, ...]) -> Result:
    """The result of a plan that was carried out, or would be."""
    engine, plan, restarter, kind = task.engine, task.plan, task.restarter, task.intent.kind
    pending = bool(plan.changed) or plan.verb != "none"
    command = restarter.shown(plan.verb) if plan.verb != "none" else ""
    performed = applied.performed and plan.verb not in ("none", "wait")
    active = applied.active or (task.active if plan.verb == "none" else None)
    data = RuntimeConfiguration(
        engine=plan.engine,
        engine_version=".".join(map(str, engine.daemon.version)),
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
    blocks = _blocks(plan, data, request, engine.host.live, kind)
    return Result(
        kind, data, exit_code=ExitCode.FAILED if fails else ExitCode.OK, messages=messages, blocks=blocks
    )


def _blocks(
    plan: Plan, data: RuntimeConfiguration, request: Request, live: bool, kind: str
) -> tuple[Block, ...]:
    blocks: list[Block] = []
    for change, edit in zip(data.changes, plan.edits, strict=True):
        mark = " (dry run)" if request.dry_run and change.action != "unchanged" else ""
        mark = " (it does not exist)" if edit.before is None and edit.after is None else mark
        style = Style.PLAIN if change.action == "unchanged" else Style.GOOD
        blocks.append(Text(f"{change.path} {change.action}{mark}", style))
        if request.dry_run and change.diff:
            blocks.append(Diff(change.diff))
    blocks += _about_restart(data, request, live)
    if request.dry_run:
        return tuple(blocks)
    if data.active is not None:
        handlers = ", ".join(data.active.handler)
        seen = f"{plan.engine} has the runtimes {handlers}; default: {data.active.default}"
        blocks.append(Text(seen, Style.GOOD))
    if data.journal and kind != "Rollback":
        blocks.append(Text(f"undo it with: gpunode rollback {data.journal}", Style.DIM))
    if data.active is not None and request.configures:
        blocks.append(Text(f"next: gpunode verify --on {plan.engine}", Style.COMMAND))
    return tuple(blocks)


def shown(edit: FileEdit, kind: str) -> Change:
    """One edit; what a rollback writes is `restored`."""
    change = edit.change()
    restored = kind == "Rollback" and change.action in ("created", "updated")
    return Change(change.path, "restored", change.diff) if restored else change


def _about_restart(data: RuntimeConfiguration, request: Request, live: bool) -> list[Block]:
    restart = data.restart
    if restart.verb == "none":
        return []
    if restart.verb == "wait":
        return [Text(restart.reason, Style.DIM)]
    if restart.performed:
        return [Text(f"{data.engine} {restart.verb}ed in {restart.seconds:.1f} s: {restart.reason}")]
    command = restart.command or f"systemctl {restart.verb} {data.engine}"
    if request.dry_run:
        return [Text(f"would run: {command}", Style.COMMAND), Text(f"  {restart.reason}", Style.DIM)]
    where = "" if live else " on that node"
    return [Text(f"not done yet, run{where}: {command}", Style.WARN), Text(f"  {restart.reason}", Style.DIM)]
