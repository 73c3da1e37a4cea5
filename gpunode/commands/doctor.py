"""`gpunode doctor`: what is wrong with this node, root cause first. Changes nothing."""

from __future__ import annotations

from typing import Any

from gpunode import __version__
from gpunode.checks.catalogue import find_check
from gpunode.checks.chains import behind
from gpunode.checks.model import PREFLIGHTS
from gpunode.checks.patience import Patience
from gpunode.checks.report import blocks, first, gpus_not_examined, reboot
from gpunode.checks.runner import EVERY, Selection, run_checks
from gpunode.commands.trials import trials
from gpunode.dataclass import dataclass
from gpunode.errors import ConfigError, PreconditionError, UsageError
from gpunode.facts.node import Node, Questions
from gpunode.facts.summary import describe
from gpunode.host import Host
from gpunode.result import ExitCode, Finding, FindingStatus, Progress, Result
from gpunode.tables import all_tables

_TOP = ("/proc", "/sys", "/etc")  # every machine has them, mounted or recorded
_ABOUT_SECONDS = 8.0  # an engine that tells its version by its program alone is given five


@dataclass(frozen=True)
class Options:
    """`strict` lets warnings count. `only` are check ids; `skip` and `ignore` are ids, each with ``:REASON``
    behind it if there is one; `ignore` may be ``all``. `preflight` is one of `PREFLIGHTS`, empty for a whole
    diagnosis. What lies between is `facts.about.Questions`; `explain` shows what waits for what."""

    strict: bool = False
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    preflight: str = ""
    expect_gpus: int | None = None
    cuda: str = ""
    image: str = ""
    deep: bool = False
    explain: bool = False


def run(host: Host, options: Options, progress: Progress) -> Result:
    """Judge the node; exit 1 for an error (`strict`: for a warning too). `UsageError`: unknown id."""
    selection = selected(options)
    started = host.monotonic()
    node = node_of(host, options, progress)
    findings = run_checks(node, selection)
    counts = {status.value: sum(finding.status is status for finding in findings) for status in FindingStatus}
    status = overall(findings)
    failed = status in ("fail", "error") or (options.strict and status == "warn")
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
        blocks=blocks(about, findings, options.explain, tables, selection),
        documents={"html": _page, "prometheus": _metrics},
    )


def node_of(host: Host, options: Options, progress: Progress) -> Node:
    """The node, with what the checks are asked and what a deep one may run on it. `PreconditionError` for a
    root directory that isn't a machine's."""
    missing = [name for name in _TOP if _lacks(host, name)]
    if missing and not host.live:
        raise PreconditionError(
            f"{host.root} isn't the root directory of a machine: it has no {' and no '.join(missing)}",
            hint="name a mounted host (--root /host), a recorded machine or a support bundle",
            code="not-a-machine",
        )
    return Node(host, questions(options), trials(progress) if options.deep else {})


def _lacks(host: Host, directory: str) -> bool:
    try:
        return not host.is_dir(directory)
    except ConfigError:
        return False  # a malformed recording, which the checks report


def _about(node: Node) -> dict[str, Any]:
    """Of the node itself. Checks that weren't wanted haven't asked for all of it, and any of it may hang."""
    patience = Patience(_ABOUT_SECONDS)
    return patience.through(lambda: describe(node, patience.ask))


def _page(envelope: dict[str, Any]) -> str:
    from gpunode.pages.html import page

    return page(envelope)


def _metrics(envelope: dict[str, Any]) -> str:
    from gpunode.pages.prometheus import metrics

    return metrics(envelope)


def questions(options: Options) -> Questions:
    """What the user wants to know beyond the usual; `UsageError` for what is no CUDA release."""
    from gpunode.facts.cuda_releases import release_of

    if options.cuda and release_of(options.cuda) is None:
        raise UsageError(f"--cuda {options.cuda}: no CUDA release", hint="two numbers, such as 12.8")
    return Questions(options.expect_gpus, options.cuda, options.image, options.deep)


def selected(options: Options) -> Selection:
    """The options as the runner takes them. `UsageError` names the nearest ids for an unknown one."""
    only = tuple(_reasons(options.only, reasons=False))
    skip, ignore = _reasons(options.skip), _reasons(options.ignore)
    for identifier in (*only, *skip, *ignore):
        if not (identifier == EVERY and identifier in ignore):
            find_check(identifier)
    what = options.preflight
    if what and what not in PREFLIGHTS:
        raise UsageError(f"there is no preflight {what!r}", hint=f"one of {', '.join(PREFLIGHTS)}")
    if what and only and not any(what in find_check(one).preflight for one in only):
        raise UsageError(
            f"--preflight {what} has none of these checks: {', '.join(only)}", hint="leave one of them out"
        )
    return Selection(only, skip, ignore, what)


def _reasons(given: tuple[str, ...], *, reasons: bool = True) -> dict[str, str]:
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
