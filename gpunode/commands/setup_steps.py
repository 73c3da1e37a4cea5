"""A way of several commands: each step is skipped where it is right already, and the first failure stops it.

A step is data: what it is called, which command does the same by itself, and three functions. `look` only
reads. `plan` is the command's own dry run, `run` the command itself; each undoes itself when it fails or is
interrupted, so that between steps the node is always whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpunode.errors import GpunodeError, RolledBackError
from gpunode.host import Host
from gpunode.host.journal import Journal
from gpunode.kubernetes.api import ClusterError, Json, named
from gpunode.kubernetes.changes import Held, create, delete, look
from gpunode.kubernetes.manifests import documents
from gpunode.output.result import Block, Cell, ErrorInfo, ExitCode, Progress, Result, Style, Table, Text

if TYPE_CHECKING:
    from gpunode.kubernetes.client import Cluster

_STYLES = {
    "right": Style.DIM,
    "done": Style.GOOD,
    "planned": Style.GOOD,
    "left": Style.WARN,
    "failed": Style.BAD,
    "interrupted": Style.BAD,
    "waiting": Style.DIM,
}


Show = Callable[..., None]
"""Prints blocks while the command goes on; see `Session.show`."""


@dataclass(frozen=True)
class State:
    """How a step finds the node, and why it says so.

    `right`: nothing is to be done. `left`: something is, and not by us; `why` says what.
    """

    why: str
    right: bool = False
    left: bool = False


@dataclass(frozen=True)
class Step:
    """One step; see the module. The functions raise `GpunodeError`."""

    name: str
    command: str
    look: Callable[[], State]
    plan: Callable[[], Result]
    run: Callable[[], Result]


@dataclass(frozen=True)
class StepReport:
    """What became of a step, for programs; `result` is that command's own data, null if it wasn't run.

    `state`: right (skipped), done, planned (a dry run), left (for somebody else), failed, interrupted, or
    waiting (for an earlier one).
    """

    name: str
    command: str
    state: str
    why: str
    seconds: float = 0.0
    result: object = None


@dataclass(frozen=True)
class Walked:
    """All steps in order, and the first failing step's own result, if one did."""

    steps: tuple[StepReport, ...]
    messages: tuple[str, ...] = ()
    failure: Result | None = None

    @property
    def stopped_at(self) -> StepReport | None:
        return next((one for one in self.steps if one.state in ("failed", "interrupted")), None)

    @property
    def left(self) -> tuple[StepReport, ...]:
        return tuple(one for one in self.steps if one.state == "left")


def not_shown(*blocks: Block) -> None:
    """A `show` that prints nothing."""


def journal_ids(host: Host) -> frozenset[str]:
    """What the journal holds now; nothing where this user may not read it."""
    with suppress(GpunodeError):
        return frozenset(entry.id for entry in Journal.of(host).entries())
    return frozenset()


def interruption(host: Host, command: str, before: frozenset[str]) -> ErrorInfo:
    """What Ctrl-C during `command` leaves behind: files changed since the journal held `before`, and how to
    undo it. The command itself has rolled back what it had not finished."""
    with suppress(GpunodeError):
        entries = [
            one for one in Journal.of(host).entries() if one.id not in before and one.state == "committed"
        ]
        if entries:
            paths = dict.fromkeys(str(file["path"]) for one in entries for file in one.files)
            undo = [f"gpunode rollback {one.id}" for one in reversed(entries) if one.undoable]
            undo += ["gpunode toolkit remove"] if any(one.of_packages for one in entries) else []
            changed = ", ".join(paths) or "installed packages"
            return ErrorInfo(
                "interrupted",
                f"interrupted during {command}; changed: {changed}",
                f"undo it with: {' && '.join(undo)}",
            )
    return ErrorInfo("interrupted", f"interrupted during {command}; nothing was left changed")


def walk(host: Host, steps: Sequence[Step], show: Show = not_shown, *, dry_run: bool) -> Walked:
    """Go through the steps and show each when it is done. A dry run shows every step's plan, also behind one
    that would fail."""
    before = journal_ids(host)
    reports: list[StepReport] = []
    messages: dict[str, None] = {}
    failure: Result | None = None
    for step in steps:
        if failure is not None and not dry_run:
            reports.append(StepReport(step.name, step.command, "waiting", f"for {_stopper(reports)}"))
            continue
        report, result = _take(host, step, dry_run, before)
        reports.append(report)
        show(*_shown(report, result))
        messages |= dict.fromkeys(result.messages if result is not None else ())
        if failure is None and report.state in ("failed", "interrupted"):
            failure = result
    return Walked(tuple(reports), tuple(messages), failure)


