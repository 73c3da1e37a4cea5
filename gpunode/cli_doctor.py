"""The verbs that only look: what is wrong with this node, and what a check is about."""

# no `from __future__ import annotations`: Typer reads these annotations as objects

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from gpunode.commands.options import Strings
from gpunode.commands.outcome import Session
from gpunode.commands.session import verb

if TYPE_CHECKING:
    from gpunode.commands.doctor import Options
    from gpunode.output.result import Result

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
) -> "Result":
    """Find out why GPUs don't work on this node. Tells the root cause and the command that mends it.

    Changes nothing without --fix --apply. Without root, what it can't read is skipped and named.

    gpunode doctor

    gpunode doctor -o json --only driver-lib-mismatch

    gpunode doctor --preflight containerd --expect-gpus 8

    gpunode doctor --fix uvm-not-loaded --apply

    gpunode doctor --output-file node7.html

    gpunode doctor --compare node1.json node2.json node3.tar.gz
    """
    from gpunode.commands import doctor as command

    _only_whole(session, output_file, compare=compare, fix=fix)
    options = command.Options(
        strict=strict,
        only=tuple(only or ()) if compare else (*(checks or ()), *(only or ())),
        skip=tuple(skip or ()),
        ignore=tuple(ignore or ()),
        preflight=preflight.value if preflight else "",
        expect_gpus=expect_gpus,
        cuda=cuda,
        image=image,
        deep=deep,
        explain=explain,
    )
    if compare:
        return _compare(session, tuple(checks or ()), options)
    if fix or apply or allow:
        return _fix(session, options, fix, apply, tuple(allow or ()))
    return _filed(command.run(session.host, options, session.progress), output_file)


def _filed(result: "Result", path: str) -> "Result":
    from dataclasses import replace

    return replace(result, file=path) if path not in ("", "-") else result


def _only_whole(session: Session, path: str, **verbs: bool) -> None:
    """What is only for a whole report is refused beside the rest, and an impossible path at once."""
    from gpunode.errors import UsageError
    from gpunode.output.render import ENVELOPES, Output

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


def _compare(session: Session, paths: tuple[str, ...], options: "Options") -> "Result":
    from gpunode.commands import doctor_compare as command

    _no_diagnosis(session, vars(options) | {"strict": False})
    return command.run(session.host, command.Options(paths, options.strict), session.progress)


def _no_diagnosis(session: Session, options: dict[str, object]) -> None:
    """--compare looks at no node: an option for a diagnosis would do nothing. One that the environment sets
    for every doctor is meant for the others."""
    from gpunode.errors import UsageError

    for name, value in options.items():
        # 0 == False, and --expect-gpus 0 was said
        unset = value is None or value is False or value in ("", ())
        if not unset and not session.host.environ.get(f"GPUNODE_DOCTOR_{name.upper()}"):
            option = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{option} is for a diagnosis, and --compare reads reports that were made",
                hint=f"give {option} to the gpunode doctor that makes them",
            )


def _fix(session: Session, looked: "Options", fix: bool, apply: bool, allow: tuple[str, ...]) -> "Result":
    from gpunode.commands import doctor as command

    options = command.FixOptions(
        looked, fix, apply, tuple(one for given in allow for one in given.split(","))
    )
    return command.run_fix(session.host, options, session.progress)


@verb(doctor_app, "explain", "CheckExplanation")
def explain(
    session: Session,
    check: Annotated[str, typer.Argument(metavar="[ID]", help="A check's id; all are listed without.")] = "",
) -> "Result":
    """Explain one check, or list them all. What it looks at, why, how to mend it on each distribution.

    gpunode explain driver-lib-mismatch
    """
    from gpunode.commands import explain as command

    return command.run(session.host, command.Options(id=check), session.progress)


@verb(doctor_app, "report", "SupportBundle")
def report(
    session: Session,
    output_file: Annotated[
        str,
        typer.Option(
            "--output-file",
            metavar="PATH",
            help="Where to write it; here under the node's name if not given.",
        ),
    ] = "",
    redact: Annotated[
        Strings,
        typer.Option(
            "--redact",
            metavar="hostnames|uuids|all",
            help="Also take these out (repeatable). Secrets never stay in.",
        ),
    ] = None,
) -> "Result":
    """Pack a support bundle. What the doctor saw and found and what daemons logged, without secrets.

    gpunode report --redact all

    gpunode doctor --root gpunode-report-node7-20260812-031500.tar.gz
    """
    from gpunode.commands import report as command

    words = tuple(one.strip() for given in redact or () for one in given.split(","))
    return command.run(session.host, command.Options(output_file, words), session.progress)
