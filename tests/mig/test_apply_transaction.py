"""Every documented layout from every other, with random failures: always the desired or the previous one."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fixtures.scenario import Fault, Scenario, mig_machine
from gpunode.commands import mig_apply
from gpunode.commands.mig_apply import MigLabels
from gpunode.commands.mig_plan import LayoutRequest
from gpunode.errors import GpunodeError
from gpunode.kubernetes.access import Access
from gpunode.mig.config import desired_layouts, difference, parse
from gpunode.mig.model import Layouts
from gpunode.mig.plan import same_layout
from gpunode.mig.session import MigSession
from tests.mig.conftest import EXAMPLES, MigMaker, MigNode
from tests.silent import SilentProgress
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
        result = mig_apply.once(node.host, LayoutRequest(EXAMPLES, label), labels, SilentProgress())
    except GpunodeError as error:
        return int(error.exit_code)
    return int(result.exit_code)


def differences(label: str, now: Layouts) -> list[str]:
    """How the layout differs from the one of this label in the configuration file."""
    with open(EXAMPLES, "rb") as file:
        entries = parse(file.read(), EXAMPLES).labels[label]
    return [text for text in map(difference, desired_layouts(EXAMPLES, label, entries, now).all) if text]


def seeded_random() -> random.Random:
    seed = random.randrange(10**9) if os.environ.get("GPUNODE_TEST_NEW_EXAMPLES") else 6
    print(f"seed {seed}")
    return random.Random(seed)


def temporary_faults(chance: random.Random) -> tuple[Fault, ...]:
    """One failure or two, each temporary: the rollback has three tries."""
    faults = []
    for _ in range(chance.choice((1, 1, 2))):
        call = chance.choice(CALLS)
        trouble = chance.choice(TROUBLES if call != "nvidia-smi" else TROUBLES[:3])
        faults.append(Fault(call, after=chance.randrange(18), times=1, **trouble))
    return tuple(faults)


def attempt_with_faults(node: MigNode, label: str, scenario: Scenario, faults: tuple[Fault, ...]) -> int:
    """As `attempt`, while the driver has these faults."""
    node.stub.write(scenario.with_faults(*faults))
    code = attempt(node, label)
    node.stub.write(scenario)
    return code


def keep_layout(node: MigNode) -> Callable[[], None]:
    """A function that gives the simulated GPUs the layout that they have now."""
    state = node.stub.scenario_path.with_name(node.stub.scenario_path.name + ".mig")
    kept = state.read_bytes() if state.exists() else None

    def restore() -> None:
        if kept is None:
            node.stub.forget_mig_changes()
        else:
            state.write_bytes(kept)

    return restore


def check_layout(node: MigNode, goal: str, before: Layouts, code: int, case: str) -> None:
    """The GPUs have the layout of `goal` after success, else the one `before`, and nothing is unfinished."""
    now = node.layouts()
    if code == 0:
        assert differences(goal, now) == [], case
    else:
        assert all(same_layout(a, b) for a, b in zip(before.gpus, now.gpus, strict=True)), case
    assert not (node.directory / "state/mig-before.json").exists(), case


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
    chance = seeded_random()
    scenario = mig_machine(*boards)
    node = mig_node(scenario)
    rollbacks = 0
    for start in labels:
        assert attempt(node, start) == 0
        before = node.layouts()
        assert differences(start, before) == []
        return_to_start = keep_layout(node)

        for goal in (label for label in labels if label != start):
            faults = temporary_faults(chance)
            code = attempt_with_faults(node, goal, scenario, faults)

            case = f"{start} -> {goal} with {faults}: exit {code}"
            assert code in (0, 1, 3, 4), case
            check_layout(node, goal, before, code, case)
            rollbacks += code != 0
            return_to_start()
    assert rollbacks > 0, "no failure occurred"


def attempt_in_killed_process(node: MigNode, label: str, change: int) -> bool:
    """As `attempt`, in a process that is killed before this change, counted from 0; False if it has ended
    with fewer changes."""
    pid = os.fork()
    if pid == 0:
        try:
            kill_before(change)
            attempt(node, label)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def kill_before(change: int) -> None:
    """Kill this process as soon as it wants to make this change to a GPU."""
    query, changes = MigSession._query, itertools.count()

    def counting(self: MigSession, doing: str, seconds: float, **question: Any) -> Any:
        if question["do"] not in ("layouts", "processes") and next(changes) == change:
            os.kill(os.getpid(), signal.SIGKILL)
        return query(self, doing, seconds, **question)

    MigSession._query = counting  # type: ignore[method-assign]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("boards", [("h100", "h100"), ("a100-40gb", "a30")], ids=lambda value: value[0])
def test_next_run_completes_a_run_killed_at_any_step(mig_node: MigMaker, boards: tuple[str, ...]) -> None:
    """With the layout of the next run, or with the one before the killed run."""
    chance = seeded_random()
    scenario = mig_machine(*boards)
    node = mig_node(scenario)
    labels = HOPPER if boards[0] == "h100" else PLAIN
    for _ in range(6):
        start, goal, other = chance.sample(labels, 3)
        assert attempt(node, start) == 0
        before = node.layouts()
        change = chance.randrange(1, 9)
        if not attempt_in_killed_process(node, goal, change):
            before = node.layouts()  # the whole run succeeded

        fault = Fault("migChange", 23, after=chance.randrange(12), times=1)
        faults = (fault,) if chance.random() < 0.5 else ()
        code = attempt_with_faults(node, other, scenario, faults)

        case = f"{start} -> {goal}, killed before change {change}, -> {other} with {faults}: exit {code}"
        assert code in (0, 4), case
        check_layout(node, other, before, code, case)


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