def _take(host: Host, step: Step, dry_run: bool, before: frozenset[str]) -> tuple[StepReport, Result | None]:
    """One step. An expected failure becomes its result, so that the report still tells what went before."""
    started = host.monotonic()
    try:
        state = step.look()
        if state.right or state.left:
            return StepReport(step.name, step.command, "right" if state.right else "left", state.why), None
        result = step.plan() if dry_run else step.run()
        good = result.exit_code == ExitCode.OK
        became = ("planned" if dry_run else "done") if good else "failed"
        why = state.why if good else _reason(result)
    except GpunodeError as error:
        result = Result("Error", None, "error", error.exit_code, errors=(error.info(),))
        became, why = "failed", error.message
    except KeyboardInterrupt:
        left = interruption(host, step.command, before)
        result = Result("Error", None, "error", ExitCode.INTERRUPTED, errors=(left,))
        became, why = "interrupted", "interrupted; this step was rolled back"
    seconds = round(host.monotonic() - started, 2)
    return StepReport(step.name, step.command, became, why, seconds, result.data), result


def _reason(result: Result) -> str:
    return result.errors[0].message if result.errors else "see what it says"


def _stopper(reports: Sequence[StepReport]) -> str:
    return next(one.name for one in reports if one.state in ("failed", "interrupted"))


def _shown(report: StepReport, result: Result | None) -> list[Block]:
    if result is None:
        return []
    problems = [Text(f"{info.message}", Style.BAD) for info in result.errors]
    return [Text(f"$ {report.command}", Style.COMMAND), *result.blocks, *problems, Text("")]


def overview(steps: Sequence[StepReport]) -> Table:
    """Every step with what became of it and why."""
    rows = tuple((one.name, Cell(one.state, _STYLES[one.state]), one.why) for one in steps)
    return Table(("STEP", "STATE", "WHY"), rows)


# Objects made in the cluster as a step of `setup --kubernetes`: a RuntimeClass, the plugin's DaemonSet.

__all__ = ["ClusterObjects", "ObjectChange", "look", "make", "refuse_others"]


@dataclass(frozen=True)
class ObjectChange:
    """One object, such as ``DaemonSet kube-system/gpunode-device-plugin``; `action`: created or unchanged."""

    object: str
    action: str


@dataclass(frozen=True)
class ClusterObjects:
    """`data` of the envelope. `undo` are command lines that take away what was made."""

    server: str
    source: str
    changes: tuple[ObjectChange, ...]
    undo: tuple[str, ...]
    dry_run: bool


def refuse_others(found: Sequence[Held], command: str) -> None:
    """`ClusterError` for an object that is there and isn't what is wanted: it is left alone."""
    for one in found:
        if one.differs:
            raise ClusterError(
                f"{named(one.desired)} is in the cluster and differs at {', '.join(one.differs[:3])};"
                " it was left alone",
                hint=f"look at it, then replace it if that is meant: {command} | kubectl apply -f -",
                code="kubernetes-differs",
            )


def make(
    host: Host,
    cluster: Cluster,
    wanted: Sequence[Json],
    progress: Progress,
    *,
    dry_run: bool,
    settle: Callable[[], None] = lambda: None,
) -> Result:
    """Make those that are missing, all or none; kind ClusterObjects. What `settle` raises takes them back.

    `ClusterError`; `RolledBackError` if `settle` fails.
    """
    found = look(host, cluster, wanted, progress)
    missing = [one.desired for one in found if one.existing is None]
    if not dry_run:
        with progress.step(f"making {len(missing)} objects at {cluster.server}"):
            made = create(cluster, missing)
        _settle(cluster, made, settle)
    actions = tuple(
        ObjectChange(named(one.desired), "created" if one.existing is None else "unchanged") for one in found
    )
    undo = tuple(_undo(one) for one in reversed(missing))
    data = ClusterObjects(cluster.server, cluster.source, actions, undo, dry_run)
    return Result("ClusterObjects", data, blocks=_blocks(data, missing))


def _settle(cluster: Cluster, made: Sequence[Json], settle: Callable[[], None]) -> None:
    try:
        settle()
    except BaseException as error:
        left = delete(cluster, made)
        if not isinstance(error, GpunodeError):
            raise
        if left:
            raise ClusterError(
                f"{error}; these were made and could not be deleted: {', '.join(left)}",
                hint="delete them by hand: kubectl delete",
            ) from error
        raise RolledBackError(f"{error}; what was made is deleted again", hint=error.hint) from error


def _undo(one: Json) -> str:
    metadata = one["metadata"]
    place = f" --namespace {metadata['namespace']}" if metadata.get("namespace") else ""
    return f"kubectl delete {str(one['kind']).lower()} {metadata['name']}{place}"


def _blocks(data: ClusterObjects, missing: Sequence[Json]) -> tuple[Block, ...]:
    mark = " (dry run)" if data.dry_run else ""
    blocks: list[Block] = [
        Text(f"{one.object} {one.action}{mark if one.action == 'created' else ''}", Style.GOOD)
        for one in data.changes
    ]
    if data.dry_run:
        blocks += [Text(line, Style.COMMAND) for line in documents(missing).splitlines()]
    else:
        blocks += [Text(f"undo it with: {command}", Style.DIM) for command in data.undo]
    return tuple(blocks)
