"""Runs that were killed, or lost a GPU: what remains, and what the next run makes of it."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from fixtures.scenario import Fault, Scenario, mig_machine
from tests.cli import clean_environment, command
from tests.mig.conftest import EXAMPLES, MigMaker, MigNode

BALANCED = {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1}
LOST, INSUFFICIENT = 15, 23


def killed(node: MigNode, scenario: Scenario, label: str, after: int) -> None:
    """`label` is applied and killed when it has made so many changes."""
    node.stub.write(scenario.with_faults(Fault("migChange", hang=60.0, after=after, times=1)))
    begun = len(node.stub.mig_changes())
    argv = command("mig", "apply", "-f", EXAMPLES, "-c", label)
    with subprocess.Popen(argv, env=clean_environment(node.env), stderr=subprocess.DEVNULL) as child:
        until = time.monotonic() + 60
        while len(node.stub.mig_changes()) < begun + after and time.monotonic() < until:
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
    node.stub.write(scenario)


def snapshot(node: MigNode) -> Path:
    return node.directory / "state/mig-before.json"


def test_the_next_run_goes_on_from_what_is_there(mig_node: MigMaker) -> None:
    scenario = mig_machine("h100")
    node = mig_node(scenario)
    assert node.apply("all-balanced").code == 0
    killed(node, scenario, "media", 6)
    stayed = node.uuids()
    assert snapshot(node).exists() and node.devices() != BALANCED
    shown = node.run("plan", "-f", EXAMPLES, "-c", "all-balanced")
    dry = node.apply("all-balanced", "--dry-run")
    for ran in (shown, dry):
        assert "GPU 0 is planned from what is there" in ran.err
    assert shown.out.startswith(dry.out) and snapshot(node).exists()
    ran = node.apply("all-balanced")
    assert ran.code == 0 and "an earlier run of mig apply didn't come to its end" in ran.err
    assert node.devices() == BALANCED and stayed & node.uuids()
    assert not snapshot(node).exists()
    assert "earlier run" not in node.apply("all-balanced").err


def test_a_next_run_that_fails_puts_back_what_was_before_both(mig_node: MigMaker) -> None:
    scenario = mig_machine("h100")
    node = mig_node(scenario)
    assert node.apply("all-balanced").code == 0
    killed(node, scenario, "media", 6)
    node.stub.write(scenario.with_faults(Fault("migChange", INSUFFICIENT, after=3, times=1)))
    ran = node.apply("all-1g")
    assert ran.code == 4 and "the previous layout is in place again" in ran.err
    assert node.devices() == BALANCED and not snapshot(node).exists()


def test_what_the_next_run_does_not_name_becomes_what_it_was(mig_node: MigMaker) -> None:
    scenario = mig_machine("h100", "h100")
    node = mig_node(scenario)
    assert node.apply("all-balanced").code == 0
    killed(node, scenario, "all-1g", 10)
    only = node.profiles("7g.80gb: 1", devices="[0]")
    shown = node.run("plan", "-f", only)
    assert "GPU 1 gets its former layout back" in shown.err
    assert "GPU 1  NVIDIA H100" in shown.out and "create GPU instance 3g.40gb at 4:4" in shown.out
    ran = node.apply("wanted", file=only)
    assert ran.code == 0, ran.err
    assert (node.devices(0), node.devices(1)) == ({"7g.80gb": 1}, BALANCED)


def test_a_gpu_that_was_done_goes_back_with_the_one_that_was_not(mig_node: MigMaker) -> None:
    scenario = mig_machine("h100", "h100")
    node = mig_node(scenario)
    assert node.apply("all-enabled").code == 0
    killed(node, scenario, "all-balanced", 10)  # of eight changes for each
    assert node.devices(0) == BALANCED
    node.stub.write(scenario.with_faults(Fault("migChange", INSUFFICIENT, after=9, times=1)))
    ran = node.apply("all-1g")
    assert ran.code == 4 and "GPU 0, GPU 1: as before the earlier run" in ran.err
    assert (node.devices(0), node.devices(1)) == ({}, {})


def test_what_somebody_has_cut_since_is_let_alone(mig_node: MigMaker) -> None:
    """By nvidia-smi, say: it's not for us to take back what is no half-done work of ours."""
    scenario = mig_machine("h100")
    node = mig_node(scenario)
    assert node.apply("all-balanced").code == 0
    killed(node, scenario, "media", 6)
    begun = snapshot(node).read_text()
    assert node.apply("roomy").code == 0
    snapshot(node).write_text(begun)
    done = node.stub.mig_changes()
    ran = node.apply("roomy")
    assert (ran.code, ran.out) == (0, "roomy: unchanged\n")
    assert "GPU 0 has been cut otherwise since: it counts as it is" in ran.err
    assert node.stub.mig_changes() == done and not snapshot(node).exists()


