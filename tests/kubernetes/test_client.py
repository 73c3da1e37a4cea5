"""The verbs that other commands use, each against the test server as its caller gets it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fixtures.api_server import ApiServer, kubeconfig
from gpunode.host import Host
from gpunode.kubernetes.access import Access, connect
from gpunode.kubernetes.api import Conflict, Invalid, NotFound
from gpunode.kubernetes.client import Cluster
from gpunode.kubernetes.pods import event_time

POD: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"generateName": "gpunode-verify-", "namespace": "default", "labels": {"app": "gpunode"}},
    "spec": {"containers": [{"name": "main", "image": "x", "resources": {"limits": {"nvidia.com/gpu": 1}}}]},
}
FEATURE: dict[str, Any] = {
    "apiVersion": "nfd.k8s-sigs.io/v1alpha1",
    "kind": "NodeFeature",
    "metadata": {
        "name": "gpunode-gpu-1",
        "namespace": "nfd",
        "labels": {"nfd.node.kubernetes.io/node-name": "gpu-1"},
    },
    "spec": {"labels": {"nvidia.com/gpu.present": "true"}},
}


@pytest.fixture
def cluster(api: ApiServer, tmp_path: Path) -> Iterator[Cluster]:
    path = tmp_path / "config"
    path.write_text(kubeconfig(api))
    with closing(connect(Host(Path("/"), {}), Access(kubeconfig=str(path)))) as made:
        yield made


def test_pod_is_created_followed_and_removed(api: ApiServer, cluster: Cluster) -> None:
    api.pod_life = [{"phase": "Pending"}, {"phase": "Running"}, {"phase": "Succeeded"}]
    api.logs = {"main": "one\ntwo\nTest PASSED\n"}
    made = cluster.create(POD)
    name = made["metadata"]["name"]
    assert name.startswith("gpunode-verify-")
    seen = [cluster.get("Pod", name, "default")["status"]["phase"] for _ in range(3)]
    assert seen == ["Pending", "Running", "Succeeded"]
    assert cluster.log("default", name, container="main") == "one\ntwo\nTest PASSED\n"
    assert cluster.log("default", name, container="main", lines=1) == "Test PASSED\n"
    assert [one["metadata"]["name"] for one in cluster.list("Pod", "default", labels={"app": "gpunode"})] == [
        name
    ]
    assert cluster.list("Pod", "default", labels={"app": "other"}) == ()
    cluster.delete("Pod", name, "default")
    with pytest.raises(NotFound):
        cluster.get("Pod", name, "default")
    with pytest.raises(NotFound):
        cluster.delete("Pod", name, "default")


def test_log_of_a_waiting_pod_is_an_error(api: ApiServer, cluster: Cluster) -> None:
    name = cluster.create(POD)["metadata"]["name"]
    with pytest.raises(Invalid, match="waiting to start: ContainerCreating"):
        cluster.log("default", name)


def test_unknown_field_is_refused(cluster: Cluster) -> None:
    wrong = {**POD, "spec": {**POD["spec"], "runtimeClass": "nvidia"}}
    with pytest.raises(Invalid, match=r'unknown field "spec.runtimeClass"'):
        cluster.create(wrong)


def test_events_are_sorted_by_time(api: ApiServer, cluster: Cluster) -> None:
    for name, when, of in (
        ("b", "2026-01-02T00:00:00Z", "u"),
        ("a", "2026-01-03T00:00:00Z", "u"),
        ("c", "", "v"),
    ):
        body = {
            "metadata": {"name": name},
            "involvedObject": {"uid": of},
            "reason": name,
            "lastTimestamp": when or None,
        }
        api.store.put("Event", body, "default")
    found = cluster.list("Event", "default", fields={"involvedObject.uid": "u"})
    assert [one["reason"] for one in sorted(found, key=event_time)] == ["b", "a"]


def test_node_feature_is_created_and_replaced(api: ApiServer, cluster: Cluster) -> None:
    with pytest.raises(NotFound):
        cluster.get("NodeFeature", "gpunode-gpu-1", "nfd")
    made = cluster.create(FEATURE)
    with pytest.raises(Conflict) as caught:
        cluster.create(FEATURE)
    assert caught.value.code == "kubernetes-exists"
    changed = {**made, "spec": {"labels": {"a.b/c": "1"}}}
    assert cluster.replace(changed)["spec"]["labels"] == {"a.b/c": "1"}
    with pytest.raises(Conflict):
        cluster.replace({**made, "spec": {}})
    assert cluster.get("NodeFeature", "gpunode-gpu-1", "nfd")["spec"]["labels"] == {"a.b/c": "1"}


def test_cluster_without_nfd(api: ApiServer, cluster: Cluster) -> None:
    api.without.add("NodeFeature")
    with pytest.raises(NotFound, match="could not find the requested resource"):
        cluster.create(FEATURE)


def test_runtime_class_is_read(api: ApiServer, cluster: Cluster) -> None:
    api.store.put("RuntimeClass", {"metadata": {"name": "nvidia"}, "handler": "nvidia"})
    assert cluster.get("RuntimeClass", "nvidia")["handler"] == "nvidia"
    with pytest.raises(NotFound):
        cluster.get("RuntimeClass", "other")


@pytest.mark.parametrize("name", ["../nodes", "a/b", "", "a?b", "a..b", "%2e"])
def test_name_stays_one_part_of_the_path(api: ApiServer, cluster: Cluster, name: str) -> None:
    for kind in ("Node", "RuntimeClass"):
        with pytest.raises(Invalid):
            cluster.get(kind, name)
    with pytest.raises(Invalid):
        cluster.get("Pod", name, "x")
    if name:
        with pytest.raises(Invalid):
            cluster.get("Pod", "x", name)
    assert api.asked == []


def test_token_replaced_on_disk_is_read_again(api: ApiServer, tmp_path: Path) -> None:
    """As the kubelet replaces a pod's, while `plugin serve --labels` continues."""
    token = tmp_path / "token"
    token.write_text("first")
    api.users = {"first": "admin", "second": "admin"}
    path = tmp_path / "config"
    path.write_text(kubeconfig(api, tokenFile=str(token)))
    with closing(connect(Host(Path("/"), {}), Access(kubeconfig=str(path)))) as cluster:
        assert cluster.get("Node", "gpu-1")
        api.expired.add("first")
        token.write_text("second")
        assert cluster.get("Node", "gpu-1")
