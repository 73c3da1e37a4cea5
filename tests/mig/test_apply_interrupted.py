"""Runs that were killed, or lost a GPU: the remaining state, and how the next run handles it."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fixtures.scenario import Fault, Scenario, mig_machine
from gpunode.errors import ConfigError, UsageError
from gpunode.host import Host
from gpunode.host.transaction import uninterrupted
from gpunode.mig import apply as apply_module
from gpunode.mig import unfinished
from gpunode.mig.model import Layouts
from gpunode.mig.users import StoppedUsers, drain
from tests.cli import command
from tests.mig.conftest import EXAMPLES, MigMaker, MigNode
from tests.silent import SilentProgress
from tests.waiting import eventually

pytestmark = pytest.mark.full

BALANCED = {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1}
LOST, INSUFFICIENT = 15, 23


@contextmanager
def changing(node: MigNode, scenario: Scenario, label: str, after: int, *words: str) -> Iterator[None]:
    """`label` is being applied, has made so many changes, and hangs in the next; it is killed at the end."""
    node.stub.write(scenario.with_faults(Fault("migChange", hang=60.0, after=after, times=1)))
    argv = command("mig", "apply", "-f", EXAMPLES, "-c", label, *words)
    with node.start(*argv, stderr=subprocess.DEVNULL) as child:
        try:
            assert eventually(lambda: node.stub.fault_calls() > after)
            yield
        finally:
            node.kill(child, signal.SIGKILL)
    node.stub.write(scenario)


def killed(node: MigNode, scenario: Scenario, label: str, after: int) -> None:
    """`label` is applied and killed after so many changes."""
    with changing(node, scenario, label, after):
        pass


def snapshot(node: MigNode) -> Path:
    return node.directory / "state/mig-before.json"


def test_next_run_continues_from_the_current_layout(mig_node: MigMaker) -> None:
    scenario = mig_machine("h100")
    node = mig_node(scenario)
    assert node.apply("all-balanced").code == 0
    killed(node, scenario, "media", 6)
    stayed = node.uuids()
    assert snapshot(node).exists() and node.devices() != BALANCED
    shown = node.run("plan", "-f", EXAMPLES, "-c", "all-balanced")
    dry = node.apply("all-balanced", "--dry-run")
    for ran in (shown, dry):
        assert "GPU 0 is planned from its current layout" in ran.err
    assert shown.out.startswith(dry.out) and snapshot(node).exists()
    ran = node.apply("all-balanced")
    assert ran.code == 0 and "an earlier run of mig apply was interrupted" in ran.err
    assert node.devices() == BALANCED and stayed & node.uuids()
    assert not snapshot(node).exists()
    assert "earlier run" not in node.apply("all-balanced").err


def test_failed_next_run_restores_the_layout_before_both(mig_node: MigMaker) -> None:
    scenario = mig_machine("h100")
    node = mig_node(scenario)
    assert node.apply("all-balanced").code == 0
    killed(node, scenario, "media", 6)
    node.stub.write(scenario.with_faults(Fault("migChange", INSUFFICIENT, after=3, times=1)))
    ran = node.apply("all-1g")
    assert ran.code == 4 and "the previous layout was restored" in ran.err
    assert node.devices() == BALANCED and not snapshot(node).exists()


def test_gpus_not_in_the_next_run_are_restored(mig_node: MigMaker) -> None:
    scenario = mig_machine("h100", "h100")
    node = mig_node(scenario)
    assert node.apply("all-balanced").code == 0
    killed(node, scenario, "all-1g", 10)
    only = node.profiles("7g.80gb: 1", devices="[0]")
    shown = node.run("plan", "-f", only)
    assert "GPU 1 gets its previous layout back" in shown.err
    assert "GPU 1  NVIDIA H100" in shown.out and "create GPU instance 3g.40gb at 4:4" in shown.out
    ran = node.apply("wanted", file=only)
    assert ran.code == 0, ran.err
    assert (node.devices(0), node.devices(1)) == ({"7g.80gb": 1}, BALANCED)


def test_finished_gpu_is_restored_with_the_unfinished_one(mig_node: MigMaker) -> None:
    scenario = mig_machine("h100", "h100")
    node = mig_node(scenario)
    assert node.apply("all-enabled").code == 0
    killed(node, scenario, "all-balanced", 10)  # of eight changes for each
    assert node.devices(0) == BALANCED
    node.stub.write(scenario.with_faults(Fault("migChange", INSUFFICIENT, after=9, times=1)))
    ran = node.apply("all-1g")
    assert ran.code == 4 and "GPU 0, GPU 1: restored to the layout before the interrupted run" in ran.err
    assert (node.devices(0), node.devices(1)) == ({}, {})


def test_layout_changed_by_another_user_since_is_kept(mig_node: MigMaker) -> None:
    """By nvidia-smi, say: a finished change of another program must not be rolled back."""
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
    assert "GPU 0 has another layout since: that is taken as its current one" in ran.err
    assert node.stub.mig_changes() == done and not snapshot(node).exists()


def test_run_killed_at_its_end_is_complete(mig_node: MigMaker) -> None:
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
def test_broken_record_is_ignored(mig_node: MigMaker, text: str) -> None:
    node = mig_node(mig_machine("h100"))
    snapshot(node).parent.mkdir(mode=0o700)
    snapshot(node).write_text(text)
    ran = node.apply("all-disabled")
    assert ran.code == 0 and "earlier run" not in ran.err


def test_failed_restore_is_reported_and_kept_on_record(mig_node: MigMaker) -> None:
    scenario = mig_machine("h100")
    node = mig_node(scenario)
    assert node.apply("all-balanced").code == 0
    node.stub.write(scenario.with_faults(Fault("migChange", INSUFFICIENT, after=5)))
    ran = node.apply("media")
    assert ran.code == 1 and "restoring the previous layout failed: GPU 0: " in ran.err
    node.stub.write(scenario)
    ran = node.apply("all-balanced")
    assert ran.code == 0 and "was interrupted" in ran.err
    assert node.devices() == BALANCED


def test_lost_gpu_does_not_prevent_the_restore_of_others(mig_node: MigMaker) -> None:
    scenario = mig_machine("h100", "h100")
    node = mig_node(scenario)
    assert node.apply("all-balanced").code == 0
    first = scenario.gpus[0].uuid
    node.stub.write(scenario.with_faults(Fault("migChange", LOST, uuid=first, after=6)))
    ran = node.apply("all-1g")
    assert ran.code == 1
    assert (
        "restoring the previous layout failed: GPU 0: " in ran.err and "the others are unchanged" in ran.err
    )
    assert node.devices(1) == BALANCED
    kept = json.loads(snapshot(node).read_text())
    # the next run says so, and that the current state is unknown
    node.stub.write(scenario.with_gpu(0, lost=True))
    ran = node.apply("all-1g")
    assert ran.code == 3 and "GPU 0" in ran.err and "can't be queried" in ran.err
    assert json.loads(snapshot(node).read_text()) == kept
    ran = node.apply("wanted", file=node.profiles("7g.80gb: 1", devices="[1]"))
    assert ran.code == 0, ran.err
    assert "GPU 0 can't be queried now; it had 1 x 3g.40gb, 1 x 2g.20gb, 2 x 1g.10gb" in ran.err
    # it recovers, with its remaining instances
    node.stub.write(scenario)
    ran = node.apply("wanted", file=node.profiles("7g.80gb: 1", devices="[1]"))
    assert ran.code == 0 and "GPU 0 gets its previous layout back" in ran.err
    assert (node.devices(0), node.devices(1)) == (BALANCED, {"7g.80gb": 1})
    assert not snapshot(node).exists()


# --- stopped units ----------------------------------------------------------------------------------------


def systemctl(node: MigNode, more: str = "") -> Callable[[], list[str]]:
    """A systemctl that records its starts and stops; returns the record."""
    log = node.directory / "systemctl.log"
    node.program("systemctl", f'case "$1" in start|stop) echo "$1 $2" >> {log};; esac\n{more}')
    return lambda: [line for line in log.read_text().splitlines() if "dcgm" in line] if log.exists() else []


def goes_on(output: str) -> list[str]:
    """The command that `mig list` or `mig plan` name, after ``gpunode mig``."""
    (line,) = [one for one in output.splitlines() if "go on: gpunode" in one]
    return shlex.split(line.partition("go on: gpunode mig ")[2])


def test_units_stopped_by_a_killed_run_are_listed_and_started(mig_node: MigMaker) -> None:
    scenario = mig_machine("h100")
    with mig_node(scenario).shared() as node:
        done = systemctl(node)
        assert node.apply("all-balanced").code == 0
        with changing(node, scenario, "media", 6, "--drain", "nvidia-dcgm"):
            assert "interrupted" not in node.run("list").err, "it works"
        assert done() == ["stop nvidia-dcgm.service"]
        for ran in (node.run("list"), node.run("plan", "-f", EXAMPLES, "-c", "all-balanced")):
            assert ran.code == 0
            assert "it had stopped nvidia-dcgm.service; GPU 0 is incomplete" in ran.err
            time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"
            assert re.search(f"a run of mig apply that started at {time} was interrupted", ran.err)
            words = goes_on(ran.err)
        assert words == ["apply", "-f", EXAMPLES, "-c", "media", "--drain", "nvidia-dcgm"]
        assert "would start nvidia-dcgm.service again" in node.run(*words, "--dry-run").out
        assert done() == ["stop nvidia-dcgm.service"]
        ran = node.run(*words)
        assert ran.code == 0 and "has left stopped: nvidia-dcgm.service" in ran.err
        assert done()[-1] == "start nvidia-dcgm.service"
        assert "interrupted" not in node.run("list").err
        assert not (node.directory / "state/mig-run.json").exists()


def test_stopped_unit_is_started_even_if_the_next_run_is_refused(mig_node: MigMaker) -> None:
    """And it is recorded before it is stopped: here the kill happens while systemctl runs."""
    with mig_node(mig_machine("h100")).shared() as node:
        gate = node.directory / "gate"
        os.mkfifo(gate)
        done = systemctl(node, f'[ "$1" != stop ] || read word < {gate}')
        argv = command("mig", "apply", "-f", EXAMPLES, "-c", "media", "--drain", "nvidia-dcgm")
        with node.start(*argv, stderr=subprocess.DEVNULL) as child:
            with gate.open("w"):  # opens when systemctl reads
                node.kill(child, signal.SIGKILL)
                child.wait()
        assert done() == ["stop nvidia-dcgm.service"]
        assert "it had stopped nvidia-dcgm.service; go on: " in node.run("list").err
        wanted = node.profiles("3g.40gb: 3")  # doesn't fit
        assert node.apply("wanted", file=wanted).code == 3
        assert done()[1:] == ["start nvidia-dcgm.service"]
        assert "interrupted" not in node.run("list").err and node.stub.mig_changes() == []


def test_unit_that_does_not_start_stays_on_record(mig_node: MigMaker) -> None:
    node = mig_node(mig_machine("h100"))
    broken = node.directory / "broken"
    broken.touch()
    done = systemctl(node, f'if [ "$1" = start ] && [ -e {broken} ]; then echo no >&2; exit 1; fi')
    ran = node.apply("all-1g", "--drain", "nvidia-dcgm")
    assert ran.code == 0 and "systemctl start nvidia-dcgm.service failed: no" in ran.err
    assert "it had stopped nvidia-dcgm.service; go on: " in node.run("list").err
    broken.unlink()
    ran = node.run(*goes_on(node.run("list").err))
    assert (ran.code, ran.out) == (0, "all-1g: unchanged\n") and "interrupted" not in node.run("list").err
    assert done() == ["stop nvidia-dcgm.service", "start nvidia-dcgm.service", "start nvidia-dcgm.service"]


def test_stopped_container_may_be_named_again() -> None:
    """It blocked the killed run, and no longer blocks the same command."""
    word = f"docker:{'4' * 12}"
    down = StoppedUsers(containers=(word,), pids=(41,))
    assert drain(Host(), (word, "41"), (), SilentProgress(), down) == down
    with pytest.raises(UsageError):
        drain(Host(), (word,), (), SilentProgress())


def test_failed_snapshot_keeps_the_one_of_an_earlier_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The killed run must be rolled back to it."""
    host = Host(tmp_path, environ={})
    path = tmp_path / unfinished.snapshot_path(host).lstrip("/")
    path.parent.mkdir(parents=True)
    path.write_text("of an earlier run")

    def full(*_: object, **_options: object) -> None:
        raise ConfigError("no space left on device")

    session: Any = SimpleNamespace(layouts=lambda: Layouts("", ()))
    tools = apply_module.Tools(
        open=lambda: cast("Any", nullcontext(session)),
        reset=lambda _gpus: None,
        uninterrupted=uninterrupted,
        announce=lambda _text: nullcontext(),
    )
    monkeypatch.setattr(Host, "write_atomic", full)
    with pytest.raises(ConfigError, match="no space left"):
        apply_module.carry_out(host, tools, (), unfinished.UnfinishedGpus())
    assert path.read_text() == "of an earlier run"
