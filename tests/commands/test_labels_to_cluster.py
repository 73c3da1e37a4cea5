"""`gpunode labels` onto a Node and into a NodeFeature object, against a server as strict as a real one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from fixtures.api_server import ADMIN, ApiServer, Fault, Listening, kubeconfig, make_client
from tests.cli import clean_environment
from tests.cluster import NODE, Gpunode
from tests.waiting import PATIENCE, eventually

ANNOTATION = "gpunode/nvidia-labels"
NFD = "nfd.node.kubernetes.io/feature-labels"


def ours(api: ApiServer) -> dict[str, str]:
    found = api.node(NODE)["metadata"]["labels"]
    return {key: value for key, value in found.items() if key.startswith("nvidia.com/")}


def features(api: ApiServer) -> list[dict[str, Any]]:
    return list(api.store.list("NodeFeature", "nfd"))


# --- the Node -------------------------------------------------------------------------------------------


def test_labels_are_added_and_removed_in_one_patch_each(api: ApiServer, run: Gpunode) -> None:
    api.node(NODE)["metadata"]["labels"] |= {
        "nvidia.com/mig.config": "all-balanced",
        "nvidia.com/gpu.present": "true",
    }
    done = run("labels", "--simulate", "a100:2,mig=1g.5gb*7", "--mig-strategy", "mixed", "--to", "node")
    assert done.code == 0, done.err
    assert len(api.changes()) == 1
    found = ours(api)
    assert found["nvidia.com/mig-1g.5gb.count"] == "14"
    keys = api.node(NODE)["metadata"]["annotations"][ANNOTATION].split(",")
    assert sorted(keys) == keys
    assert set(keys) == found.keys() - {"nvidia.com/mig.config", "nvidia.com/gpu.present"}

    again = run("labels", "--simulate", "a100:2,mig=1g.5gb*7", "--mig-strategy", "mixed", "--to", "node")
    assert (again.code, "unchanged" in again.out, len(api.changes())) == (0, True, 1)

    other = run("labels", "--simulate", "l40s:4", "--to", "node")
    assert (other.code, len(api.changes())) == (0, 2), other.err
    found = ours(api)
    assert found["nvidia.com/gpu.count"] == "4"
    assert not any(key.startswith("nvidia.com/mig-") for key in found)
    assert found["nvidia.com/mig.config"] == "all-balanced"
    assert api.node(NODE)["metadata"]["labels"]["pool"] == "a"


def test_dry_run_only_reads(api: ApiServer, run: Gpunode) -> None:
    done = run(
        "labels", "--simulate", "h100:8", "--to", "node,node-feature", "--namespace", "nfd", "--dry-run"
    )
    assert done.code == 0, done.err
    assert api.changes() == []
    assert "+nvidia.com/gpu.count=8" in done.out
    assert f"node {NODE}: would be updated" in done.out, "the Node itself exists"
    assert f"nodefeature nfd/nvidia-features-for-{NODE}: would be created" in done.out


@pytest.mark.parametrize("sink", ["node", "node-feature"])
def test_node_name_is_read_from_the_kubelets_certificate(
    api: ApiServer, run: Gpunode, certificates: Path, tmp_path: Path, sink: str
) -> None:
    """As on EKS, where the node's name differs from the machine's."""
    pem = tmp_path / "kubelet-client-current.pem"
    make_client(certificates, pem, f"system:node:{NODE}")
    api.users[f"system:node:{NODE}"] = f"system:node:{NODE}"
    file = tmp_path / "kubelet.conf"
    file.write_text(kubeconfig(api, **{"client-certificate": str(pem), "client-key": str(pem)}))
    argv = ("labels", "--simulate", "h100:8", "--to", sink, "--namespace", "nfd", "--dry-run")
    done = run(*argv, "--kubeconfig", str(file), NODE_NAME="")
    assert done.code == 0, done.err
    assert NODE in done.out


def test_options_are_named_as_in_other_commands(api: ApiServer, run: Gpunode) -> None:
    argv = ("labels", "--simulate", "h100:8", "--to", "node", "--dry-run")
    done = run(*argv, "--node", "gpu-9", "--context", "test")
    assert (done.code, 'nodes "gpu-9" not found' in done.err) == (3, True)
    done = run(*argv, "--context", "other")
    assert (done.code, "has no context 'other'" in done.err) == (3, True)


def test_excluded_gpu_that_does_not_exist_is_reported(run: Gpunode) -> None:
    done = run("labels", "--simulate", "h100:8", "--exclude", "99")
    assert (done.code, "warning: exclude: this node has no GPU 99\n" in done.err) == (0, True)
    assert "nvidia.com/gpu.count=8\n" in done.out


def test_relative_output_path_is_refused_with_the_absolute_one(run: Gpunode) -> None:
    done = run("labels", "--output-file", "gfd")
    assert (done.code, done.err.splitlines()[-1]) == (
        2,
        f"hint: from here it is: --output-file {Path.cwd() / 'gfd'}",
    )


def test_invalid_value_names_its_option(run: Gpunode) -> None:
    done = run("labels", "--to", "nodes")
    assert done.code == 2
    assert done.err.splitlines() == [
        "error: --to: 'nodes' is not one of stdout, file, node-feature, node",
        "hint: did you mean node? See gpunode labels --help",
    ]


def test_labels_of_another_owner_are_shown_in_the_plan(api: ApiServer, run: Gpunode) -> None:
    argv = ("labels", "--simulate", "h100:8", "--to", "node", "--no-timestamp")
    api.node(NODE)["metadata"]["labels"]["nvidia.com/gpu.count"] = "4"
    done = run(*argv, "--dry-run")
    assert "-nvidia.com/gpu.count=4\n" in done.out
    assert f"node {NODE}: would be updated" in done.out
    assert run(*argv).code == 0
    # left by a removed tool: they are correct, and from now on ours
    del api.node(NODE)["metadata"]["annotations"][ANNOTATION]
    assert f"+{ANNOTATION}=nvidia.com/cuda.driver" in run(*argv, "--dry-run").out
    assert "updated" in run(*argv).out
    assert "nvidia.com/gpu.count" in api.node(NODE)["metadata"]["annotations"][ANNOTATION]
    assert "unchanged" in run(*argv).out


def test_removed_or_changed_label_is_restored(api: ApiServer, run: Gpunode) -> None:
    run("labels", "--simulate", "h100:8", "--to", "node")
    before = ours(api)
    labels = api.node(NODE)["metadata"]["labels"]
    del labels["nvidia.com/gpu.count"]
    labels["nvidia.com/gpu.family"] = "fermi"
    assert "updated" in run("labels", "--simulate", "h100:8", "--to", "node").out
    stamp = "nvidia.com/gfd.timestamp"
    assert ours(api) | {stamp: ""} == before | {stamp: ""}


def test_labels_managed_by_nfd_are_refused(api: ApiServer, run: Gpunode) -> None:
    node = api.node(NODE)
    node["metadata"]["annotations"] = {NFD: "cpu-model.id,nvidia.com/gpu.count,nvidia.com/gpu.product"}
    node["metadata"]["labels"]["nvidia.com/gpu.count"] = "8"
    for more in ((), ("--dry-run",)):
        done = run("labels", "--simulate", "h100:8", "--to", "node", *more)
        assert done.code == 3
        assert "Node Feature Discovery keeps nvidia.com/gpu.count and 1 more of these labels" in done.err
    assert api.changes() == []


def test_patch_is_retried_if_the_node_changed_meanwhile(api: ApiServer, run: Gpunode) -> None:
    def meanwhile() -> None:
        node = api.node(NODE)
        node["metadata"]["labels"]["pool"] = "b"
        api.store.put("Node", node)

    api.faults.append(Fault("PATCH", f"/nodes/{NODE}", "meanwhile", act=meanwhile))
    done = run("labels", "--simulate", "h100:8", "--to", "node")
    assert done.code == 0, done.err
    assert ours(api)["nvidia.com/gpu.count"] == "8"
    assert api.node(NODE)["metadata"]["labels"]["pool"] == "b"


@pytest.mark.parametrize(
    "fault",
    [
        Fault("PATCH", "/nodes/", "cut"),
        Fault("PATCH", "/nodes/", "cut-after"),
        Fault("PATCH", "/nodes/", "status", times=2),
        Fault("GET", "/nodes/", "status", code=429, reason="TooManyRequests"),
    ],
    ids=lambda fault: f"{fault.method} {fault.kind}",
)
def test_interrupted_server_connection_is_retried(api: ApiServer, run: Gpunode, fault: Fault) -> None:
    api.faults.append(fault)
    done = run("labels", "--simulate", "h100:8", "--to", "node")
    assert done.code == 0, done.err
    assert ours(api)["nvidia.com/gpu.count"] == "8"


def test_unavailable_server_leaves_no_partial_labels(api: ApiServer, run: Gpunode) -> None:
    api.faults.append(Fault("PATCH", "/nodes/", "status", times=99))
    done = run("labels", "--simulate", "h100:8", "--to", "node")
    assert done.code == 1
    assert "nothing was changed" in done.err
    assert ours(api) == {}


def test_missing_node_and_missing_rights_are_refused(api: ApiServer, run: Gpunode) -> None:
    assert run("labels", "--simulate", "h100:8", "--to", "node", NODE_NAME="gpu-2").code == 3
    api.users[ADMIN] = "reader"
    done = run("labels", "--simulate", "h100:8", "--to", "node")
    assert done.code == 3
    assert "forbidden" in done.err.lower()


def test_amd_labels_have_their_own_annotation(api: ApiServer, run: Gpunode, tmp_path: Path) -> None:
    run("labels", "--simulate", "h100:8", "--to", "node")
    # this machine has no AMD GPU: nothing to set, and no label of NVIDIA's to remove
    done = run("labels", "--vendor", "amd", "--to", "node")
    assert (done.code, "unchanged" in done.out, len(api.changes())) == (0, True, 1)
    assert ours(api)["nvidia.com/gpu.count"] == "8"


def test_labels_are_set_through_a_kubectl_proxy(run: Gpunode) -> None:
    """As the hint says if there is no other method."""
    plain = ApiServer(anonymous="admin")
    plain.add_node(NODE)
    with Listening(plain, None):
        argv = ("labels", "--simulate", "h100:8", "--to", "node")
        lost = run(*argv, KUBECONFIG="")
        assert (lost.code, "--server http://127.0.0.1:8001" in lost.err) == (3, True)
        done = run(*argv, "--server", plain.url, KUBECONFIG="")
        assert done.code == 0, done.err
    assert ours(plain)["nvidia.com/gpu.count"] == "8"


# --- NodeFeature ----------------------------------------------------------------------------------------


def test_nodefeature_object_is_written(api: ApiServer, run: Gpunode) -> None:
    argv = ("labels", "--use-node-feature-api", "--namespace", "nfd")
    assert run(*argv, "--simulate", "h100:8").code == 0
    (made,) = features(api)
    assert made["metadata"]["name"] == f"nvidia-features-for-{NODE}"
    assert made["metadata"]["labels"] == {"nfd.node.kubernetes.io/node-name": NODE}
    assert made["spec"]["labels"]["nvidia.com/gpu.count"] == "8"
    assert made["spec"]["features"] == {"attributes": {}, "flags": {}, "instances": {}}

    assert "unchanged" in run(*argv, "--simulate", "h100:8").out
    assert len(api.changes()) == 1

    made["spec"]["features"] = {"attributes": {"x": {"elements": {}}}, "flags": {}, "instances": {}}
    assert run(*argv, "--simulate", "l40s:2").code == 0
    (now,) = features(api)
    assert now["spec"]["labels"]["nvidia.com/gpu.product"] == "NVIDIA-L40S"
    assert now["spec"]["features"]["attributes"] == {"x": {"elements": {}}}


def test_nodefeature_is_owned_by_the_daemonset_of_our_pod(api: ApiServer, run: Gpunode) -> None:
    owner = {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "labels", "uid": "u-1", "controller": True}
    pod = {"metadata": {"name": "labels-x", "namespace": "nfd", "uid": "u-2", "ownerReferences": [owner]}}
    api.store.put("Pod", pod, "nfd")
    argv = ("labels", "--to", "node-feature", "--namespace", "nfd", "--simulate", "h100:8")
    assert run(*argv, POD_NAME="labels-x").code == 0
    (made,) = features(api)
    assert [
        (one["kind"], one["name"], one.get("controller")) for one in made["metadata"]["ownerReferences"]
    ] == [
        ("DaemonSet", "labels", True),
        ("Pod", "labels-x", None),
    ]


def test_deleted_owners_are_replaced(api: ApiServer, run: Gpunode) -> None:
    """A DaemonSet that is installed again has another uid: the old one's object is garbage-collected."""
    argv = ("labels", "--to", "node-feature", "--namespace", "nfd", "--simulate", "h100:8")
    for uid in ("u-1", "u-9"):
        owner = {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "labels", "uid": uid}
        pod = {"metadata": {"name": "x", "namespace": "nfd", "uid": f"{uid}p", "ownerReferences": [owner]}}
        api.store.put("Pod", pod, "nfd")
        done = run(*argv, POD_NAME="x")
        assert done.code == 0, done.err
        assert [one["uid"] for one in features(api)[0]["metadata"]["ownerReferences"]] == [uid, f"{uid}p"]
    assert "unchanged" in run(*argv, POD_NAME="x").out
    assert "unchanged" in run(*argv, POD_NAME="gone").out  # its owner is unknown: it stays unchanged
    # no pod of ours: the end of a pod must not remove the labels
    assert "-ownerReferences=DaemonSet labels u-9, Pod x u-9p\n" in run(*argv, "--dry-run").out
    assert "updated" in run(*argv).out
    assert "ownerReferences" not in features(api)[0]["metadata"]


