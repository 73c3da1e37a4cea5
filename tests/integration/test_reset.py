"""`gpunode reset` on live nodes: real containerd and dockerd, the plugin's unit, a Node in a cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fixtures.api_server import ApiServer, Fault
from fixtures.engines import CONTAINERD_CONFIG, Engine, start_containerd, start_dockerd
from tests.cli import Ran, checked, gpunode
from tests.integration.configuring import Cli, configuring
from tests.integration.kubernetes_node import UNIT, KubernetesNode
from tests.integration.systemd_stand_in import Node, require_namespace
from tests.integration.test_setup_kubernetes import (
    _AS_FROM_A_TERMINAL,
    NAME,
    UNIT_FILE,
    api,
    has_unit,
    node,
    setup,
    states,
)

__all__ = ["api", "node"]
pytestmark = [pytest.mark.containerd, pytest.mark.full]
RESOURCE = ("node", "advertise", "--resource", "example.com/gpu", "--count", "4", "--wait", "0")
STEPS = {"plugin", "node-labels", "node-resources", "runtime-containerd"}
CONFIG = "/etc/containerd/config.toml"


def reset(node: KubernetesNode, *options: str) -> Ran:
    return node.gpunode("reset", "--node", NAME, *options, "-o", "json")


def set_up(node: KubernetesNode) -> None:
    """A step for each of `STEPS`."""
    assert setup(node).code == 0, node.log()
    assert node.gpunode("labels", "--to", "node").code == 0
    assert node.gpunode(*RESOURCE).code in (0, 1)  # no kubelet makes it allocatable


def snapshot(node: KubernetesNode) -> str:
    """Everything in /etc but the journal's own directory: type, mode, owner, path, and contents."""
    listed = "find . -printf '%y %m %u:%g %p %l\\n' | sort"
    return node.sh(f"cd /etc && {listed} && find . -type f | sort | xargs -d '\\n' md5sum")


def test_everything_is_undone_and_nothing_a_second_time(node: KubernetesNode, api: ApiServer) -> None:
    before, object_before = snapshot(node), api.node(NAME)
    fresh = reset(node)
    assert (fresh.code, fresh.document["data"]["left"]) == (0, []), fresh.err
    assert node.sh("ls /var/lib/gpunode 2> /dev/null || true") == ""

    set_up(node)
    assert api.node(NAME)["status"]["capacity"]["example.com/gpu"] == "4"

    calls, asked = node.calls(), len(api.changes())
    planned = node.gpunode("reset", "--node", NAME, "--dry-run")
    assert planned.code == 0, planned.err
    for line in (
        f"{UNIT_FILE} removed (dry run)",
        f"would run: systemctl disable --now {UNIT}",
        f"{CONFIG} updated (dry run)",
        "would run: systemctl restart containerd.service",
        "- nvidia.com/gpu.count=2",
        "- example.com/gpu=4",
    ):
        assert line in planned.out, planned.out
    assert (node.calls(), len(api.changes())) == (calls, asked)

    refused = reset(node)
    assert refused.code == 3 and refused.document["errors"][0]["code"] == "not-confirmed"
    assert (node.calls(), len(api.changes())) == (calls, asked)

    done = reset(node, "--yes")
    assert done.code == 0, done.err + done.out
    assert {name: state for name, state in states(done).items() if state != "right"} == dict.fromkeys(
        STEPS, "done"
    )
    assert done.document["data"]["left"] == []
    assert snapshot(node) == before
    assert node.sh("ls /run/units") == ""
    after = api.node(NAME)
    for part, name in (("metadata", "labels"), ("metadata", "annotations"), ("status", "capacity")):
        assert after[part].get(name, {}) == object_before[part].get(name, {}), name
    journal = node.gpunode("journal", "-o", "json").document["data"]["entries"]
    assert [one["operation"] for one in journal][-2:] == ["reset", "unconfigure-runtime"]

    calls, entries = node.calls(), len(journal)
    again = node.gpunode("reset", "--node", NAME)
    assert (again.code, again.out) == (0, "nothing to reset\n"), again.err
    assert node.calls() == calls
    assert len(node.gpunode("journal", "-o", "json").document["data"]["entries"]) == entries


