"""Every documented layout from every other, with random failures: always the desired or the previous one."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
from dataclasses import replace
from typing import Any

import pytest

from fixtures.scenario import Fault, Scenario, mig_machine
from gpunode.commands import mig_apply
from gpunode.commands.mig_apply import MigLabels
from gpunode.errors import GpunodeError
from gpunode.kubernetes.access import Access
from gpunode.mig.apply import LayoutRequest
from gpunode.mig.config import difference, parse, wishes
from gpunode.mig.model import Layouts
from gpunode.mig.plan import same_layout
from gpunode.mig.session import MigSession
from gpunode.output.render import SilentProgress
from tests.mig.conftest import EXAMPLES, MigMaker, MigNode
from tests.warm_child import WarmChild

pytestmark = pytest.mark.full

HOPPER = ("all-disabled", "all-enabled", "all-1g", "all-balanced", "media", "roomy", "parts", "first-whole")
PLAIN = ("all-disabled", "all-enabled", "all-1g", "all-balanced")
PROFESSIONAL = (*PLAIN, "all-media", "graphics")
# in use, not enough memory, unknown; a crash of the querying process
TROUBLES = ({"code": 19}, {"code": 23}, {"code": 999}, {"abort": True})
CALLS = (
    *("migChange",) * 6,
    "nvmlDeviceGetGpuInstances",
    "nvmlInitWithFlags",
    "nvmlDeviceGetMigMode",
    "nvidia-smi",
)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without other processes: those of other tests must not be waited for, nor signalled."""
    monkeypatch.setattr("gpunode.host.LineChild", WarmChild)
    for place in ("gpunode.facts.processes.running", "gpunode.mig.users.running"):
        monkeypatch.setattr(place, lambda *_: ())


def attempt(node: MigNode, label: str) -> int:
    """The exit code."""
    try:
        labels = MigLabels(node.host, Access(), "", SilentProgress(), asked_for=False)
        result = mig_apply.run(node.host, LayoutRequest(EXAMPLES, label), labels, SilentProgress())
    except GpunodeError as error:
        return int(error.exit_code)
    return int(result.exit_code)


def wrong(label: str, now: Layouts) -> list[str]:
    with open(EXAMPLES, "rb") as file:
        entries = parse(file.read(), EXAMPLES).labels[label]
    found = wishes(EXAMPLES, label, entries, now).all
    return [one for one in map(difference, found) if one]


def faults(chance: random.Random) -> tuple[Fault, ...]:
    """One failure or two, each temporary: the rollback has three tries."""
    found = []
    for _ in range(chance.choice((1, 1, 2))):
        call = chance.choice(CALLS)
        trouble = chance.choice(TROUBLES if call != "nvidia-smi" else TROUBLES[:3])
        found.append(Fault(call, after=chance.randrange(18), times=1, **trouble))
    return tuple(found)


def walk(node: MigNode, scenario: Scenario, start: str, goals: tuple[str, ...], chance: random.Random) -> int:
    """How often the previous layout was restored."""
    state = node.stub.scenario_path.with_name(node.stub.scenario_path.name + ".mig")
    kept = state.with_suffix(".kept")
    assert attempt(node, start) == 0
    before = node.layouts()
    assert wrong(start, before) == []
    if state.exists():
        shutil.copy(state, kept)
    back = 0
    for goal in goals:
        if goal == start:
            continue
        struck = faults(chance)
        node.stub.write(scenario.with_faults(*struck))
        code = attempt(node, goal)
        node.stub.write(scenario)
        now = node.layouts()
        attempt_text = f"{start} -> {goal} with {struck}: exit {code}"
        if code == 0:
            assert wrong(goal, now) == [], attempt_text
        else:
            assert code in (1, 3, 4), attempt_text
            assert all(same_layout(a, b) for a, b in zip(before.gpus, now.gpus, strict=True)), attempt_text
            back += 1
        assert not (node.directory / "state/mig-before.json").exists(), attempt_text
        if kept.exists():
            shutil.copy(kept, state)
        else:
            node.stub.forget_mig_changes()
    return back


