"""Objects of `setup --kubernetes` at an API server: all of them or none, and nothing is overwritten."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fixtures.api_server import ApiServer, Fault, kubeconfig
from gpunode.commands.manifests import PluginOptions, plugin_set
from gpunode.commands.setup_steps import daemon_set_objects, make_objects, refuse_others
from gpunode.errors import DaemonError, RolledBackError
from gpunode.host import Host
from gpunode.kubernetes.access import Access, connect
from gpunode.kubernetes.api import ClusterError
from gpunode.kubernetes.changes import differences, look
from gpunode.kubernetes.client import Cluster
from gpunode.kubernetes.manifests import runtime_class
from tests.silent import SilentProgress

QUIET = SilentProgress()
IMAGE = "registry.test/gpunode:1"


@pytest.fixture
def cluster(api: ApiServer, tmp_path: Path) -> Iterator[Cluster]:
    path = tmp_path / "kubeconfig"
    path.write_text(kubeconfig(api))
    with closing(connect(Host(), Access(str(path)))) as made:
        yield made


def plugin() -> tuple[dict[str, Any], ...]:
    return daemon_set_objects(plugin_set(Host(), PluginOptions(image=IMAGE)))


def objects(api: ApiServer) -> set[str]:
    kinds = ("RuntimeClass", "ServiceAccount", "DaemonSet")
    return {f"{kind}/{one['metadata']['name']}" for kind in kinds for one in api.store.list(kind)}


def test_missing_objects_are_created_and_unchanged_in_a_second_run(api: ApiServer, cluster: Cluster) -> None:
    done = make_objects(Host(), cluster, plugin(), QUIET, dry_run=False)
    assert objects(api) == {"ServiceAccount/gpunode-device-plugin", "DaemonSet/gpunode-device-plugin"}
    assert [one.action for one in done.data.changes] == ["created", "created"]
    assert done.data.undo == (
        "kubectl delete daemonset gpunode-device-plugin --namespace kube-system",
        "kubectl delete serviceaccount gpunode-device-plugin --namespace kube-system",
    )
    sent = len(api.changes())
    again = make_objects(Host(), cluster, plugin(), QUIET, dry_run=False)
    assert [one.action for one in again.data.changes] == ["unchanged", "unchanged"]
    assert len(api.changes()) == sent


def test_dry_run_shows_the_objects_and_sends_nothing(api: ApiServer, cluster: Cluster) -> None:
    done = make_objects(Host(), cluster, plugin(), QUIET, dry_run=True)
    assert api.changes() == []
    assert "kind: DaemonSet" in [getattr(block, "text", "") for block in done.blocks]


@pytest.mark.parametrize("kind", ["status", "cut"])
def test_failure_in_the_middle_deletes_the_created_objects(
    api: ApiServer, cluster: Cluster, kind: str
) -> None:
    api.faults.append(Fault("POST", "daemonsets", kind, 99, 403, "Forbidden"))
    with pytest.raises(ClusterError):
        make_objects(Host(), cluster, plugin(), QUIET, dry_run=False)
    assert objects(api) == set()


def test_lost_response_counts_as_success_if_the_object_exists(api: ApiServer, cluster: Cluster) -> None:
    api.faults.append(Fault("POST", "daemonsets", "cut-after"))
    make_objects(Host(), cluster, plugin(), QUIET, dry_run=False)
    assert "DaemonSet/gpunode-device-plugin" in objects(api)


def test_objects_that_cannot_be_deleted_are_named(api: ApiServer, cluster: Cluster) -> None:
    api.faults += [Fault("POST", "daemonsets", "status", 9), Fault("DELETE", "", "status", 99)]
    with pytest.raises(ClusterError) as caught:
        make_objects(Host(), cluster, plugin(), QUIET, dry_run=False)
    assert "ServiceAccount kube-system/gpunode-device-plugin" in caught.value.hint


def test_objects_are_deleted_if_they_do_not_become_ready(api: ApiServer, cluster: Cluster) -> None:
    def settle() -> None:
        raise DaemonError("no pod came")

    with pytest.raises(RolledBackError, match="no pod came; what was made is deleted again"):
        make_objects(Host(), cluster, plugin(), QUIET, dry_run=False, settle=settle)
    assert objects(api) == set()


def test_ctrl_c_deletes_the_created_objects(api: ApiServer, cluster: Cluster) -> None:
    def settle() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_objects(Host(), cluster, plugin(), QUIET, dry_run=False, settle=settle)
    assert objects(api) == set()


@pytest.mark.parametrize("step", ["settle", "create"])
def test_second_ctrl_c_does_not_stop_the_deletion(
    api: ApiServer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    delete, create = Cluster.delete, Cluster.create

    def settle() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def interrupted_delete(self: Cluster, kind: str, name: str, namespace: str = "") -> None:
        os.kill(os.getpid(), signal.SIGINT)
        delete(self, kind, name, namespace)

    def interrupted_create(self: Cluster, body: dict[str, Any]) -> Any:
        if step == "create" and body["kind"] == "DaemonSet":
            os.kill(os.getpid(), signal.SIGINT)
        return create(self, body)

    monkeypatch.setattr(Cluster, "delete", interrupted_delete)
    monkeypatch.setattr(Cluster, "create", interrupted_create)
    with pytest.raises(KeyboardInterrupt):
        make_objects(Host(), cluster, plugin(), QUIET, dry_run=False, settle=settle)
    assert objects(api) == set()


def test_objects_left_after_ctrl_c_are_named_with_the_command(api: ApiServer, cluster: Cluster) -> None:
    def settle() -> None:
        api.faults.append(Fault("DELETE", "serviceaccounts", "status", 99))
        raise KeyboardInterrupt

    with pytest.raises(ClusterError, match="interrupted; these were created and could not be") as caught:
        make_objects(Host(), cluster, plugin(), QUIET, dry_run=False, settle=settle)
    assert caught.value.hint == (
        "delete them: kubectl delete serviceaccount gpunode-device-plugin --namespace kube-system"
    )


def test_existing_object_that_differs_is_kept(api: ApiServer, cluster: Cluster) -> None:
    api.store.put("RuntimeClass", {"metadata": {"name": "nvidia"}, "handler": "nvidia-legacy"})
    found = look(Host(), cluster, (runtime_class("nvidia"),), QUIET)
    with pytest.raises(ClusterError, match="RuntimeClass nvidia is in the cluster and differs at /handler"):
        refuse_others(found, "gpunode manifests runtime-class")
    assert api.changes() == []


@pytest.mark.parametrize(
    ("desired", "existing", "at"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, []),  # defaults added by the server
        ({"a": {"b": 1}}, {"a": {"b": 2}}, ["/a/b"]),
        ({"a": [1, 2]}, {"a": [1]}, ["/a"]),
        ({"a": [{"b": 1}]}, {"a": [{"b": 1, "c": 3}]}, []),
        ({"a": ""}, {}, []),
        ({"a": {}}, {}, []),
        ({"a": False}, {}, []),
        ({"a": 0}, {}, ["/a"]),
        ({"a": {"b": 1}}, {"a": "text"}, ["/a"]),
    ],
)
def test_only_relevant_differences_are_reported(desired: Any, existing: Any, at: list[str]) -> None:
    assert differences(desired, existing) == at