def test_unknown_pod_only_gives_a_warning(api: ApiServer, run: Gpunode) -> None:
    argv = ("labels", "--to", "node-feature", "--namespace", "nfd", "--simulate", "h100:8")
    done = run(*argv, "--pod-name", "gone")
    assert done.code == 0, done.err
    assert "gets no owner" in done.err
    assert "ownerReferences" not in features(api)[0]["metadata"]


def test_cluster_without_nfd_is_refused(api: ApiServer, run: Gpunode) -> None:
    api.without.add("NodeFeature")
    done = run("labels", "--to", "node-feature", "--namespace", "nfd", "--simulate", "h100:8")
    assert done.code == 3
    assert "install Node Feature Discovery" in done.err


@pytest.mark.parametrize("kind", ["cut", "cut-after", "status"])
@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_lost_response_is_checked_by_reading_again(
    api: ApiServer, run: Gpunode, method: str, kind: str
) -> None:
    argv = ("labels", "--to", "node-feature", "--namespace", "nfd", "--simulate")
    if method == "PUT":
        assert run(*argv, "l40s:1").code == 0
    api.faults.append(Fault(method, "nodefeatures", kind))
    done = run(*argv, "h100:8")
    assert done.code == 0, done.err
    assert features(api)[0]["spec"]["labels"]["nvidia.com/gpu.count"] == "8"


