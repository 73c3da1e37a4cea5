"""`gpunode mig apply --watch`: the layout follows the Node's label, whatever happens to the server.

SIGHUP triggers a poll at once, so no test waits for the next one.
"""

from __future__ import annotations

import json
import signal
import subprocess
from dataclasses import replace

import pytest

from fixtures.api_server import ApiServer, Fault, kubeconfig
from fixtures.scenario import Fault as NvmlFault
from fixtures.scenario import Process, mig_machine
from tests.cli import command
from tests.mig.conftest import MigMaker, MigNode
from tests.mig.test_apply_interrupted import changing, systemctl
from tests.plugin.test_serve_process import keeps
from tests.waiting import PATIENCE, eventually

pytestmark = pytest.mark.full

CONFIG, STATE = "nvidia.com/mig.config", "nvidia.com/mig.config.state"
SEVEN, BALANCED = {"1g.10gb": 7}, {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1}
LAYOUTS = {"seven": SEVEN, "balanced": BALANCED}


class Following:
    """A `mig apply --watch` and its cluster."""

    def __init__(
        self, node: MigNode, api: ApiServer, *words: str, early: signal.Signals | None = None
    ) -> None:
        """`early` is a signal that it gets while it starts."""
        self.node, self.api = node, api
        self.file = node.directory / "conf/mig.yaml"
        self.file.parent.mkdir()
        self.configure(**LAYOUTS)
        self._log = node.directory / "watch.log"
        self._early = early
        access = node.directory / "kubeconfig"
        access.write_text(kubeconfig(api))
        self.argv = ("mig", "apply", "--watch", "-f", str(self.file), *words)
        self.access = ("--kubeconfig", str(access), "--node", "gpu-1")

    def __enter__(self) -> Following:
        argv = command(*self.argv, *self.access)
        with self._log.open("w") as log:
            self.process = self.node.start(*argv, stderr=log, stdout=subprocess.DEVNULL)
        if early := self._early:
            assert eventually(lambda: keeps(self.node.pid(self.process), early))
            self.node.kill(self.process, early)
        assert self.says("following the label"), self.log()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.node.kill(self.process, signal.SIGKILL)
        self.process.wait(PATIENCE)

    def log(self) -> str:
        return self._log.read_text()

    def says(self, text: str, times: int = 1) -> bool:
        return eventually(lambda: self.log().count(text) >= times)

    def configure(self, **layouts: dict[str, int]) -> None:
        entries = {
            name: [{"devices": "all", "mig-enabled": True, "mig-devices": wanted}]
            for name, wanted in layouts.items()
        }
        new = self.file.with_name("new")  # atomic: it is read meanwhile
        new.write_text(json.dumps({"version": "v1", "mig-configs": entries}))
        new.replace(self.file)

    def look(self) -> None:
        self.node.kill(self.process, signal.SIGHUP)

    def looked(self) -> None:
        """A whole turn that began after this has ended: the Node was read twice."""
        for _ in range(2):
            before = self.asks()
            self.look()
            assert eventually(lambda before=before: self.asks() > before), self.log()  # type: ignore[misc]

    def asks(self) -> int:
        return sum(one.method == "GET" for one in self.api.asked)

    def labels(self) -> dict[str, str]:
        found = self.api.node("gpu-1")["metadata"]["labels"]
        assert isinstance(found, dict)
        return found

    def ask_for(self, label: str) -> None:
        with self.api.lock:
            self.labels()[CONFIG] = label

    def becomes(self, label: str, state: str) -> bool:
        def so() -> bool:
            return (self.labels().get(CONFIG), self.labels().get(STATE)) == (label, state)

        return eventually(so)

    def set(self) -> list[str]:
        """The states that were set, in order; nothing else was."""
        steps = [step for one in self.api.changes() for step in one.body if step["op"] != "test"]
        assert {step["path"].rpartition("~1")[2] for step in steps} <= {"mig.config.state"}
        return [step["value"] for step in steps]

    def end(self) -> int:
        self.node.kill(self.process, signal.SIGTERM)
        return self.process.wait(PATIENCE)


