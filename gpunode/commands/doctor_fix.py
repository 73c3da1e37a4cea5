"""`gpunode doctor --fix`: the plan that fixes the findings, and with --apply its safe fixes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

from gpunode.checks.finding import Finding, FindingStatus, Step
from gpunode.checks.fixes import PlannedFix, allowed_steps, planned_fixes
from gpunode.checks.report import in_order
from gpunode.errors import DaemonError, GpunodeError, PreconditionError, UsageError
from gpunode.gpu.child import module_argv
from gpunode.host import Host
from gpunode.host.journal import FileEdit
from gpunode.host.transaction import Restart, attempt, change_files
from gpunode.output.result import Block, Change, ExitCode, Progress, Result, Style, Text
from gpunode.packages.apply import CarriedOut
from gpunode.runtime.restart import engine_restart

ALLOWANCES = ("restart", "drain", "reboot")
_ROUNDS = 8  # fixing a cause shows the findings that waited for it; a chain is never that long
_BAD = (FindingStatus.FAIL, FindingStatus.WARN, FindingStatus.ERROR)
_WAYS = {
    "safe": "safe: --apply does it",
    "allow": "needs {}",
    "hand": "manual",
}


class Outcome(NamedTuple):
    """Result of one fix. `outcome` is mended, not-mended, done (it takes effect later), failed, or left: then
    `message` says why.

    `journal` is the entry that undoes its files, empty if it wrote none.
    """

    id: str
    outcome: str
    message: str
    commands: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    journal: str = ""


class Fixes(NamedTuple):
    """`data` of kind DoctorFixes. `plan` has the fixes for the first findings, `done` is empty without
    --apply."""

    plan: tuple[PlannedFix, ...]
    done: tuple[Outcome, ...]
    applied: bool


def run(
    host: Host,
    examine: Callable[[], tuple[Finding, ...]],
    progress: Progress,
    *,
    strict: bool,
    apply: bool,
    allow: Collection[str],
) -> Result:
    """Plan fixes for the findings of `examine`; with `apply` carry out the safe ones, and those of
    `ALLOWANCES` that `allow` names. Exit 1 if an error is left. `PreconditionError` where changes aren't
    allowed."""
    if apply:
        _require(host)
    findings = examine()
    plan = planned_fixes(in_order(findings))
    outcomes: tuple[Outcome, ...] = ()
    if apply:
        outcomes, findings = _apply(host, examine, findings, allow, progress)
    return _result(Fixes(plan, outcomes, apply), findings, strict)


def refuse(fix: bool, apply: bool, allow: Collection[str]) -> None:
    """`UsageError` for an unknown allowance, and for --apply or --allow without the options that they
    need."""
    for allowance in allow:
        if allowance not in ALLOWANCES:
            raise UsageError(f"there is no allowance {allowance!r}", hint=f"one of {', '.join(ALLOWANCES)}")
    if allow and not apply:
        allowed = " ".join(f"--allow {name}" for name in allow)
        raise UsageError("--allow goes with --fix --apply", hint=f"gpunode doctor --fix --apply {allowed}")
    if not fix:
        raise UsageError("--apply goes with --fix", hint="gpunode doctor --fix --apply")


def _require(host: Host) -> None:
    if not host.live:
        raise PreconditionError(
            "a fix is only carried out on the node itself", hint="run it there, without --root"
        )
    if not host.is_root:
        raise PreconditionError("carrying out a fix needs root", hint="run it again with sudo")


def _apply(
    host: Host,
    examine: Callable[[], tuple[Finding, ...]],
    findings: tuple[Finding, ...],
    allow: Collection[str],
    progress: Progress,
) -> tuple[tuple[Outcome, ...], tuple[Finding, ...]]:
    """Carry out fixes and run the checks again until no new fix is left, each check once; return the
    results."""
    outcomes: dict[str, Outcome] = {}
    for _ in range(_ROUNDS):
        planned = _next_fix(findings, allow, outcomes)
        if planned is None:
            break
        steps = allowed_steps(planned, allow)
        outcome = _try_fix(host, planned, steps, progress)
        if outcome.outcome == "done" and not any(step.disruptive == "reboot" for step in steps):
            findings = examine()
            outcome = _with_finding(outcome, findings, planned.steps[len(steps) :])
        outcomes[planned.id] = outcome
    for planned in planned_fixes(in_order(findings)):
        if planned.id not in outcomes:
            outcomes[planned.id] = Outcome(planned.id, "left", _permission(planned))
    return tuple(outcomes.values()), findings


def _next_fix(
    findings: tuple[Finding, ...], allow: Collection[str], attempted: Collection[str]
) -> PlannedFix | None:
    """The next fix that may be carried out. A reboot comes last, with no fix after it."""
    candidates = [
        planned
        for planned in planned_fixes(in_order(findings))
        if planned.id not in attempted and allowed_steps(planned, allow)
    ]
    candidates.sort(
        key=lambda planned: any(step.disruptive == "reboot" for step in allowed_steps(planned, allow))
    )
    return candidates[0] if candidates else None


def _try_fix(host: Host, planned: PlannedFix, steps: Sequence[Step], progress: Progress) -> Outcome:
    try:
        carried_out = carry_out(host, planned.id, steps, engine_restart(host, progress), progress)
    except GpunodeError as error:
        hint = f" ({error.hint})" if error.hint else ""
        return Outcome(planned.id, "failed", f"{error.message}{hint}")
    for note in carried_out.notes:
        progress.note(note)
    return Outcome(planned.id, "done", "", carried_out.commands, carried_out.changes, carried_out.journal)


def _with_finding(outcome: Outcome, findings: tuple[Finding, ...], remaining: Sequence[Step]) -> Outcome:
    """The result with the same check's current finding, and the part of the fix that remains."""
    now = next((finding for finding in findings if finding.id == outcome.id), None)
    if now is None or now.status not in _BAD:
        return outcome._replace(outcome="mended", message=now.summary if now else "")
    if remaining:
        commands = " && ".join(" ".join(step.argv) for step in remaining)
        return outcome._replace(
            message=f"it takes effect after: {commands} (--allow {remaining[0].disruptive})"
        )
    return outcome._replace(outcome="not-mended", message=now.summary)