def test_a_failed_step_stops_only_what_needs_it(node: KubernetesNode, api: ApiServer) -> None:
    assert setup(node).code == 0, node.log()
    node.sh(f"printf '\\nbroken = \\n' >> {CONFIG}")  # so that containerd's step fails
    failed = reset(node, "--yes")
    assert failed.code == 1, failed.out
    assert states(failed)["runtime-containerd"] == "failed"
    assert states(failed)["plugin"] == "done" and not has_unit(node)
    left = {one["name"]: one["command"] for one in failed.document["data"]["left"]}
    assert left["runtime-containerd"] == "gpunode unconfigure-runtime --runtime containerd"
    assert failed.document["errors"][0]["message"].startswith("runtime-containerd: ")

    node.sh(f"sed -i '/^broken = $/d' {CONFIG}")
    done = reset(node, "--yes")
    assert done.code == 0, done.err
    assert {name for name, state in states(done).items() if state == "done"} == {"runtime-containerd"}
    assert "nvidia" not in node.sh(f"cat {CONFIG}")


def test_a_reset_that_was_rolled_back_is_undone_by_the_next(node: KubernetesNode) -> None:
    """The entries that it had undone are active again; no mark of gpunode's identifies this file."""
    before = snapshot(node)
    level = "nvidia-container-runtime.log-level=debug"
    for command in (("configure-runtime",), ("toolkit", "config", "set", "--create", level)):
        done = node.gpunode(*command)
        assert done.code == 0, done.err
    changed = snapshot(node)
    for _ in range(2):
        done = node.gpunode("reset", "--yes", "-o", "json")
        assert done.code == 0, done.err
        reports = {name for name, state in states(done).items() if state == "done"}
        assert reports == {"runtime-containerd", "toolkit-config"}
        assert snapshot(node) == before
        assert node.gpunode("reset").out.startswith("nothing to reset\n")
        first = node.gpunode("journal", "-o", "json").document["data"]["entries"][1]
        assert first["operation"] == "toolkit-config" and not first["rollback"]
        for operation in ("reset", "unconfigure-runtime"):
            back = node.gpunode("rollback", "-o", "json")
            assert back.code == 0, back.err
            assert back.document["data"]["changes"][0]["action"] == "restored", operation
        assert snapshot(node) == changed


def _plugin_refuses(node: KubernetesNode, api: ApiServer) -> None:
    (node.place / "refuses").touch()


def _labels_refuse(node: KubernetesNode, api: ApiServer) -> None:
    api.faults.append(Fault("PATCH", f"nodes/{NAME}", "status", code=403, reason="Forbidden"))


def _resources_refuse(node: KubernetesNode, api: ApiServer) -> None:
    api.faults.append(Fault("PATCH", f"nodes/{NAME}/status", "status", code=403, reason="Forbidden"))


def _containerd_refuses(node: KubernetesNode, api: ApiServer) -> None:
    node.sh(f"mv {node.place}/bin/containerd-again {node.place}/again")
    node.sh(
        f"printf '#!/bin/sh\\nexit 1\\n' > {node.place}/bin/containerd-again; chmod +x {node.place}/bin/*"
    )


FAILURES = {
    "plugin": (_plugin_refuses, {"node-labels", "node-resources"}),
    "node-labels": (_labels_refuse, set()),
    "node-resources": (_resources_refuse, set()),
    "runtime-containerd": (_containerd_refuses, set()),
}
"""What makes each step fail, and the steps with something to undo that then wait for it."""