def test_layout_follows_the_label_and_the_file(mig_node: MigMaker, api: ApiServer) -> None:
    node = mig_node(mig_machine("h100"))
    with Following(node, api) as it:
        assert it.says("nothing is done without a label"), it.log()
        it.looked()
        assert node.stub.mig_changes() == [] and it.set() == []
        it.ask_for("seven")
        it.look()
        assert it.becomes("seven", "success"), it.log()
        assert node.devices() == SEVEN and it.set() == ["pending", "success"]
        it.ask_for("balanced")
        it.look()
        assert it.says("action=applied", 2) and it.becomes("balanced", "success"), it.log()
        assert node.devices() == BALANCED
        it.configure(balanced={"7g.80gb": 1})  # without any signal
        assert it.says("action=applied", 3), it.log()
        assert node.devices() == {"7g.80gb": 1} and it.labels()[STATE] == "success"
        assert it.log().count("nothing is done without a label") == 1
        assert it.end() == 0
    assert it.labels() | {"pool": "a"} == it.labels()
    assert it.set() == ["pending", "success"] * 3


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_signal_during_the_start_does_not_end_it(
    mig_node: MigMaker, api: ApiServer, number: signal.Signals
) -> None:
    # shared: the first process of a PID namespace doesn't end by a signal that it has no handler for
    with mig_node(mig_machine("h100")).shared() as node, Following(node, api, early=number) as it:
        it.ask_for("seven")
        it.look()
        assert it.becomes("seven", "success"), it.log()


def test_refused_configuration_waits_for_another_label_or_file(mig_node: MigMaker, api: ApiServer) -> None:
    node = mig_node(mig_machine("h100"))
    it = Following(node, api)
    it.ask_for("nonesuch")
    with it:
        assert it.becomes("nonesuch", "failed"), it.log()
        assert it.says("the layout isn't applied") and "nonesuch" in it.log()
        it.looked()
        assert it.log().count("the layout isn't applied") == 1 and it.set() == ["failed"]
        it.configure(nonesuch={"3g.40gb": 3})  # it exists now, and is impossible
        assert it.says("the layout isn't applied", 2), it.log()
        it.looked()
        assert it.log().count("the layout isn't applied") == 2 and node.stub.mig_changes() == []
        it.configure(**LAYOUTS)
        assert it.says("the layout isn't applied", 3), it.log()
        it.ask_for("seven")
        it.look()
        assert it.becomes("seven", "success") and node.devices() == SEVEN, it.log()


def test_apply_continues_once_blocking_processes_end(mig_node: MigMaker, api: ApiServer) -> None:
    scenario = mig_machine("h100")
    with mig_node(scenario).shared() as node, node.sleeping() as (sleep, pid):
        it = Following(node, api)
        assert node.apply("balanced", file=str(it.file)).code == 0
        done = node.stub.mig_changes()
        victim = next(gi for gi in node.gpu().instances if gi.name == "2g.20gb")
        it.ask_for("seven")
        used = Process(0, pid, gi=victim.id, ci=0, real=True)
        node.stub.write(replace(scenario, processes=(used,)))
        with it:
            assert it.becomes("seven", "failed") and it.says(f"sleep (process {pid})"), it.log()
            it.looked()
            assert it.log().count("the layout isn't applied") == 1 and node.stub.mig_changes() == done
            node.kill(sleep, signal.SIGTERM)
            sleep.wait()
            it.look()
            assert it.says("the blocking processes have ended"), it.log()
            assert it.becomes("seven", "success") and node.devices() == SEVEN, it.log()