def _result(fixes: Fixes, findings: tuple[Finding, ...], strict: bool) -> Result:
    counts = _BAD if strict else (FindingStatus.FAIL, FindingStatus.ERROR)
    has_faults = any(finding.status in counts for finding in findings)
    failed = has_faults or any(outcome.outcome in ("failed", "not-mended", "done") for outcome in fixes.done)
    return Result(
        "DoctorFixes",
        fixes,
        status="fail" if failed else "ok",
        exit_code=ExitCode.FAILED if failed else ExitCode.OK,
        blocks=tuple(_outcome_blocks(fixes) if fixes.applied else _plan_blocks(fixes)),
    )


def _plan_blocks(fixes: Fixes) -> Iterator[Block]:
    if not fixes.plan:
        yield Text("Nothing to fix", Style.GOOD)
        return
    for planned in fixes.plan:
        yield Text(f"{planned.id}: {planned.summary}", Style.HEADING)
        yield Text(f"  {planned.command}", Style.COMMAND)
        for step in planned.steps:
            if step.path and not step.link:
                yield Text(f"  writes {step.path}:", Style.DIM)
                yield from (Text(f"    {line}", Style.DIM) for line in step.content.splitlines())
        yield Text(f"  {_permission(planned)}", Style.GOOD if planned.way == "safe" else Style.DIM)
    if any(planned.way == "safe" for planned in fixes.plan):
        yield Text("")
        yield Text("Apply the safe fixes, as root: gpunode doctor --fix --apply", Style.COMMAND)


def _permission(planned: PlannedFix) -> str:
    if planned.look:
        return "manual: it only shows the cause"
    needed = dict.fromkeys(step.disruptive for step in planned.steps if step.disruptive != "none")
    allowances = " ".join(f"--allow {allowance}" for allowance in needed)
    if planned.way == "safe" and needed:
        left = " && ".join(" ".join(step.argv) for step in planned.steps[len(allowed_steps(planned, ())) :])
        return f"{_WAYS['safe']}, except for {left}, which needs {allowances}"
    return _WAYS[planned.way].format(allowances)


