"""`gpunode doctor --fix`: the plan that mends what was found, and with --apply the part that is safe."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from gpunode.checks.mending import Mend, due, mends
from gpunode.checks.runner import run_checks
from gpunode.commands import doctor
from gpunode.dataclass import dataclass, field, replace
from gpunode.errors import GpunodeError, PreconditionError, UsageError
from gpunode.host import Host
from gpunode.result import (
    Block,
    Change,
    ExitCode,
    Finding,
    FindingStatus,
    Progress,
    Result,
    Step,
    Style,
    Text,
)
from gpunode.runtime.steps import carry_out

ALLOWANCES = ("restart", "drain", "reboot")
_ROUNDS = 8  # mending a cause shows what waited for it; a chain is never that long
_BAD = (FindingStatus.FAIL, FindingStatus.WARN, FindingStatus.ERROR)
_WAYS = {
    "safe": "safe: --apply does it",
    "allow": "needs --allow {}",
    "hand": "by hand",
}


@dataclass(frozen=True)
class Options:
    """`doctor` says what is looked at. `apply` carries out what is safe, and what `allow` names besides
    (`ALLOWANCES`); without `fix` neither is meant."""

    doctor: doctor.Options = field(default_factory=doctor.Options)
    fix: bool = True
    apply: bool = False
    allow: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What became of one fix. `outcome` is mended, not-mended, done (it takes effect later), failed, or left:
    then `message` says why.

    `journal` is the entry that undoes its files, empty if it wrote none.
    """

    id: str
    outcome: str
    message: str
    commands: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    journal: str = ""


@dataclass(frozen=True)
class Fixes:
    """`data` of kind DoctorFixes. `plan` is what was found before, `done` is empty without --apply."""

    plan: tuple[Mend, ...]
    done: tuple[Outcome, ...]
    applied: bool


def run(host: Host, options: Options, progress: Progress) -> Result:
    """Plan, and carry out what is allowed. Exit 1 if an error is left that somebody has to mend.

    `UsageError` for an unknown check or allowance, `PreconditionError` where nothing may be changed.
    """
    for allowance in options.allow:
        if allowance not in ALLOWANCES:
            raise UsageError(f"there is no allowance {allowance!r}", hint=f"one of {', '.join(ALLOWANCES)}")
    if options.allow and not options.apply:
        allowed = " ".join(f"--allow {one}" for one in options.allow)
        raise UsageError("--allow goes with --fix --apply", hint=f"gpunode doctor --fix --apply {allowed}")
    if not options.fix:
        raise UsageError("--apply goes with --fix", hint="gpunode doctor --fix --apply")
    if options.apply:
        _require(host)
    findings = _look(host, options, progress)
    plan = mends(findings)
    done: tuple[Outcome, ...] = ()
    if options.apply:
        done, findings = _apply(host, options, findings, progress)
    return _result(Fixes(plan, done, options.apply), findings, options.doctor.strict)


def _require(host: Host) -> None:
    if not host.live:
        raise PreconditionError(
            "a fix is only carried out on the node itself", hint="run it there, without --root"
        )
    if not host.is_root:
        raise PreconditionError("carrying out a fix needs root", hint="run it again with sudo")


def _look(host: Host, options: Options, progress: Progress) -> tuple[Finding, ...]:
    return run_checks(doctor.node_of(host, options.doctor, progress), doctor.selected(options.doctor))


def _apply(
    host: Host, options: Options, findings: tuple[Finding, ...], progress: Progress
) -> tuple[tuple[Outcome, ...], tuple[Finding, ...]]:
    """Mend, look again, and mend what has come to light, each check once; what was done and is left."""
    done: dict[str, Outcome] = {}
    for _ in range(_ROUNDS):
        mend = _next(findings, options, done)
        if mend is None:
            break
        steps = due(mend, options.allow)
        outcome = _carry_out(host, mend, steps, progress)
        if outcome.outcome == "done" and not any(step.disruptive == "reboot" for step in steps):
            findings = _look(host, options, progress)
            outcome = _judged(outcome, findings, mend.steps[len(steps) :])
        done[mend.id] = outcome
    for mend in mends(findings):
        if mend.id not in done:
            done[mend.id] = Outcome(mend.id, "left", _way(mend))
    return tuple(done.values()), findings