# --- kept -----------------------------------------------------------------------------------------------


class Running:
    """gpunode as a process that stays, its stderr in a file."""

    def __init__(self, place: Path, api: ApiServer, *argv: str) -> None:
        config = place / "kubeconfig"
        config.write_text(kubeconfig(api))
        self.log = place / "log"
        env = clean_environment({"HOME": str(place), "KUBECONFIG": str(config), "NODE_NAME": NODE})
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gpunode", *argv], env=env, stderr=log, stdout=subprocess.DEVNULL
            )

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)


@pytest.fixture
def running(api: ApiServer, tmp_path: Path) -> Iterator[list[Running]]:
    started: list[Running] = []
    yield started
    for one in started:
        if one.process.poll() is None:
            os.kill(one.process.pid, signal.SIGKILL)
            one.process.wait(PATIENCE)


@pytest.mark.full
def test_watch_keeps_labels_updated_and_leaves_them_on_exit(
    api: ApiServer, tmp_path: Path, running: list[Running]
) -> None:
    argv = ("labels", "--watch", "--to", "node", "--simulate", "h100:8", "--sleep-interval", "1s")
    running.append(Running(tmp_path, api, *argv))
    log = running[0].log.read_text
    assert eventually(lambda: ours(api).get("nvidia.com/gpu.count") == "8"), log()
    with api.lock:
        del api.node(NODE)["metadata"]["labels"]["nvidia.com/gpu.count"]
    assert eventually(lambda: "nvidia.com/gpu.count" in ours(api)), log()
    assert running[0].end() == 0
    assert ours(api)["nvidia.com/gpu.count"] == "8"
    assert "action=updated" in log()
    assert "injected" not in log(), "only a simulated plugin takes faults, in its own directory"


def test_plugin_keeps_labels_updated(api: ApiServer, tmp_path: Path, running: list[Running]) -> None:
    with TemporaryDirectory(prefix="gp-") as short:  # a socket's path is short; its kubelet never comes
        argv = ("plugin", "serve", "--labels", "node", "--simulate", "h100:4", "--state-dir", str(tmp_path))
        running.append(Running(tmp_path, api, *argv, "--kubelet-socket", f"{short}/kubelet.sock"))
        log = running[0].log.read_text
        assert eventually(lambda: ours(api).get("nvidia.com/gpu.count") == "4"), log()
        assert running[0].end() == 0
    assert ours(api)["nvidia.com/gpu.count"] == "4"
