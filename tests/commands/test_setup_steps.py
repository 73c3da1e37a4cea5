"""A sequence of steps: which are skipped, what stops it, and the report on the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gpunode.commands import setup_steps
from gpunode.commands.node import NodeChange
from gpunode.commands.setup_steps import (
    AdvertisedGpus,
    ClusterObjects,
    NodeStep,
    ObjectChange,
    StepReport,
    StepState,
    overview,
    walk,
)
from gpunode.errors import GpunodeError, PreconditionError, RolledBackError
from gpunode.host import Host
from gpunode.host.journal import FileEdit, Journal
from gpunode.output.render import plain_lines
from gpunode.output.result import Block, ErrorInfo, ExitCode, Result, Text
from tests.silent import SilentProgress


class Way:
    """Steps a, b and c that record their calls."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def step(
        self,
        name: str,
        state: StepState | GpunodeError | None = None,
        run: Callable[[], Result] | None = None,
        plan: Callable[[], Result] | None = None,
    ) -> NodeStep:
        def look() -> StepState:
            if isinstance(state, GpunodeError):
                raise state
            return state or StepState("not there")

        def act(dry_run: bool) -> Result:
            word, does = ("plan", plan) if dry_run else ("run", run)
            self.called.append(f"{word} {name}")
            return does() if does else Result("Any", {"name": name}, blocks=(Text(f"{word} {name}"),))

        return NodeStep(name, f"gpunode {name}", look, act)


def raising(error: BaseException) -> Callable[[], Result]:
    def run() -> Result:
        raise error

    return run


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_steps_that_are_done_or_left_to_others_do_not_run(host: Host) -> None:
    way = Way()
    steps = (
        way.step("a", StepState("is there", right=True)),
        way.step("b", StepState("no", left=True)),
        way.step("c"),
    )
    walked = walk(host, steps, dry_run=False)
    assert way.called == ["run c"]
    assert [(one.name, one.state, one.why) for one in walked.steps] == [
        ("a", "right", "is there"),
        ("b", "left", "no"),
        ("c", "done", "not there"),
    ]
    assert walked.steps[0].result is None and walked.steps[2].result == {"name": "c"}
    assert (walked.failure, walked.left) == (None, (walked.steps[1],))


def test_the_table_shows_states_in_plain_words() -> None:
    states = ("right", "done", "planned", "left", "failed", "interrupted", "waiting")
    table = overview([StepReport(f"step-{one}", "gpunode x", one, "why") for one in states])
    shown = [line.split() for line in plain_lines(table)]
    assert shown[0] == ["STEP", "STATE", "REASON"]
    words = ("ok", "done", "planned", "manual", "failed", "interrupted", "pending")
    assert [row[1] for row in shown[1:]] == [*words]


FAILURES: list[tuple[Callable[[], Result], str, ExitCode]] = [
    (raising(GpunodeError("bad")), "failed", ExitCode.FAILED),
    (raising(PreconditionError("bad")), "failed", ExitCode.PRECONDITION),
    (raising(RolledBackError("bad")), "failed", ExitCode.ROLLED_BACK),
    (
        lambda: Result("Any", exit_code=ExitCode.FAILED, errors=(ErrorInfo("x", "bad"),)),
        "failed",
        ExitCode.FAILED,
    ),
    (raising(KeyboardInterrupt()), "interrupted", ExitCode.INTERRUPTED),
]


@pytest.mark.parametrize(("run", "state", "code"), FAILURES)
def test_first_failure_stops_the_walk(
    host: Host, run: Callable[[], Result], state: str, code: ExitCode
) -> None:
    way = Way()
    walked = walk(host, (way.step("a"), way.step("b", run=run), way.step("c")), dry_run=False)
    assert way.called == ["run a", "run b"]
    assert [one.state for one in walked.steps] == ["done", state, "waiting"]
    assert walked.steps[2].why == "waits for b"
    assert walked.failure is not None and walked.failure.exit_code is code
    assert walked.stopped_at is walked.steps[1]