def test_unavailable_server_is_reported_and_waited_for(mig_node: MigMaker, api: ApiServer) -> None:
    node = mig_node(mig_machine("h100"))
    with Following(node, api) as it:
        it.looked()
        api.faults.append(Fault("GET", "nodes", "cut", times=10**6))
        it.look()
        assert it.says("the Node can't be read"), it.log()
        api.faults.clear()
        it.ask_for("seven")
        it.look()
        assert it.says("the Node can be read again") and it.becomes("seven", "success"), it.log()
        assert node.devices() == SEVEN and it.log().count("the Node can't be read") == 1
        # it refuses exactly after the layout is applied
        api.faults.append(Fault("PATCH", "nodes", "status", times=1, code=403, reason="Forbidden", after=1))
        it.ask_for("balanced")
        it.look()
        assert it.says("the Node's state is set again") and it.becomes("balanced", "success"), it.log()
        assert node.devices() == BALANCED and it.log().count("action=applied") == 2


def test_unloaded_driver_is_waited_for(mig_node: MigMaker, api: ApiServer) -> None:
    scenario = mig_machine("h100")
    node = mig_node(scenario.with_faults(NvmlFault("nvmlInitWithFlags", 9)))  # NVML_ERROR_DRIVER_NOT_LOADED
    it = Following(node, api)
    it.ask_for("seven")
    with it:
        assert it.says('tried_again="in 5 s"') and it.becomes("seven", "failed"), it.log()
        node.stub.write(scenario)
        it.look()
        assert it.becomes("seven", "success") and node.devices() == SEVEN, it.log()


def test_label_changed_during_apply_is_applied_next(mig_node: MigMaker, api: ApiServer) -> None:
    node = mig_node(mig_machine("h100"))
    it = Following(node, api)
    it.ask_for("seven")
    api.faults.append(Fault("PATCH", "nodes", "meanwhile", act=lambda: it.ask_for("balanced")))
    with it:
        assert it.becomes("balanced", "success") and it.says("action=applied", 2), it.log()
        assert node.devices() == BALANCED
    assert it.log().count("action=applied") == 2, it.log()


def test_stopping_during_a_change_rolls_it_back(mig_node: MigMaker, api: ApiServer) -> None:
    scenario = mig_machine("h100")
    node = mig_node(scenario)
    it = Following(node, api)
    assert node.apply("balanced", file=str(it.file)).code == 0
    node.stub.write(scenario.with_faults(NvmlFault("migChange", hang=60.0, after=6, times=1)))
    it.ask_for("seven")
    with it:  # before the seventh hangs, the rollback would
        assert eventually(lambda: node.stub.fault_calls() == 7), it.log()
        assert it.end() == 0, it.log()
    assert node.devices() == BALANCED and it.set() == ["pending", "failed"]
    assert "interrupted" not in node.run("list").err


def test_run_continues_after_a_killed_one(mig_node: MigMaker, api: ApiServer) -> None:
    scenario = mig_machine("h100")
    node = mig_node(scenario)
    done = systemctl(node)
    it = Following(node, api)
    with changing(node, scenario, "media", 3, "--drain", "nvidia-dcgm"):
        pass
    assert done() == ["stop nvidia-dcgm.service"]
    it.ask_for("seven")
    with it:
        assert it.becomes("seven", "success") and it.says("has left stopped: nvidia-dcgm.service"), it.log()
    assert done()[1:] == ["start nvidia-dcgm.service"] and node.devices() == SEVEN


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-f", "x", "-c", "all-1g"), "with --watch the Node's label nvidia.com/mig.config says which"),
        (("-f", "-"), "--watch reads the file again and again"),
        (("-f", "x", "--persist"), "--watch applies the layout when it starts"),
        ((), "no configuration file was given"),
    ],
)
def test_contradicting_options_are_refused(
    mig_node: MigMaker, options: tuple[str, ...], message: str
) -> None:
    ran = mig_node(mig_machine("h100")).run("apply", "--watch", *options)
    assert ran.code == 2 and message in ran.err