@pytest.mark.parametrize("step", FAILURES)
def test_each_step_that_fails_is_rolled_back_and_the_others_are_taken(
    node: KubernetesNode, api: ApiServer, step: str
) -> None:
    before = snapshot(node)
    set_up(node)
    fails, wait = FAILURES[step]
    fails(node, api)
    failed = reset(node, "--yes")
    assert failed.code == 1, failed.out
    after = states(failed)
    assert {name for name, state in after.items() if state == "failed"} == {step}
    assert {name for name, state in after.items() if state == "waiting"} == wait
    assert {name for name, state in after.items() if state == "done"} == STEPS - {step} - wait
    assert {one["name"] for one in failed.document["data"]["left"]} == {step, *wait}
    assert all(one["command"] for one in failed.document["data"]["left"])
    assert failed.document["errors"][0]["message"].startswith(f"{step}: ")
    if step == "plugin":
        assert has_unit(node) and node.sh("ls /run/units/*.enabled") != ""

    (node.place / "refuses").unlink(missing_ok=True)
    node.sh(f"! test -e {node.place}/again || mv {node.place}/again {node.place}/bin/containerd-again")
    done = reset(node, "--yes")
    assert done.code == 0, done.err + done.out
    assert {name for name, state in states(done).items() if state == "done"} == {step} | (wait & STEPS)
    assert snapshot(node) == before


def test_unit_of_the_package_that_a_failed_step_disabled_is_as_before(node: KubernetesNode) -> None:
    """Its file is not gpunode's to remove, so there is none to restore either."""
    unit = f"/run/systemd/system/{UNIT}"
    node.sh(f"printf '[Service]\\nExecStart=sleep 1000\\n' > {unit}; systemctl enable --now {UNIT}")
    (node.place / "refuses").touch()
    failed = node.gpunode("reset", "--yes", "-o", "json")
    assert failed.code == 1 and states(failed)["plugin"] == "failed", failed.out
    assert f"Job for {UNIT} failed" in failed.document["errors"][0]["message"]
    assert node.sh(f"systemctl is-enabled {UNIT}; systemctl is-active {UNIT}") == "enabled\nactive\n"

    (node.place / "refuses").unlink()
    done = node.gpunode("reset", "--yes", "-o", "json")
    assert (done.code, states(done)["plugin"]) == (0, "done"), done.out
    assert node.sh(f"systemctl is-enabled {UNIT}; systemctl is-active {UNIT}") == "disabled\ninactive\n"


def test_ctrl_c_and_kill_leave_no_half_of_a_step(node: KubernetesNode, api: ApiServer) -> None:
    before = snapshot(node)
    hold, restart, again = (f"{node.place}/{name}" for name in ("hold", "bin/containerd-again", "again"))
    # a restart that finds the file removes it, and doesn't end: the signal always arrives during the restart
    wait = f"test -e {hold} && rm {hold} && exec sleep 600\\nexec {again}"
    node.sh(f"mv {restart} {again} && printf '#!/bin/sh\\n{wait}\\n' > {restart} && chmod +x {restart}")
    for name, code in (("INT", 130), ("KILL", -9)):
        set_up(node)
        node.sh(f"touch {hold}")
        # containerd's step comes after the steps for the plugin and the Node
        script = (
            f"(while [ -e {hold} ]; do sleep 0.02; done; kill -{name} $$) &"
            f" exec {node.place}/venv/bin/python -c '{_AS_FROM_A_TERMINAL}'"
            f" reset --node {NAME} --yes -o json"
        )
        stopped = node.cli.program("sh", "-c", script, env=node.environ)
        assert stopped.code == code, stopped.err + stopped.out
        if name == "INT":
            assert states(stopped)["plugin"] == "done"
            assert states(stopped)["runtime-containerd"] == "interrupted"
            assert "nvidia" in node.sh(f"cat {CONFIG}")
            (error,) = stopped.document["errors"]
            assert error["message"].endswith("; undone before it: plugin, node-labels, node-resources")
            assert error["hint"] == "go on with: gpunode reset; see what was done: gpunode journal list"
        assert not has_unit(node)
        done = reset(node, "--yes")
        assert done.code == 0, done.err + done.out
        assert snapshot(node) == before