@pytest.mark.parametrize(
    ("boards", "labels"),
    [
        (("h100", "h100"), HOPPER),
        (("a100-40gb", "a30"), PLAIN),
        (("rtx-pro-6000",), PROFESSIONAL),
    ],
    ids=lambda value: value[0],
)
def test_any_failure_ends_in_the_desired_or_previous_layout(
    mig_node: MigMaker, boards: tuple[str, ...], labels: tuple[str, ...]
) -> None:
    seed = random.randrange(10**9) if os.environ.get("GPUNODE_TEST_NEW_EXAMPLES") else 6
    print(f"seed {seed}")
    chance = random.Random(seed)
    scenario = mig_machine(*boards)
    node = mig_node(scenario)
    back = sum(walk(node, scenario, start, labels, chance) for start in labels)
    assert back > 0, "no failure occurred"


def attempt_and_die(node: MigNode, label: str, changes: int) -> bool:
    """As `attempt`, in a process that is killed after so many changes; whether it was."""
    pid = os.fork()
    if pid == 0:
        asked, made = MigSession._query, itertools.count()

        def ask(self: MigSession, doing: str, seconds: float, **question: Any) -> Any:
            if question["do"] not in ("layouts", "processes") and next(made) == changes:
                os.kill(os.getpid(), signal.SIGKILL)
            return asked(self, doing, seconds, **question)

        try:
            MigSession._query = ask  # type: ignore[method-assign]
            attempt(node, label)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("boards", [("h100", "h100"), ("a100-40gb", "a30")], ids=lambda value: value[0])
def test_next_run_completes_a_run_killed_at_any_step(mig_node: MigMaker, boards: tuple[str, ...]) -> None:
    """With the layout of the next run, or with the one before the killed run."""
    seed = random.randrange(10**9) if os.environ.get("GPUNODE_TEST_NEW_EXAMPLES") else 6
    print(f"seed {seed}")
    chance = random.Random(seed)
    scenario = mig_machine(*boards)
    node = mig_node(scenario)
    labels = HOPPER if boards[0] == "h100" else PLAIN
    for _ in range(6):
        start, goal, other = chance.sample(labels, 3)
        node.stub.write(scenario)
        assert attempt(node, start) == 0
        before = node.layouts()
        died = chance.randrange(1, 9)
        if not attempt_and_die(node, goal, died):
            before = node.layouts()
        struck = Fault("migChange", 23, after=chance.randrange(12), times=1)
        node.stub.write(scenario.with_faults(struck) if chance.random() < 0.5 else scenario)
        code = attempt(node, other)
        node.stub.write(scenario)
        now = node.layouts()
        attempt_text = f"{start} -> {goal}, killed after {died}, -> {other} with {struck}: exit {code}"
        assert code in (0, 4), attempt_text
        if code == 0:
            assert wrong(other, now) == [], attempt_text
        else:
            assert all(same_layout(a, b) for a, b in zip(before.gpus, now.gpus, strict=True)), attempt_text
        assert not (node.directory / "state/mig-before.json").exists(), attempt_text


def test_failing_reset_of_a_pending_mode(mig_node: MigMaker) -> None:
    """A process holds the GPU until it is reset; the reset, or the step after it, fails."""
    scenario = mig_machine("a100-40gb")
    node = mig_node(scenario)
    path = node.stub.scenario_path
    node.program("nvidia-smi", f"sed -i 's/ held=1//' {path}\nexec {node.stub.programs}/nvidia-smi \"$@\"")
    held = scenario.with_gpu(0, reported={"held": 1})
    for fault in (Fault("nvidia-smi", 19, times=1), Fault("migChange", 23, after=3, times=1)):
        node.stub.write(replace(held, faults=(fault,)))
        assert attempt(node, "all-1g") == 4
        now = node.gpu()
        assert (now.current, now.pending, now.instances) == (False, False, ())
    node.stub.write(held)
    assert attempt(node, "all-1g") == 0
    assert node.devices() == {"1g.5gb": 7}
