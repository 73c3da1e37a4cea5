"""`gpunode doctor`: what is wrong with this node, root cause first. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpunode import __version__
from gpunode.checks.catalogue import find_check
from gpunode.checks.fixes import PlannedFix, allowed_steps, planned_fixes
from gpunode.checks.model import PREFLIGHTS
from gpunode.checks.patience import Patience
from gpunode.checks.report import behind, blocks, describe, first, gpus_not_examined, reboot
from gpunode.checks.runner import EVERY, Selection, run_checks
from gpunode.checks.steps import carry_out
from gpunode.commands import doctor_compare
from gpunode.commands.options import Strings
from gpunode.commands.session import Session, verb
from gpunode.errors import ConfigError, GpunodeError, PreconditionError, UsageError
from gpunode.facts.cuda import release_of
from gpunode.facts.node import Node, Questions, Trial
from gpunode.facts.tables import all_tables
from gpunode.host import Host
from gpunode.output.render import ENVELOPES, Output
from gpunode.output.result import (
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
from gpunode.runtime.apply import engine_restart

if TYPE_CHECKING:
    from collections.abc import Mapping


# What the doctor tries on --deep: things that are run on the node and leave nothing behind.

_SECONDS = 15.0  # for the GPU alone; the image and the container take a few more


def trials(progress: Progress) -> Mapping[str, Callable[[Host, str], Trial]]:
    """By engine: a vector-add in a container, on the GPU with this UUID."""
    return {"docker": partial(_in_container, "docker", progress)}


def _in_container(engine: str, progress: Progress, host: Host, uuid: str) -> Trial:
    from gpunode.commands.verify import in_container
    from gpunode.runtime.verify.container import ContainerRequest

    try:
        answer, via = in_container(host, ContainerRequest(engine, timeout=_SECONDS), (uuid,), progress)
    except PreconditionError as error:
        return Trial(None, error.message)
    except GpunodeError as error:
        return Trial(False, f"{error.message}; {error.hint}" if error.hint else error.message)
    wrong = answer.error or next((one.message for one in answer.devices if one.status != "ok"), "")
    if wrong or not answer.devices:
        return Trial(False, f"{via}: {wrong or 'the program saw no GPU'}")
    return Trial(True, f"vector-add on {uuid} by {via}")


_TOP = ("/proc", "/sys", "/etc")  # every machine has them, mounted or recorded
_ABOUT_SECONDS = 8.0  # an engine that tells its version by its program alone is given five
EVERYTHING = Selection()
NO_QUESTIONS = Questions()


def run(
    host: Host,
    progress: Progress,
    selection: Selection = EVERYTHING,
    questions: Questions = NO_QUESTIONS,
    *,
    strict: bool = False,
    explain: bool = False,
) -> Result:
    """Judge the node; exit 1 for an error, with `strict` for a warning too. `explain` shows what waits for
    what."""
    started = host.monotonic()
    node = node_of(host, questions, progress)
    findings = run_checks(node, selection)
    counts = {status.value: sum(finding.status is status for finding in findings) for status in FindingStatus}
    status = overall(findings)
    failed = status in ("fail", "error") or (strict and status == "warn")
    about, tables = _about(node), reference(host.now())
    data = {
        "node": about,
        "findings": findings,
        "counts": counts,
        "selection": {
            "only": list(selection.only),
            "skip": list(selection.skip),
            "preflight": selection.preflight,
        },
        "first": first(findings),
        "chains": behind(findings),
        "reboot": reboot(findings),
        "gpusNotExamined": gpus_not_examined(findings, about["class"]),
        "tables": tables,
        "at": round(host.now(), 3),
        "seconds": round(host.monotonic() - started, 3),
        "version": __version__,
    }
    return Result(
        "DoctorReport",
        data,
        status=status,
        exit_code=ExitCode.FAILED if failed else ExitCode.OK,
        blocks=blocks(about, findings, explain, tables, selection),
        documents={"html": _page, "prometheus": _metrics},
    )


def node_of(host: Host, questions: Questions, progress: Progress) -> Node:
    """The node, with what the checks are asked and what a deep one may run on it. `PreconditionError` for a
    root directory that isn't a machine's."""
    missing = [name for name in _TOP if _lacks(host, name)]
    if missing and not host.live:
        raise PreconditionError(
            f"{host.root} isn't the root directory of a machine: it has no {' and no '.join(missing)}",
            hint="name a mounted host (--root /host), a recorded machine or a support bundle",
            code="not-a-machine",
        )
    return Node(host, questions, trials(progress) if questions.deep else {})


def _lacks(host: Host, directory: str) -> bool:
    try:
        return not host.is_dir(directory)
    except ConfigError:
        return False  # a malformed recording, which the checks report


def _about(node: Node) -> dict[str, Any]:
    """Of the node itself. Checks that weren't wanted haven't asked for all of it, and any of it may hang."""
    with Patience(node.host, _ABOUT_SECONDS) as patience:
        return describe(node, patience.ask)


def _page(envelope: dict[str, Any]) -> str:
    from gpunode.output.html import page

    return page(envelope)


def _metrics(envelope: dict[str, Any]) -> str:
    from gpunode.output.prometheus import metrics

    return metrics(envelope)


def refuse_no_release(cuda: str) -> None:
    """`UsageError` for what is no CUDA release."""
    if cuda and release_of(cuda) is None:
        raise UsageError(f"--cuda {cuda}: no CUDA release", hint="two numbers, such as 12.8")


def selected(
    only: Sequence[str] = (), skip: Sequence[str] = (), ignore: Sequence[str] = (), preflight: str = ""
) -> Selection:
    """The checks by the words of a command line: each an id, or several with commas between, in `skip` and
    `ignore` with ``:REASON`` behind it if there is one; `ignore` may be ``all``.

    `UsageError` names the nearest ids for an unknown one.
    """
    only = tuple(_reasons(only, reasons=False))
    skipped, ignored = _reasons(skip), _reasons(ignore)
    for identifier in (*only, *skipped, *ignored):
        if not (identifier == EVERY and identifier in ignored):
            find_check(identifier)
    if preflight and preflight not in PREFLIGHTS:
        raise UsageError(f"there is no preflight {preflight!r}", hint=f"one of {', '.join(PREFLIGHTS)}")
    if preflight and only and not any(preflight in find_check(one).preflight for one in only):
        raise UsageError(
            f"--preflight {preflight} has none of these checks: {', '.join(only)}",
            hint="leave one of them out",
        )
    return Selection(only, skipped, ignored, preflight)


def _reasons(given: Sequence[str], *, reasons: bool = True) -> dict[str, str]:
    """``ID`` or, with `reasons`, ``ID:REASON``, several ids with commas between."""
    found = {}
    for item in given:
        identifier, _, reason = item.partition(":") if reasons else (item, "", "")
        for one in identifier.split(","):
            found[one.strip()] = reason.strip()
    return found


def overall(findings: tuple[Finding, ...]) -> str:
    """The worst there is: fail, error (a check broke), warn or ok."""
    statuses = {finding.status for finding in findings}
    for status in (FindingStatus.FAIL, FindingStatus.ERROR, FindingStatus.WARN):
        if status in statuses:
            return status.value
    return "ok"


def reference(now: float) -> list[dict[str, Any]]:
    """The reference tables that checks judge by, and how many days old they are at `now`."""
    return [
        {"name": one.name, "date": one.date, "source": one.source, "ageDays": one.age_days(now)}
        for one in all_tables()
    ]


# `gpunode doctor --fix`: the plan that mends what was found, and with --apply the part that is safe.

ALLOWANCES = ("restart", "drain", "reboot")
_ROUNDS = 8  # mending a cause shows what waited for it; a chain is never that long
_BAD = (FindingStatus.FAIL, FindingStatus.WARN, FindingStatus.ERROR)
_WAYS = {
    "safe": "safe: --apply does it",
    "allow": "needs --allow {}",
    "hand": "by hand",
}


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

    plan: tuple[PlannedFix, ...]
    done: tuple[Outcome, ...]
    applied: bool


def run_fix(
    host: Host,
    progress: Progress,
    selection: Selection = EVERYTHING,
    questions: Questions = NO_QUESTIONS,
    *,
    strict: bool = False,
    apply: bool = False,
    allow: Collection[str] = (),
) -> Result:
    """Plan; with `apply` carry out what is safe, and what `allow` names of `ALLOWANCES`. Exit 1 if an error
    is left that somebody has to mend. `PreconditionError` where nothing may be changed."""

    def look() -> tuple[Finding, ...]:
        return run_checks(node_of(host, questions, progress), selection)

    if apply:
        _require(host)
    findings = look()
    plan = planned_fixes(findings)
    done: tuple[Outcome, ...] = ()
    if apply:
        done, findings = _apply(host, look, findings, allow, progress)
    return _result(Fixes(plan, done, apply), findings, strict)


def _refuse_fix(fix: bool, apply: bool, allow: Collection[str]) -> None:
    """`UsageError` for an unknown allowance, and for --apply or --allow without what they go with."""
    for allowance in allow:
        if allowance not in ALLOWANCES:
            raise UsageError(f"there is no allowance {allowance!r}", hint=f"one of {', '.join(ALLOWANCES)}")
    if allow and not apply:
        allowed = " ".join(f"--allow {one}" for one in allow)
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
    look: Callable[[], tuple[Finding, ...]],
    findings: tuple[Finding, ...],
    allow: Collection[str],
    progress: Progress,
) -> tuple[tuple[Outcome, ...], tuple[Finding, ...]]:
    """Carry out fixes and run the checks again until no new fix is left, each check once; what was done."""
    done: dict[str, Outcome] = {}
    for _ in range(_ROUNDS):
        planned = _next(findings, allow, done)
        if planned is None:
            break
        steps = allowed_steps(planned, allow)
        outcome = _carry_out(host, planned, steps, progress)
        if outcome.outcome == "done" and not any(step.disruptive == "reboot" for step in steps):
            findings = look()
            outcome = _judged(outcome, findings, planned.steps[len(steps) :])
        done[planned.id] = outcome
    for planned in planned_fixes(findings):
        if planned.id not in done:
            done[planned.id] = Outcome(planned.id, "left", _way(planned))
    return tuple(done.values()), findings


def _next(findings: tuple[Finding, ...], allow: Collection[str], done: Collection[str]) -> PlannedFix | None:
    """The next fix that may be carried out. A reboot comes last, and nothing after it."""
    found = [
        planned
        for planned in planned_fixes(findings)
        if planned.id not in done and allowed_steps(planned, allow)
    ]
    found.sort(key=lambda planned: any(step.disruptive == "reboot" for step in allowed_steps(planned, allow)))
    return found[0] if found else None


def _carry_out(host: Host, planned: PlannedFix, steps: Sequence[Step], progress: Progress) -> Outcome:
    try:
        did = carry_out(host, planned.id, steps, engine_restart(host, progress), progress)
    except GpunodeError as error:
        hint = f" ({error.hint})" if error.hint else ""
        return Outcome(planned.id, "failed", f"{error.message}{hint}")
    return Outcome(planned.id, "done", "", did.commands, did.changes, did.journal)


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
    for planned in fixes.plan:
        yield Text(f"{planned.id}: {planned.summary}", Style.HEADING)
        yield Text(f"  {planned.command}", Style.COMMAND)
        for step in planned.steps:
            if step.path and not step.link:
                yield Text(f"  writes {step.path}:", Style.DIM)
                yield from (Text(f"    {line}", Style.DIM) for line in step.content.splitlines())
        yield Text(f"  {_way(planned)}", Style.GOOD if planned.way == "safe" else Style.DIM)
    if any(planned.way == "safe" for planned in fixes.plan):
        yield Text("")
        yield Text("Carry out what is safe, as root: gpunode doctor --fix --apply", Style.COMMAND)


def _way(planned: PlannedFix) -> str:
    return _WAYS[planned.way].format(planned.disruptive)


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


# The verbs that only look: what is wrong with this node, and what a check is about.

doctor_app = typer.Typer(rich_markup_mode=None)


class Preflight(StrEnum):
    """What `doctor --preflight` clears the way for."""

    DOCKER = "docker"
    CONTAINERD = "containerd"
    CRIO = "crio"
    PODMAN = "podman"
    KUBERNETES = "kubernetes"


OnlyOption = Annotated[Strings, typer.Option("--only", metavar="ID", help="Run this check (repeatable).")]
SkipOption = Annotated[
    Strings, typer.Option("--skip", metavar="ID[:REASON]", help="Leave this check out (repeatable).")
]
IgnoreOption = Annotated[
    Strings,
    typer.Option(
        "--ignore",
        metavar="ID[:REASON]|all",
        help="Count this check's error as a warning; it is still shown (repeatable).",
    ),
]
StrictOption = Annotated[bool, typer.Option("--strict", help="Let warnings count: exit 1.")]
PreflightOption = Annotated[
    Preflight | None, typer.Option("--preflight", help="Only what would block the installation of this.")
]
ExpectOption = Annotated[
    int | None,
    typer.Option("--expect-gpus", metavar="N", min=0, help="How many GPUs this node should have."),
]
CudaOption = Annotated[
    str, typer.Option("--cuda", metavar="X.Y", help="Also ask whether programs of this CUDA run here.")
]
ImageOption = Annotated[
    str,
    typer.Option(
        "--image", metavar="REF", help="Also compare what this container image requires; none is pulled."
    ),
]
DeepOption = Annotated[
    bool, typer.Option("--deep", help="Also run something: a container, the device plugin's RPCs.")
]
ExplainOption = Annotated[
    bool, typer.Option("--explain", help="Show which check waits for which root cause.")
]
FixOption = Annotated[
    bool, typer.Option("--fix", help="Show the plan that mends what is found, or only the named checks.")
]
ApplyOption = Annotated[
    bool, typer.Option("--apply", help="With --fix: carry out what is safe, and look again.")
]
AllowOption = Annotated[
    Strings,
    typer.Option(
        "--allow",
        metavar="restart|drain|reboot",
        help="With --apply: also what restarts daemons, stops GPU work, or reboots (repeatable).",
    ),
]
ChecksArgument = Annotated[
    Strings,
    typer.Argument(metavar="[ID]...", help="Only these checks, as with --only; with --compare, files."),
]
FileOption = Annotated[
    str,
    typer.Option(
        "--output-file",
        metavar="PATH",
        help="Write the report to this file in one step; -o or its ending says in which form.",
    ),
]
CompareOption = Annotated[
    bool, typer.Option("--compare", help="Show where the nodes of these reports or bundles differ.")
]


@verb(doctor_app, "doctor", "DoctorReport")
def doctor(
    session: Session,
    checks: ChecksArgument = None,
    only: OnlyOption = None,
    skip: SkipOption = None,
    ignore: IgnoreOption = None,
    strict: StrictOption = False,
    preflight: PreflightOption = None,
    expect_gpus: ExpectOption = None,
    cuda: CudaOption = "",
    image: ImageOption = "",
    deep: DeepOption = False,
    explain: ExplainOption = False,
    fix: FixOption = False,
    apply: ApplyOption = False,
    allow: AllowOption = None,
    compare: CompareOption = False,
    output_file: FileOption = "",
) -> Result:
    """Find out why GPUs don't work on this node. Tells the root cause and the command that mends it.

    Changes nothing without --fix --apply. Without root, what it can't read is skipped and named.

    gpunode doctor

    gpunode doctor -o json --only driver-lib-mismatch

    gpunode doctor --preflight containerd --expect-gpus 8

    gpunode doctor --fix uvm-not-loaded --apply

    gpunode doctor --output-file node7.html

    gpunode doctor --compare node1.json node2.json node3.tar.gz
    """
    _only_whole(session, output_file, compare=compare, fix=fix)
    if compare:
        chosen = {"only": only, "skip": skip, "ignore": ignore, "preflight": preflight}
        asked = {"expect_gpus": expect_gpus, "cuda": cuda, "image": image, "deep": deep, "explain": explain}
        _no_diagnosis(session.host, **chosen, **asked)
        return doctor_compare.run(checks or (), strict=strict)
    fixing = bool(fix or apply or allow)
    allowed = tuple(one for given in allow or () for one in given.split(","))
    if fixing:
        _refuse_fix(fix, apply, allowed)
    selection = selected(
        (*(checks or ()), *(only or ())), skip or (), ignore or (), preflight.value if preflight else ""
    )
    refuse_no_release(cuda)
    questions = Questions(expect_gpus, cuda, image, deep)
    if fixing:
        return run_fix(
            session.host, session.progress, selection, questions, strict=strict, apply=apply, allow=allowed
        )
    result = run(session.host, session.progress, selection, questions, strict=strict, explain=explain)
    return replace(result, file=output_file) if output_file not in ("", "-") else result


def _only_whole(session: Session, path: str, **verbs: bool) -> None:
    """What is only for a whole report is refused beside the rest, and an impossible path at once."""
    output = session.chosen["output"] or Output.TABLE
    asked = [f"--{name}" for name, given in verbs.items() if given]
    if len(asked) > 1:
        raise UsageError(f"{' and '.join(asked)} are different things", hint="ask for one of them")
    if asked and output not in (Output.TABLE, *ENVELOPES):
        raise UsageError(f"-o {output} is for a whole report, not for {asked[0]}", hint="use -o json")
    if asked and path:
        raise UsageError(
            f"--output-file is for a whole report, not for {asked[0]}", hint="use a redirection: >"
        )
    if path not in ("", "-"):
        session.host.refuse_output(path)


def _no_diagnosis(host: Host, **options: object) -> None:
    """--compare looks at no node: an option for a diagnosis would do nothing. One that the environment sets
    for every doctor is meant for the others."""
    for name, value in options.items():
        # 0 == False, and --expect-gpus 0 was said
        unset = value is None or value is False or value in ("", [])
        if not unset and not host.environ.get(f"GPUNODE_DOCTOR_{name.upper()}"):
            option = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{option} is for a diagnosis, and --compare reads reports that were made",
                hint=f"give {option} to the gpunode doctor that makes them",
            )