def _outcome_blocks(fixes: Fixes) -> Iterator[Block]:
    if not fixes.done:
        yield Text("Nothing to fix", Style.GOOD)
    styles = {
        "mended": Style.GOOD,
        "done": Style.WARN,
        "failed": Style.BAD,
        "not-mended": Style.BAD,
        "left": Style.DIM,
    }
    for outcome in fixes.done:
        yield Text(
            f"{outcome.id} {outcome.outcome}: {outcome.message}".removesuffix(": "), styles[outcome.outcome]
        )
        yield from (Text(f"  {command}", Style.COMMAND) for command in outcome.commands)
        yield from (Text(f"  {change.path} {change.action}") for change in outcome.changes)
        if outcome.journal:
            yield Text(f"  undo it with: gpunode rollback {outcome.journal}", Style.DIM)


# Execution of a fix's steps: files through the journal, programs without a shell, links.

_OPERATION = "doctor-fix"
_SECONDS = 120.0  # an initramfs build, or a daemon that stops slowly
_OURS = "gpunode"


def carry_out(
    host: Host, check: str, steps: Sequence[Step], restart: Restart, progress: Progress
) -> CarriedOut:
    """Write files first, then create links and run programs in their order; roll back on failure.

    Everything runs under the lock and is recorded in the journal. gpunode's own commands take the lock
    themselves, so they run without it: what was done before one of them stays if it fails.
    `restart` restarts the engine of another command's killed run; see `host.transaction.begin`.
    `DaemonError` for a program that fails, or `RolledBackError` if files were rolled back because of it.
    `PreconditionError` if this user has no permission.
    """
    files = [step for step in steps if step.path and not step.link]
    actions = [step for step in steps if step.argv or step.link]
    parts = [(own, list(part)) for own, part in groupby(actions, lambda step: step.argv[:1] == (_OURS,))]
    if files and (not parts or parts[0][0]):
        parts.insert(0, (False, []))
    done = CarriedOut()
    for own, part in parts:
        if own:
            _run(host, part, progress)
        commands = tuple(" ".join(step.argv or ("ln", "-s", step.link, step.path)) for step in part)
        changed = change_files(
            host,
            _OPERATION,
            partial(_edits, host, files),
            restart,
            context={"check": check, "commands": list(commands)},
            activate=partial(_run, host, [] if own else part, progress),
            always_activate=bool(part),
        )
        files = []
        done = CarriedOut(
            (*done.changes, *changed.changes),
            (*done.commands, *commands),
            done.journal or changed.journal,
            (*done.notes, *changed.notes),
        )
    return done


def _edits(host: Host, files: Sequence[Step]) -> tuple[FileEdit, ...]:
    return tuple(FileEdit(step.path, host.read_bytes(step.path), step.content.encode()) for step in files)


def _run(host: Host, steps: Sequence[Step], progress: Progress) -> None:
    links: list[str] = []

    def run_steps() -> None:
        for step in steps:
            if step.link:
                links.extend(_link(host, step))
            else:
                _call(host, step.argv, progress)

    def remove_links(_error: BaseException) -> None:
        for path in links:
            host.remove(path)

    attempt(run_steps, remove_links)


def _link(host: Host, step: Step) -> list[str]:
    if host.readlink(step.path) == step.link:
        return []
    if host.is_symlink(step.path) or host.exists(step.path):
        raise PreconditionError(
            f"{step.path} already exists and is something else", hint=f"inspect it: ls -l {step.path}"
        )
    host.make_dirs(step.path.rpartition("/")[0])
    host.make_link(step.path, step.link)
    return [step.path]


def _call(host: Host, argv: tuple[str, ...], progress: Progress) -> None:
    command = module_argv(_OURS, *argv[1:]) if argv[0] == _OURS else argv
    with progress.step(" ".join(argv)):
        completed = host.run(command, timeout=_SECONDS)
    if not completed.ok:
        output_lines = (completed.stderr or completed.stdout).strip().splitlines()
        reason = (
            "timed out"
            if completed.timed_out
            else (output_lines[-1] if output_lines else f"exit code {completed.code}")
        )
        raise DaemonError(
            f"{' '.join(argv)}: {reason}", hint="run the command manually to see its whole output"
        )