def _next(findings: tuple[Finding, ...], options: Options, done: Collection[str]) -> Mend | None:
    """The next one that may be mended. A reboot comes last, and nothing after it."""
    found = [mend for mend in mends(findings) if mend.id not in done and due(mend, options.allow)]
    found.sort(key=lambda mend: any(step.disruptive == "reboot" for step in due(mend, options.allow)))
    return found[0] if found else None


def _carry_out(host: Host, mend: Mend, steps: Sequence[Step], progress: Progress) -> Outcome:
    try:
        did = carry_out(host, mend.id, steps, progress)
    except GpunodeError as error:
        hint = f" ({error.hint})" if error.hint else ""
        return Outcome(mend.id, "failed", f"{error.message}{hint}")
    return Outcome(mend.id, "done", "", did.commands, did.changes, did.journal)


def _judged(outcome: Outcome, findings: tuple[Finding, ...], rest: Sequence[Step]) -> Outcome:
    """With what the same check says now, and what of the fix is still to come."""
    now = next((finding for finding in findings if finding.id == outcome.id), None)
    if now is None or now.status not in _BAD:
        return replace(outcome, outcome="mended", message=now.summary if now else "")
    if rest:
        commands = " && ".join(" ".join(step.argv) for step in rest)
        return replace(outcome, message=f"it takes effect after: {commands} (--allow {rest[0].disruptive})")
    return replace(outcome, outcome="not-mended", message=now.summary)


def _result(fixes: Fixes, findings: tuple[Finding, ...], strict: bool) -> Result:
    counts = _BAD if strict else (FindingStatus.FAIL, FindingStatus.ERROR)
    left = any(finding.status in counts for finding in findings)
    failed = left or any(one.outcome in ("failed", "not-mended", "done") for one in fixes.done)
    return Result(
        "DoctorFixes",
        fixes,
        status="fail" if failed else "ok",
        exit_code=ExitCode.FAILED if failed else ExitCode.OK,
        blocks=tuple(_done(fixes) if fixes.applied else _planned(fixes)),
    )


def _planned(fixes: Fixes) -> Iterator[Block]:
    if not fixes.plan:
        yield Text("Nothing to mend", Style.GOOD)
        return
    for mend in fixes.plan:
        yield Text(f"{mend.id}: {mend.summary}", Style.HEADING)
        yield Text(f"  {mend.command}", Style.COMMAND)
        for step in mend.steps:
            if step.path and not step.link:
                yield Text(f"  writes {step.path}:", Style.DIM)
                yield from (Text(f"    {line}", Style.DIM) for line in step.content.splitlines())
        yield Text(f"  {_way(mend)}", Style.GOOD if mend.way == "safe" else Style.DIM)
    if any(mend.way == "safe" for mend in fixes.plan):
        yield Text("")
        yield Text("Carry out what is safe, as root: gpunode doctor --fix --apply", Style.COMMAND)


def _way(mend: Mend) -> str:
    return _WAYS[mend.way].format(mend.disruptive)


def _done(fixes: Fixes) -> Iterator[Block]:
    if not fixes.done:
        yield Text("Nothing to mend", Style.GOOD)
    styles = {
        "mended": Style.GOOD,
        "done": Style.WARN,
        "failed": Style.BAD,
        "not-mended": Style.BAD,
        "left": Style.DIM,
    }
    for one in fixes.done:
        yield Text(f"{one.id} {one.outcome}: {one.message}".removesuffix(": "), styles[one.outcome])
        yield from (Text(f"  {command}", Style.COMMAND) for command in one.commands)
        yield from (Text(f"  {change.path} {change.action}") for change in one.changes)
        if one.journal:
            yield Text(f"  undo it with: gpunode rollback {one.journal}", Style.DIM)
