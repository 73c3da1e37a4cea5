"""`gpunode doctor`: what is wrong with this node, root cause first. It changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePath
from typing import Annotated, Any, Literal, NamedTuple

import typer

from gpunode import __version__
from gpunode.checks.catalogue import find_check
from gpunode.checks.finding import Finding, FindingStatus
from gpunode.checks.patience import Patience
from gpunode.checks.report import (
    Headline,
    NextStep,
    NodeSummary,
    RebootVerdict,
    TableAge,
    behind,
    blocks,
    describe,
    first,
    gpus_not_examined,
    headline,
    next_steps,
    order,
    reboot,
)
from gpunode.checks.runner import EVERY, Selection, run_checks
from gpunode.commands.options import OUTPUT, Strings, changed, check_ids
from gpunode.commands.session import Session, verb
from gpunode.errors import ConfigError, GpunodeError, PreconditionError, UsageError
from gpunode.facts.cuda import release_of
from gpunode.facts.node import Node, Questions, Trial
from gpunode.facts.tables import all_tables
from gpunode.gpu.probe import probe
from gpunode.host import Host
from gpunode.output.prometheus import metrics
from gpunode.output.render import ENVELOPES, Output, output_for
from gpunode.output.result import ExitCode, Progress, Result

# What only some options need is imported where they are used: the doctor also runs every few minutes, as a
# timer or as a job.

# What the doctor runs on the node with --deep; these leave nothing behind.

_SECONDS = 15.0  # for the GPU alone; the image and the container take a few more


def _in_docker(progress: Progress, host: Host, uuid: str) -> Trial:
    """A vector-add in a container, on the GPU with this UUID."""
    from gpunode.commands.verify import in_container
    from gpunode.runtime.verify.container import ContainerRequest

    try:
        answer, via = in_container(host, ContainerRequest("docker", timeout=_SECONDS), (uuid,), progress)
    except PreconditionError as error:
        return Trial(None, error.message)
    except GpunodeError as error:
        return Trial(False, f"{error.message}; {error.hint}" if error.hint else error.message)
    problem = answer.error or next((device.message for device in answer.devices if device.status != "ok"), "")
    if problem or not answer.devices:
        return Trial(False, f"{via}: {problem or 'the program saw no GPU'}")
    return Trial(True, f"vector-add on {uuid} by {via}")


_TOP = ("/proc", "/sys", "/etc")  # every machine has them, mounted or recorded
_ABOUT_SECONDS = 8.0  # an engine that reports its version only by its program gets five
EVERYTHING = Selection()
NO_QUESTIONS = Questions()


class Selected(NamedTuple):
    """The options; empty ones select everything."""

    only: tuple[str, ...]
    skip: tuple[str, ...]
    preflight: str


class DoctorReport(NamedTuple):
    """`data` of the envelope: the node, and one finding per check.

    `first` is the id to fix first, `steps` are all steps of that fix, empty if nothing can be fixed here;
    `order` has the ids of errors and warnings in the order of their fixes;
    `chains` maps each root cause to the checks that wait for it, each with the check that directly blocks it.
    `gpus_not_examined` is why NVML wasn't queried for the GPUs, empty if it was. `at` is in seconds since the
    epoch.
    """

    node: NodeSummary
    findings: tuple[Finding, ...]
    headline: Headline
    counts: dict[str, int]
    selection: Selected
    first: str | None
    steps: tuple[NextStep, ...]
    order: tuple[str, ...]
    chains: dict[str, dict[str, str]]
    reboot: RebootVerdict
    gpus_not_examined: str
    tables: tuple[TableAge, ...]
    at: float
    seconds: float
    version: str


def run(
    host: Host,
    progress: Progress,
    selection: Selection = EVERYTHING,
    questions: Questions = NO_QUESTIONS,
    *,
    strict: bool = False,
    explain: bool = False,
) -> Result:
    """Run the checks; exit 1 for an error, with `strict` for a warning too. `explain` shows which check waits
    for which."""
    started = host.monotonic()
    node = node_of(host, questions, progress)
    findings = run_checks(node, selection)
    counts = {status.value: sum(finding.status is status for finding in findings) for status in FindingStatus}
    status = overall(findings)
    failed = status in ("fail", "error") or (strict and status == "warn")
    about, tables = _about(node), reference(host.now())
    data = DoctorReport(
        about,
        findings,
        headline(about, findings, selection),
        counts,
        Selected(tuple(selection.only), tuple(selection.skip), selection.preflight),
        first(findings),
        next_steps(about, findings),
        order(findings),
        behind(findings),
        reboot(findings),
        gpus_not_examined(findings, about.class_),
        tables,
        round(host.now(), 3),
        round(host.monotonic() - started, 3),
        __version__,
    )
    return Result(
        "DoctorReport",
        data,
        status=status,
        exit_code=ExitCode.FAILED if failed else ExitCode.OK,
        blocks=blocks(about, findings, explain, tables, selection),
        documents={"html": _page, "prometheus": metrics},
    )


def _page(envelope: dict[str, Any]) -> str:
    from gpunode.output.html import page

    return page(envelope)


def check_recording(host: Host) -> None:
    """`ConfigError` for what a recording has of NVML: one error now, not one in every check."""
    if not host.live:
        probe(host)


def node_of(host: Host, questions: Questions, progress: Progress) -> Node:
    """The node, with what the checks need and what a deep check may run on it. `PreconditionError` for a root
    directory that doesn't contain a machine's files."""
    missing = [name for name in _TOP if _lacks(host, name)]
    if missing and not host.live:
        *others, last = missing
        raise PreconditionError(
            f"{host.root} isn't the root directory of a machine: it has no "
            + (f"{', '.join(others)} or {last}" if others else last),
            hint="name a mounted host (--root /host), a recorded machine or a support bundle",
            code="not-a-machine",
        )
    return Node(host, questions, {"docker": partial(_in_docker, progress)} if questions.deep else {})


def examine(
    host: Host,
    progress: Progress,
    selection: Selection = EVERYTHING,
    questions: Questions = NO_QUESTIONS,
) -> tuple[Finding, ...]:
    """The findings of the checks."""
    return run_checks(node_of(host, questions, progress), selection)


def _lacks(host: Host, directory: str) -> bool:
    try:
        return not host.is_dir(directory)
    except ConfigError:
        return False  # a malformed recording, which the checks report


def _about(node: Node) -> NodeSummary:
    """Facts of the node itself. Checks that weren't selected haven't read all of them, and any read may
    hang."""
    with Patience(node.host, _ABOUT_SECONDS) as patience:
        return describe(node, patience.call)


def selected(
    only: Sequence[str] = (), skip: Sequence[str] = (), ignore: Sequence[str] = (), preflight: str = ""
) -> Selection:
    """The checks that the command line selects: each word is an id, or several with commas between; in `skip`
    and `ignore` an id may be followed by ``:REASON``; `ignore` may be ``all``.

    `UsageError` names the nearest ids for an unknown one.
    """
    only = tuple(_ids_with_reasons(only, reasons=False))
    skipped, ignored = _ids_with_reasons(skip), _ids_with_reasons(ignore)
    for identifier in (*only, *skipped, *ignored):
        if not (identifier == EVERY and identifier in ignored):
            find_check(identifier)
    if both := [check_id for check_id in only if check_id in skipped]:
        raise UsageError(f"{both[0]} is selected and skipped", hint=f"leave out --skip {both[0]}")
    if preflight and only and not any(preflight in find_check(check_id).preflight for check_id in only):
        raise UsageError(
            f"--preflight {preflight} has none of these checks: {', '.join(only)}",
            hint="leave one of them out",
        )
    return Selection(only, skipped, ignored, preflight)


def _ids_with_reasons(arguments: Sequence[str], *, reasons: bool = True) -> dict[str, str]:
    """``ID`` or, with `reasons`, ``ID:REASON``, several ids with commas between."""
    by_id = {}
    for item in arguments:
        identifier, _, reason = item.partition(":") if reasons else (item, "", "")
        for check_id in identifier.split(","):
            by_id[check_id.strip()] = reason.strip()
    return by_id


def overall(findings: tuple[Finding, ...]) -> str:
    """The worst status: fail, error (a check broke), warn or ok."""
    statuses = {finding.status for finding in findings}
    for status in (FindingStatus.FAIL, FindingStatus.ERROR, FindingStatus.WARN):
        if status in statuses:
            return str(status)
    return "ok"


def reference(now: float) -> tuple[TableAge, ...]:
    """The reference tables that checks judge by, and how many days old they are at `now`."""
    return tuple(
        TableAge(table.name, table.date, table.source, table.age_days(now)) for table in all_tables()
    )


# The command line of `gpunode doctor`.

doctor_app = typer.Typer(rich_markup_mode=None)


Preflight = Literal["docker", "containerd", "crio", "podman", "kubernetes"]


@dataclass(frozen=True)
class DiagnosisOptions:
    """The options of a diagnosis; of these --compare takes only `strict`."""

    only: Annotated[
        Strings,
        typer.Option("--only", metavar="ID,...", help="Run only these checks.", autocompletion=check_ids),
    ] = None
    skip: Annotated[
        Strings,
        typer.Option(
            "--skip",
            metavar="ID,...[:REASON]",
            help="Skip these checks.",
            autocompletion=check_ids,
        ),
    ] = None
    ignore: Annotated[
        Strings,
        typer.Option(
            "--ignore",
            metavar="ID,...[:REASON]",
            help="Count errors of these checks as warnings; all: every check.",
            autocompletion=check_ids,
        ),
    ] = None
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit 1 on warnings, as on errors.", rich_help_panel=OUTPUT)
    ] = False
    preflight: Annotated[
        Preflight | None,
        typer.Option("--preflight", help="Report only what blocks its installation."),
    ] = None
    expect_gpus: Annotated[
        int | None,
        typer.Option("--expect-gpus", metavar="N", min=0, help="Number of GPUs that this node must have."),
    ] = None
    cuda: Annotated[
        str,
        typer.Option("--cuda", metavar="X.Y", help="Check whether programs built for this CUDA release run."),
    ] = ""
    image: Annotated[
        str,
        typer.Option("--image", metavar="REF", help="Check the requirements of this local container image."),
    ] = ""
    deep: Annotated[
        bool, typer.Option("--deep", help="Also run a test container and query the device plugin.")
    ] = False
    explain: Annotated[
        bool, typer.Option("--explain", help="Print which check waits for which.", rich_help_panel=OUTPUT)
    ] = False


_FIX = "Fix options"
FixOption = Annotated[
    bool,
    typer.Option("--fix", help="Print the commands that fix the findings.", rich_help_panel=_FIX),
]
ApplyOption = Annotated[
    bool,
    typer.Option(
        "--apply",
        help="With --fix, run the commands that disrupt nothing, and check again.",
        rich_help_panel=_FIX,
    ),
]
AllowOption = Annotated[
    Strings,
    typer.Option(
        "--allow",
        metavar="restart|drain|reboot,...",
        help="With --apply, also restart daemons, stop GPU work (drain) or reboot.",
        rich_help_panel=_FIX,
    ),
]
FileOption = Annotated[
    str,
    typer.Option(
        "--output-file",
        metavar="PATH",
        help="Write the report to this file; the extension or -o selects the format.",
        rich_help_panel=OUTPUT,
    ),
]
CompareOption = Annotated[
    bool,
    typer.Option("--compare", help="Compare the nodes of these reports or bundles.", rich_help_panel=OUTPUT),
]


@verb(doctor_app, "doctor", "DoctorReport")
def doctor(
    session: Session,
    checks: Annotated[
        Strings,
        typer.Argument(
            metavar="[ID]...",
            help="Checks to run, as --only; with --compare, reports.",
            show_default="all",
            autocompletion=check_ids,
        ),
    ] = None,
    options: DiagnosisOptions = DiagnosisOptions(),
    fix: FixOption = False,
    apply: ApplyOption = False,
    allow: AllowOption = None,
    compare: CompareOption = False,
    output_file: FileOption = "",
) -> Result:
    """Find out why GPUs don't work on this node. The report has the root cause and the command that fixes it.

    Nothing is changed without --fix --apply, which needs root. Without root, checks of protected files are
    skipped.

    sudo gpunode doctor

    gpunode doctor -o json --only driver-lib-mismatch

    gpunode doctor --preflight containerd --expect-gpus 8

    sudo gpunode doctor --fix --apply uvm-not-loaded

    gpunode doctor --output-file node7.html

    gpunode doctor --compare node1.json node2.json node3.tar.gz
    """
    _check_output(session, output_file, compare=compare, fix=fix)
    if compare:
        _refuse_diagnosis_options(session.host, options)
        from gpunode.commands import doctor_compare

        return _with_output_file(output_file, doctor_compare.run(checks or (), strict=options.strict))
    allowed = tuple(allow or ())
    if fixing := bool(fix or apply or allow):
        from gpunode.commands import doctor_fix

        doctor_fix.refuse(fix, apply, allowed)
    _refuse_files(checks or ())
    ids = (*(checks or ()), *(options.only or ()))
    selection = selected(ids, options.skip or (), options.ignore or (), options.preflight or "")
    if options.cuda and release_of(options.cuda) is None:
        raise UsageError(f"--cuda {options.cuda}: not a CUDA release", hint="two numbers, such as 12.8")
    questions = Questions(options.expect_gpus, options.cuda, options.image, options.deep)
    host, progress, strict = session.host, session.progress, options.strict
    check_recording(host)
    if fixing:
        findings = partial(examine, host, progress, selection, questions)
        return doctor_fix.run(host, findings, progress, strict=strict, apply=apply, allow=allowed)
    result = run(host, progress, selection, questions, strict=strict, explain=options.explain)
    return _with_output_file(output_file, result)


def _refuse_files(checks: Sequence[str]) -> None:
    """`UsageError` for a file in place of a check: no id has a dot or a slash."""
    for identifier in checks:
        if "." in identifier or "/" in identifier:
            raise UsageError(
                f"unknown check {identifier!r}",
                hint="a file: gpunode doctor --compare FILE FILE, or gpunode doctor --root BUNDLE",
            )


def _with_output_file(path: str, result: Result) -> Result:
    """The result, written to a file if one is named."""
    return replace(result, file=path) if path not in ("", "-") else result


def _check_output(session: Session, path: str, **verbs: bool) -> None:
    """Refuse options that only apply to a whole report when others are given, and an impossible path at
    once."""
    output = session.options.format
    flags = [f"--{name}" for name, value in verbs.items() if value]
    if len(flags) > 1:
        raise UsageError(f"{' and '.join(flags)} are different things", hint="choose one of them")
    forms = [Output.TABLE, *ENVELOPES, *([Output.HTML] if verbs["compare"] else [])]
    if flags and output not in forms:
        raise UsageError(f"-o {output} is for a whole report, not for {flags[0]}", hint="use -o json")
    if flags and path and (verbs["fix"] or (output_for(path) or Output.TABLE) not in forms):
        raise UsageError(
            f"--output-file {path} is for a whole report, not for {flags[0]}", hint="use a redirection: >"
        )
    if path not in ("", "-"):
        suffix, form = PurePath(path).suffix, output_for(path)
        if form not in (None, Output.TABLE) and session.options.output not in (None, form):
            raise UsageError(
                f"-o {output} contradicts the name {path}", hint=f"leave out -o: {suffix} is enough"
            )
        if suffix and session.options.output is None and form is None:
            raise UsageError(
                f"--output-file {path}: {suffix!r} is not the ending of a report",
                hint="use .html, .json, .yaml, .prom or .txt, or choose the format with -o",
            )
        session.host.refuse_output(path)


def _refuse_diagnosis_options(host: Host, options: DiagnosisOptions) -> None:
    """--compare reads saved reports and no node, so an option for a diagnosis would have no effect. Options
    that the environment sets for every doctor apply to the other runs."""
    for flag in changed(options):
        variable = f"GPUNODE_DOCTOR_{flag.removeprefix('--').replace('-', '_').upper()}"
        if flag != "--strict" and not host.environ.get(variable):
            raise UsageError(
                f"{flag} is for a diagnosis, and --compare reads reports that were made",
                hint=f"give {flag} to the gpunode doctor that makes them",
            )
