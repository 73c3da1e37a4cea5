"""A way of several commands: each step is skipped where it is right already, and the first failure stops it.

A step is data: what it is called, which command does the same by itself, and three functions. `look` only
reads. `plan` is the command's own dry run, `run` the command itself; each undoes itself when it fails or is
interrupted, so that between steps the node is always whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpunode.dataclass import dataclass
from gpunode.errors import GpunodeError
from gpunode.host import Host
from gpunode.result import Block, Cell, ErrorInfo, ExitCode, Result, Style, Table, Text

_STYLES = {
    "right": Style.DIM,
    "done": Style.GOOD,
    "planned": Style.GOOD,
    "left": Style.WARN,
    "failed": Style.BAD,
    "interrupted": Style.BAD,
    "waiting": Style.DIM,
}


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
    """All steps in order, what is shown of them, and the first failing step's own result, if one did."""

    steps: tuple[StepReport, ...]
    blocks: tuple[Block, ...]
    messages: tuple[str, ...] = ()
    failure: Result | None = None

    @property
    def stopped_at(self) -> StepReport | None:
        return next((one for one in self.steps if one.state in ("failed", "interrupted")), None)

    @property
    def left(self) -> tuple[StepReport, ...]:
        return tuple(one for one in self.steps if one.state == "left")


def walk(host: Host, steps: Sequence[Step], *, dry_run: bool) -> Walked:
    """Go through the steps. A dry run shows every step's plan, also behind one that would fail."""
    reports: list[StepReport] = []
    blocks: list[Block] = []
    messages: dict[str, None] = {}
    failure: Result | None = None
    for step in steps:
        if failure is not None and not dry_run:
            reports.append(StepReport(step.name, step.command, "waiting", f"for {_stopper(reports)}"))
            continue
        report, result = _take(host, step, dry_run)
        reports.append(report)
        blocks += _shown(report, result)
        messages |= dict.fromkeys(result.messages if result is not None else ())
        if failure is None and report.state in ("failed", "interrupted"):
            failure = result
    return Walked(tuple(reports), tuple(blocks), tuple(messages), failure)


def _take(host: Host, step: Step, dry_run: bool) -> tuple[StepReport, Result | None]:
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
        told = ErrorInfo("interrupted", "interrupted")
        result = Result("Error", None, "error", ExitCode.INTERRUPTED, errors=(told,))
        became, why = "interrupted", "interrupted; what it had begun was taken back"
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
