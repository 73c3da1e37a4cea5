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
from gpunode.kubernetes.api import Cluster, Conflict, Invalid, NotFound

POD: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"generateName": "gpunode-verify-", "labels": {"app": "gpunode"}},
    "spec": {"containers": [{"name": "main", "image": "x", "resources": {"limits": {"nvidia.com/gpu": 1}}}]},
}
FEATURE: dict[str, Any] = {
    "apiVersion": "nfd.k8s-sigs.io/v1alpha1",
    "kind": "NodeFeature",
    "metadata": {"name": "gpunode-gpu-1", "labels": {"nfd.node.kubernetes.io/node-name": "gpu-1"}},
    "spec": {"labels": {"nvidia.com/gpu.present": "true"}},
}


@pytest.fixture
def cluster(api: ApiServer, tmp_path: Path) -> Iterator[Cluster]:
    path = tmp_path / "config"
    path.write_text(kubeconfig(api))
    with closing(connect(Host(Path("/"), {}), Access(kubeconfig=str(path)))) as made:
        yield made


def test_a_pod_is_made_followed_and_removed(api: ApiServer, cluster: Cluster) -> None:
    api.pod_life = [{"phase": "Pending"}, {"phase": "Running"}, {"phase": "Succeeded"}]
    api.logs = {"main": "one\ntwo\nTest PASSED\n"}
    made = cluster.create_pod("default", POD)
    name = made["metadata"]["name"]
    assert name.startswith("gpunode-verify-")
    seen = [cluster.get_pod("default", name)["status"]["phase"] for _ in range(3)]
    assert seen == ["Pending", "Running", "Succeeded"]
    assert cluster.pod_log("default", name, container="main") == "one\ntwo\nTest PASSED\n"
    assert cluster.pod_log("default", name, container="main", lines=1) == "Test PASSED\n"
    assert [one["metadata"]["name"] for one in cluster.list_pods("default", {"app": "gpunode"})] == [name]
    assert cluster.list_pods("default", {"app": "other"}) == ()
    cluster.delete_pod("default", name, grace=0)
    with pytest.raises(NotFound):
        cluster.get_pod("default", name)
    with pytest.raises(NotFound):
        cluster.delete_pod("default", name)


def test_a_log_before_there_is_one(api: ApiServer, cluster: Cluster) -> None:
    name = cluster.create_pod("default", POD)["metadata"]["name"]
    with pytest.raises(Invalid, match="waiting to start: ContainerCreating"):
        cluster.pod_log("default", name)


def test_an_unknown_field_is_refused(cluster: Cluster) -> None:
    wrong = {**POD, "spec": {**POD["spec"], "runtimeClass": "nvidia"}}
    with pytest.raises(Invalid, match=r'unknown field "spec.runtimeClass"'):
        cluster.create_pod("default", wrong)


def test_events_come_in_order(api: ApiServer, cluster: Cluster) -> None:
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
    found = cluster.events("default", {"involvedObject.uid": "u"})
    assert [one["reason"] for one in found] == ["b", "a"]


def test_a_node_feature_is_made_and_replaced(api: ApiServer, cluster: Cluster) -> None:
    with pytest.raises(NotFound):
        cluster.get_node_feature("nfd", "gpunode-gpu-1")
    made = cluster.create_node_feature("nfd", FEATURE)
    with pytest.raises(Conflict) as caught:
        cluster.create_node_feature("nfd", FEATURE)
    assert caught.value.code == "kubernetes-exists"
    changed = {**made, "spec": {"labels": {"a.b/c": "1"}}}
    assert cluster.update_node_feature("nfd", changed)["spec"]["labels"] == {"a.b/c": "1"}
    with pytest.raises(Conflict):
        cluster.update_node_feature("nfd", {**made, "spec": {}})
    assert cluster.get_node_feature("nfd", "gpunode-gpu-1")["spec"]["labels"] == {"a.b/c": "1"}


def test_a_cluster_without_nfd(api: ApiServer, cluster: Cluster) -> None:
    api.without.add("NodeFeature")
    with pytest.raises(NotFound, match="could not find the requested resource"):
        cluster.create_node_feature("nfd", FEATURE)


def test_a_runtime_class(api: ApiServer, cluster: Cluster) -> None:
    api.store.put("RuntimeClass", {"metadata": {"name": "nvidia"}, "handler": "nvidia"})
    assert cluster.get_runtime_class("nvidia")["handler"] == "nvidia"
    with pytest.raises(NotFound):
        cluster.get_runtime_class("other")


@pytest.mark.parametrize("name", ["../nodes", "a/b", "", "a?b", "a..b", "%2e"])
def test_a_name_stays_one_part_of_the_address(api: ApiServer, cluster: Cluster, name: str) -> None:
    for ask in (cluster.get_node, cluster.get_runtime_class):
        with pytest.raises(Invalid):
            ask(name)
    with pytest.raises(Invalid):
        cluster.get_pod(name, "x")
    assert api.asked == []


def test_a_token_that_is_exchanged_on_disk_is_read_again(api: ApiServer, tmp_path: Path) -> None:
    """As the kubelet exchanges a pod's, while `plugin serve --labels` goes on."""
    token = tmp_path / "token"
    token.write_text("first")
    api.users = {"first": "admin", "second": "admin"}
    path = tmp_path / "config"
    path.write_text(kubeconfig(api, tokenFile=str(token)))
    with closing(connect(Host(Path("/"), {}), Access(kubeconfig=str(path)))) as cluster:
        assert cluster.get_node("gpu-1")
        api.expired.add("first")
        token.write_text("second")
        assert cluster.get_node("gpu-1")