def test_step_that_cannot_look_has_failed(host: Host) -> None:
    way = Way()
    walked = walk(host, (way.step("a", PreconditionError("no way", hint="go")), way.step("b")), dry_run=False)
    assert way.called == []
    assert [one.state for one in walked.steps] == ["failed", "waiting"]
    assert walked.failure is not None and walked.failure.errors == (
        ErrorInfo("precondition", "no way", "go"),
    )


def test_dry_run_plans_every_step_even_after_a_failure(host: Host) -> None:
    way = Way()
    steps = (way.step("a"), way.step("b", plan=raising(GpunodeError("bad"))), way.step("c"))
    walked = walk(host, steps, dry_run=True)
    assert way.called == ["plan a", "plan b", "plan c"]
    assert [one.state for one in walked.steps] == ["planned", "failed", "planned"]
    assert walked.stopped_at is walked.steps[1]


def test_ctrl_c_between_two_steps_names_the_remaining_changes(host: Host, tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()

    def change() -> Result:
        journal = Journal.of(host)
        entry = journal.begin("test", [FileEdit("/etc/a", None, b"new")], {})
        host.write_atomic("/etc/a", b"new")
        journal.mark(entry, "committed")
        return Result("Any", None, blocks=(Text("run a"),))

    def show(*blocks: Block) -> None:
        if Text("run a") in blocks:
            raise KeyboardInterrupt

    way = Way()
    with pytest.raises(GpunodeError) as caught:
        walk(host, (way.step("a", run=change), way.step("b")), show, dry_run=False)
    assert caught.value.exit_code == ExitCode.INTERRUPTED
    assert caught.value.message == "interrupted during set-up; changed: /etc/a"
    assert caught.value.hint.startswith(f"undo it with: gpunode --root {host.root} rollback ")
    assert way.called == ["run a"]


OBJECTS = Result(
    "ClusterObjects",
    ClusterObjects(
        "https://api",
        "test",
        (ObjectChange("RuntimeClass nvidia", "created"), ObjectChange("RuntimeClass other", "unchanged")),
        ("kubectl delete runtimeclass nvidia",),
        dry_run=False,
    ),
)
LABEL = Result(
    "NodeChange",
    NodeChange("n1", "https://api", "test", "", (), (), "kubectl label node n1 gpu-", dry_run=False),
)


def test_ctrl_c_names_cluster_changes_of_earlier_steps_and_their_undo(host: Host) -> None:
    way = Way()
    steps = (
        way.step("a", run=lambda: OBJECTS),
        way.step("b", run=lambda: LABEL),
        way.step("c", run=raising(KeyboardInterrupt())),
    )
    walked = walk(host, steps, dry_run=False)
    assert walked.failure is not None
    (error,) = walked.failure.errors
    assert error.message == "interrupted during gpunode c; changed: Node n1, RuntimeClass nvidia"
    assert error.hint == "undo it with: kubectl label node n1 gpu- && kubectl delete runtimeclass nvidia"


def test_bug_in_a_step_is_not_a_failed_step(host: Host) -> None:
    with pytest.raises(ZeroDivisionError):
        walk(host, (Way().step("a", run=raising(ZeroDivisionError())),), dry_run=False)


def test_plugin_that_registers_again_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a restart of k3s, which is kubelet and engine at once."""
    plugin = ("nvidia-device-plugin (process 9)",)
    silent, serves = (
        AdvertisedGpus(plugin, (), False),
        AdvertisedGpus(plugin, (("nvidia.com/gpu", 2),), False),
    )
    answers = [silent, silent, serves]
    monkeypatch.setattr(setup_steps, "_PULL_SECONDS", 0.0)
    monkeypatch.setattr(setup_steps, "serving", lambda host: answers.pop(0) if answers[1:] else answers[0])
    progress = SilentProgress()
    step = setup_steps.service_step(Host(), False, 60.0, progress, dry_run=False)
    assert step.look().right and answers == [serves]

    answers[:] = [silent]
    for wait, dry_run in ((0.01, False), (60.0, True)):
        with pytest.raises(PreconditionError, match="has offered no GPU"):
            setup_steps.service_step(Host(), False, wait, progress, dry_run=dry_run).look()
