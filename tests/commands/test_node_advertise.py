"""`gpunode node advertise` as a user runs it: written, read back, and refused if a plugin serves."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from fixtures.api_objects import record_writer
from fixtures.api_server import ApiServer, Fault, kubeconfig
from fixtures.scenario import machine
from fixtures.stubs import stub_node
from gpunode.commands.node import served
from gpunode.host import Host
from tests.cli import clean_environment, command, gpunode
from tests.cluster import Gpunode
from tests.waiting import PATIENCE, eventually

GPU = ("node", "advertise", "--resource", "nvidia.com/gpu")


def amounts(api: ApiServer, resource: str = "nvidia.com/gpu") -> tuple[str | None, str | None]:
    status = api.node("gpu-1")["status"]
    return status["capacity"].get(resource), status["allocatable"].get(resource)


def test_resource_is_written_and_read_back_until_allocatable(api: ApiServer, run: Gpunode) -> None:
    done = run(*GPU, "--count", "8", "-o", "json")
    assert done.code == 0, done.err
    assert amounts(api) == ("8", "8")
    (sent,) = api.changes()
    assert sent.path == "/api/v1/nodes/gpu-1/status"
    assert sent.body[-1] == {"op": "add", "path": "/status/capacity/nvidia.com~1gpu", "value": "8"}
    data = done.document["data"]
    assert (data["capacity"], data["allocatable"]) == ("8", "8")
    assert any("this adds no device" in one for one in done.document["messages"])

    again = run(*GPU, "--count", "8")
    assert again.code == 0
    assert again.out.startswith("node gpu-1 unchanged")
    assert len(api.changes()) == 1

    more = run(*GPU, "--count", "4", "-o", "json")
    assert (more.code, amounts(api)) == (0, ("4", "4"))
    assert api.changes()[-1].body[0] == {
        "op": "test",
        "path": "/status/capacity/nvidia.com~1gpu",
        "value": "8",
    }
    assert run(*shlex.split(more.document["data"]["undo"])[1:]).code == 0
    assert amounts(api) == ("8", "8")
    assert run(*shlex.split(data["undo"])[1:]).code == 0
    assert amounts(api) == (None, None)


def test_dry_run_sends_nothing(api: ApiServer, run: Gpunode) -> None:
    done = run(*GPU, "--count", "8", "--dry-run")
    assert done.code == 0, done.err
    assert "PATCH /api/v1/nodes/gpu-1/status" in done.out
    patch = json.loads(done.out[done.out.index("[{") :])
    assert patch[-1]["path"] == "/status/capacity/nvidia.com~1gpu"
    assert api.changes() == []


def test_kubelet_that_does_not_update_the_status_is_reported(api: ApiServer, run: Gpunode) -> None:
    api.kubelet = None
    done = run(*GPU, "--count", "8", "--wait", "0", "-o", "json")
    assert done.code == 1
    assert amounts(api) == ("8", None)
    (error,) = done.document["errors"]
    assert error["code"] == "not-allocatable"
    assert "capacity 8, allocatable none" in error["message"]
    assert done.document["data"]["undo"].endswith("--resource nvidia.com/gpu --remove")


def test_advertise_waits_for_the_kubelet(api: ApiServer, run: Gpunode) -> None:
    api.kubelet = 2
    assert run(*GPU, "--count", "8", "--wait", str(PATIENCE)).code == 0
    assert amounts(api) == ("8", "8")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_shows_what_takes_longer_than_a_second(
    api: ApiServer, tmp_path: Path, terminal: bool
) -> None:
    api.kubelet = None
    path = tmp_path / "kubeconfig"
    path.write_text(kubeconfig(api))
    argv = command(*GPU, "--count", "8", "--wait", "1500ms", "--node", "gpu-1", "--kubeconfig", str(path))
    ours, theirs = pty.openpty() if terminal else os.pipe()
    ran = subprocess.run(argv, env=clean_environment({"TERM": "xterm"}), stderr=theirs, check=False)
    os.close(theirs)
    shown = b""
    with suppress(OSError), os.fdopen(ours, "rb", 0) as stream:  # EIO is a terminal's end
        while part := stream.read(4096):
            shown += part
    assert ran.returncode == 1
    seen = re.sub(r"[1-9]\d*\.\d s", "N s", shown.decode())  # on a busy machine more than the 1.5 s
    step = "  waiting for the kubelet"
    assert (f"\r{step} ...\x1b[K\r\x1b[K{step}: done in N s\r\n" in seen) == terminal
    assert "querying" not in seen and ("waiting" in seen) == terminal


def test_plugin_that_overwrites_the_count_is_reported(api: ApiServer, run: Gpunode) -> None:
    api.kubelet, api.plugin = None, {"nvidia.com/gpu": "2"}

    def kubelet_looks() -> None:
        api.kubelet = 0

    # before the first read after the change: a second one may be too late for so short a wait
    api.faults.append(Fault("GET", "/nodes/", "meanwhile", act=kubelet_looks, after=1))
    done = run(*GPU, "--count", "8", "--wait", "0.2", "-o", "json")
    assert done.code == 1
    assert done.document["errors"][0]["code"] == "overwritten"


@pytest.mark.parametrize("options", [("--count", "8"), ("--remove",)])
def test_resource_served_by_a_plugin_is_refused_without_force(
    api: ApiServer, run: Gpunode, options: tuple[str, ...]
) -> None:
    api.add_node("gpu-1", capacity={"nvidia.com/gpu": "4"})
    done = run(*GPU, *options, "-o", "json")
    assert done.code == 3
    (error,) = done.document["errors"]
    assert error["code"] == "resource-served"
    assert "kubelet set it" in error["message"]
    assert (api.changes(), amounts(api)) == ([], ("4", "4"))
    assert run(*GPU, *options, "--force").code == 0


def test_resource_with_an_unknown_writer_is_refused(api: ApiServer, run: Gpunode) -> None:
    node = api.add_node("gpu-1", capacity={"nvidia.com/gpu": "4"})
    del node["metadata"]["managedFields"]
    done = run(*GPU, "--count", "8")
    assert (done.code, "who set it isn't recorded" in done.err) == (3, True)


def test_zero_left_by_a_removed_plugin_may_be_replaced(api: ApiServer, run: Gpunode) -> None:
    api.add_node("gpu-1", capacity={"nvidia.com/gpu": "0"})
    done = run(*GPU, "--count", "8", "-o", "json")
    assert (done.code, amounts(api)) == (0, ("8", "8"))
    back = run(*shlex.split(done.document["data"]["undo"])[1:])
    assert (back.code, amounts(api)) == (0, ("0", "0")), back.err


def test_count_that_the_server_writes_as_1k_is_parsed(api: ApiServer, run: Gpunode) -> None:
    more = ("node", "advertise", "--resource", "example.com/memory", "--count")
    done = run(*more, "80000", "-o", "json")
    assert (done.code, amounts(api, "example.com/memory")) == (0, ("80k", "80k")), done.err
    assert done.document["data"]["allocatable"] == "80000"
    assert run(*more, "80000").out.startswith("node gpu-1 unchanged")
    less = run(*more, "5", "-o", "json")
    assert less.document["data"]["undo"].endswith("--count 80000")


def test_server_lost_after_the_write_leaves_an_undo_command(api: ApiServer, run: Gpunode) -> None:
    api.faults.append(Fault("GET", "/nodes/", "cut", 99, after=1))
    done = run(*GPU, "--count", "8", "-o", "json")
    assert done.code == 1
    (error,) = done.document["errors"]
    assert error["code"] == "kubernetes-unreachable"
    assert "was written, but it couldn't be read back" in error["message"]
    assert done.document["data"]["undo"].endswith("--remove")
    assert amounts(api)[0] == "8"


@pytest.mark.parametrize("before", [None, "2"])
def test_ctrl_c_while_waiting_for_the_kubelet_rolls_back(
    api: ApiServer, tmp_path: Path, before: str | None
) -> None:
    api.kubelet = None
    if before is not None:
        node = api.node("gpu-1")
        node["status"]["capacity"]["example.com/gpu"] = before
        record_writer({}, node, "gpunode")
    path = tmp_path / "kubeconfig"
    path.write_text(kubeconfig(api))
    env = {"HOME": str(tmp_path), "KUBECONFIG": str(path), "NODE_NAME": "gpu-1"}
    # not nvidia.com/gpu, which a plugin on the machine that runs the tests may serve
    words = command("node", "advertise", "--resource", "example.com/gpu", "--count", "8")
    with subprocess.Popen(words, env=clean_environment(env), stderr=subprocess.PIPE, text=True) as process:
        assert eventually(lambda: "PATCH GET" in " ".join(one.method for one in list(api.asked)))
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, err
    assert "rolled back" in err
    assert amounts(api, "example.com/gpu")[0] == before


def test_count_written_concurrently_is_not_overwritten(api: ApiServer, run: Gpunode) -> None:
    def plugin_registers() -> None:
        node = api.node("gpu-1")
        before = json.loads(json.dumps(node))
        node["status"]["capacity"]["nvidia.com/gpu"] = "2"
        record_writer(before, node, "kubelet")
        api.store.put("Node", node)

    api.faults.append(Fault("PATCH", "/status", "meanwhile", act=plugin_registers))
    done = run(*GPU, "--count", "8")
    assert done.code == 3, done.out
    assert "kubelet set it" in done.err
    assert amounts(api)[0] == "2"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--resource", "gpu", "--count", "1"], "'gpu' has no domain"),
        (["--resource", "x.kubernetes.io/gpu", "--count", "1"], "can't be an extended resource"),
        (["--resource", "a.b/c", "--count", "-1"], "is not a number of devices"),
        (["--resource", "a.b/c", "--count", "1e3"], "is not a number of devices"),
        (["--resource", "nvidia.com/gpu"], "is another machine"),
    ],
)
def test_contradicting_options_are_refused(
    api: ApiServer, run: Gpunode, options: list[str], message: str
) -> None:
    done = run("node", "advertise", *options, "--node", "gpu-9")
    assert done.code == 2
    assert message in done.err
    assert api.changes() == []


def test_auto_counts_the_whole_gpus_of_this_machine(api: ApiServer, run: Gpunode, tmp_path: Path) -> None:
    node = stub_node(tmp_path, machine(4))
    done = run(*GPU, "--force", **node.env)  # a plugin may serve the machine that runs the tests
    assert done.code == 0, done.err
    assert amounts(api) == ("4", "4")
    other = run("node", "advertise", "--resource", "example.com/x")
    assert (other.code, "can't be determined" in other.err) == (2, True)
    none = run(*GPU, **stub_node(tmp_path, machine(0)).env)
    assert (none.code, "no whole GPU" in none.err) == (3, True)


def test_kubelet_checkpoint_shows_what_a_plugin_serves(tmp_path: Path) -> None:
    path = tmp_path / "var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"Data": {"RegisteredDevices": {"nvidia.com/gpu": ["GPU-1"]}}}))
    host = Host(tmp_path)
    assert served(host, "nvidia.com/gpu").endswith("kubelet_internal_checkpoint")
    assert served(host, "example.com/gpu") == ""
    path.write_text("nonsense")
    assert served(host, "nvidia.com/gpu") == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--count", "x"], "--count 'x' is not a number of devices"),
        (["--count", "-3"], "--count '-3' is not a number of devices"),
        (["--count", "3", "--remove"], "--count and --remove exclude each other"),
    ],
)
def test_count_is_checked_before_the_api_server_is_searched(
    tmp_path: Path, options: list[str], message: str
) -> None:
    env = {"HOME": str(tmp_path), "KUBECONFIG": ""}
    done = gpunode("node", "advertise", "--resource", "nvidia.com/gpu", *options, env=env)
    assert (done.code, done.err.splitlines()[0]) == (2, f"error: {message}")