def test_a_run_that_was_killed_at_its_very_end_has_ended(mig_node: MigMaker) -> None:
    scenario = mig_machine("h100")
    node = mig_node(scenario)
    assert node.apply("all-balanced").code == 0
    killed(node, scenario, "media", 6)
    begun = snapshot(node).read_text()
    assert node.apply("media").code == 0
    snapshot(node).write_text(begun)
    ran = node.apply("media")
    assert (ran.code, ran.out) == (0, "media: unchanged\n") and "earlier run" not in ran.err
    assert not snapshot(node).exists()


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"boot": 1, "layouts": 3}', "\0"])
def test_a_broken_record_says_nothing(mig_node: MigMaker, text: str) -> None:
    node = mig_node(mig_machine("h100"))
    snapshot(node).parent.mkdir(mode=0o700)
    snapshot(node).write_text(text)
    ran = node.apply("all-disabled")
    assert ran.code == 0 and "earlier run" not in ran.err


def test_a_failure_that_stays_is_told_and_not_forgotten(mig_node: MigMaker) -> None:
    scenario = mig_machine("h100")
    node = mig_node(scenario)
    assert node.apply("all-balanced").code == 0
    node.stub.write(scenario.with_faults(Fault("migChange", INSUFFICIENT, after=5)))
    ran = node.apply("media")
    assert ran.code == 1 and "the way back failed: GPU 0: " in ran.err
    node.stub.write(scenario)
    ran = node.apply("all-balanced")
    assert ran.code == 0 and "didn't come to its end" in ran.err
    assert node.devices() == BALANCED


def test_a_gpu_that_is_lost_on_the_way_keeps_no_other_from_going_back(mig_node: MigMaker) -> None:
    scenario = mig_machine("h100", "h100")
    node = mig_node(scenario)
    assert node.apply("all-balanced").code == 0
    first = scenario.gpus[0].uuid
    node.stub.write(scenario.with_faults(Fault("migChange", LOST, uuid=first, after=6)))
    ran = node.apply("all-1g")
    assert ran.code == 1
    assert "the way back failed: GPU 0: " in ran.err and "the others are as they were" in ran.err
    assert node.devices(1) == BALANCED
    kept = json.loads(snapshot(node).read_text())
    # the next run says so, and that nothing is known of it now
    node.stub.write(scenario.with_gpu(0, lost=True))
    ran = node.apply("all-1g")
    assert ran.code == 3 and "GPU 0" in ran.err and "can't be asked" in ran.err
    assert json.loads(snapshot(node).read_text()) == kept
    ran = node.apply("wanted", file=node.profiles("7g.80gb: 1", devices="[1]"))
    assert ran.code == 0, ran.err
    assert "GPU 0 can't be asked now; it had 1 x 3g.40gb, 1 x 2g.20gb, 2 x 1g.10gb" in ran.err
    # it comes back, with what was left on it
    node.stub.write(scenario)
    ran = node.apply("wanted", file=node.profiles("7g.80gb: 1", devices="[1]"))
    assert ran.code == 0 and "GPU 0 gets its former layout back" in ran.err
    assert (node.devices(0), node.devices(1)) == (BALANCED, {"7g.80gb": 1})
    assert not snapshot(node).exists()