def test_a_node_of_another_machine_is_left_alone(node: KubernetesNode, api: ApiServer) -> None:
    set_up(node)
    asked = len(api.changes())
    done = node.gpunode("reset", "--yes", "-o", "json")
    assert done.code == 0, done.err
    assert states(done)["node-labels"] == states(done)["node-resources"] == "left"
    assert all("another machine-id" in one["why"] for one in done.document["data"]["left"])
    assert len(api.changes()) == asked

    del node.environ["KUBECONFIG"]
    done = node.gpunode("reset")
    assert done.code == 0 and done.out.startswith("nothing to reset\n"), done.out
    assert "no API server is configured" in done.out and "gpunode reset --kubeconfig PATH" in done.out


@pytest.mark.docker
@pytest.mark.parametrize("edited", [False, True])
def test_docker_and_containerd_are_as_before(tmp_path: Path, edited: bool) -> None:
    require_namespace()
    with start_dockerd({"debug": True}) as docker, start_containerd(CONTAINERD_CONFIG) as containerd:
        machine = Node(docker, tmp_path, (containerd,))
        machine.prepare()
        before = [engine.config.read_bytes() for engine in machine.engines]
        assert machine.gpunode("configure-runtime").returncode == 0
        if edited:  # by another program, since
            settings = json.loads(docker.config.read_text())
            docker.config.write_text(json.dumps({**settings, "log-level": "info"}))
        refused = machine.gpunode("reset")
        assert refused.returncode == 3 and "the reset was not confirmed" in refused.stderr
        done = machine.gpunode("reset", "--yes", "-o", "json")
        assert done.returncode == 0, done.stderr
        if edited:
            assert json.loads(docker.config.read_text()) == {"debug": True, "log-level": "info"}
        else:
            assert docker.config.read_bytes() == before[0]
        assert containerd.config.read_bytes() == before[1]
        assert all(engine.running for engine in machine.engines)
        again = machine.gpunode("reset")
        assert (again.returncode, again.stdout) == (0, "nothing to reset\n"), again.stderr


@pytest.mark.docker
def test_the_question_on_a_terminal(docker: Engine, tmp_path: Path) -> None:
    runtime = tmp_path / "nvidia-container-runtime"
    runtime.write_text('#!/bin/sh\nexec runc "$@"\n')
    runtime.chmod(0o755)
    cli = Cli(docker, tmp_path / "state", runtime)
    before = docker.config.read_bytes()
    cli.data("configure-runtime")
    configured = docker.config.read_bytes()
    for typed in (b"n\n", b"\n", b"\x04"):
        code, shown = cli.on_terminal(typed, "reset")
        assert code == 3 and "Reset this node? [y/N]" in shown and "nothing was changed" in shown
        assert f"nvidia in {docker.config}" in shown.replace("\r\n", "")
        assert docker.config.read_bytes() == configured
    code, shown = cli.on_terminal(b"y\n", "reset")
    assert code == 0 and docker.config.read_bytes() == before, shown
    assert cli.on_terminal(b"", "reset")[0] == 0


def test_an_engine_that_systemd_does_not_run_is_left_with_a_command_that_works(tmp_path: Path) -> None:
    with configuring(start_containerd(CONTAINERD_CONFIG), tmp_path) as cli:
        before = cli.engine.config.read_text()
        cli.data("configure-runtime", "--no-restart")
        for options in ("--dry-run", "--yes"):
            ran = cli.run("reset", options, "-o", "json")
            (error,) = checked(ran.stdout)["errors"]
            (left,) = checked(ran.stdout)["data"]["left"]
            assert "systemd doesn't run it on this node" in error["message"]
            assert left["command"] == error["hint"]
        command = f"gpunode unconfigure-runtime --runtime containerd --config {cli.engine.config}"
        assert left["command"] == f"{command} --no-restart"
        undone = gpunode(*left["command"].split()[1:], env=cli.environ)
        assert undone.code == 0, undone.err
        assert cli.engine.config.read_text() == before
        assert cli.run("reset").stdout == "nothing to reset\n"
