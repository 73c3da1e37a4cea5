"""The label that `setup --kubernetes` sets, against a server with a real one's refusals."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from fixtures.api_server import JSON_PATCH, ApiServer, Fault, kubeconfig
from gpunode.commands.node import NodeChange, place_in
from gpunode.commands.setup import set_label
from gpunode.host import Host
from gpunode.kubernetes.access import KUBELETS_OWN, Access, connect, kubectl
from gpunode.kubernetes.api import Forbidden
from tests.cluster import NODE
from tests.silent import SilentProgress

SetLabel = Callable[..., NodeChange]


def labels(api: ApiServer) -> dict[str, str]:
    found = api.node(NODE)["metadata"]["labels"]
    return {key: value for key, value in found.items() if not key.startswith("kubernetes.io/")}


@pytest.fixture
def path(api: ApiServer, tmp_path: Path) -> Path:
    path = tmp_path / "a b.yaml"
    path.write_text(kubeconfig(api))
    return path


@pytest.fixture
def change(path: Path, monkeypatch: pytest.MonkeyPatch) -> SetLabel:
    """Set one label with the kubeconfig at `path`."""
    monkeypatch.setattr("gpunode.kubernetes.changes._PAUSES", [0.01, 0.02, 0.03, 0.04])

    def call(key: str, value: str, *, node: str = NODE, dry_run: bool = False) -> NodeChange:
        host = Host(Path("/"), {})
        with closing(connect(host, Access(str(path)))) as cluster:
            data = set_label(host, place_in(cluster, host, node, dry_run), key, value, SilentProgress()).data
        assert isinstance(data, NodeChange)
        return data

    return call


def test_new_label_is_one_patch_and_its_undo_removes_it(api: ApiServer, change: SetLabel, path: Path) -> None:
    data = change("nvidia.com/gpu.present", "true")
    assert labels(api) == {"pool": "a", "nvidia.com/gpu.present": "true"}
    (sent,) = api.changes()
    assert (sent.method, sent.path, sent.content_type) == ("PATCH", "/api/v1/nodes/gpu-1", JSON_PATCH)
    assert list(data.patch) == sent.body
    (one,) = data.changes
    assert (one.key, one.before, one.after) == ("nvidia.com/gpu.present", None, "true")
    options = f"--kubeconfig '{path}' --context test"
    assert data.undo == f"kubectl {options} label node gpu-1 nvidia.com/gpu.present-"


def test_undo_of_a_replaced_label_restores_the_last_value(api: ApiServer, change: SetLabel) -> None:
    def other() -> None:
        node = api.node(NODE)
        node["metadata"]["labels"]["pool"] = "theirs"
        api.store.put("Node", node)

    api.faults.append(Fault("PATCH", "/nodes/", "meanwhile", act=other))
    data = change("pool", "b")
    assert labels(api) == {"pool": "b"}
    assert len(api.changes()) == 2  # the first tested for a value that had changed meanwhile
    assert data.undo.endswith(" label node gpu-1 --overwrite pool=theirs")


def test_dry_run_shows_the_exact_patch_and_sends_nothing(api: ApiServer, change: SetLabel) -> None:
    dry = change("a.b/c", "1", dry_run=True)
    assert (api.changes(), labels(api)) == ([], {"pool": "a"})
    assert dry.patch[-1]["path"] == "/metadata/labels/a.b~1c"
    change("a.b/c", "1")
    assert api.changes()[0].body == list(dry.patch)


def test_unchanged_label_is_not_sent(api: ApiServer, change: SetLabel) -> None:
    data = change("pool", "a")
    assert (data.patch, data.changes, data.undo, api.changes()) == ((), (), "", [])


def test_node_without_any_label_gets_a_label_map(api: ApiServer, change: SetLabel) -> None:
    del api.node(NODE)["metadata"]["labels"]
    change("x", "1")
    assert labels(api) == {"x": "1"}


def test_patch_is_retried_after_a_concurrent_heartbeat(api: ApiServer, change: SetLabel) -> None:
    def heartbeat() -> None:
        api.store.put("Node", api.node(NODE))

    api.faults.append(Fault("PATCH", "/nodes/", "meanwhile", act=heartbeat))
    change("new", "1")
    assert labels(api) == {"pool": "a", "new": "1"}
    assert len(api.changes()) == 2


def test_kubelet_may_label_only_its_own_node(api: ApiServer, change: SetLabel, path: Path) -> None:
    api.users["kubelet-token"] = "system:node:gpu-1"
    api.add_node("gpu-2")
    path.write_text(kubeconfig(api, "kubelet-token"))
    change("x", "1")
    assert labels(api) == {"pool": "a", "x": "1"}
    with pytest.raises(Forbidden, match='User "system:node:gpu-1" cannot patch') as caught:
        change("x", "1", node="gpu-2")
    assert str(path) in caught.value.hint


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), "kubectl get nodes"),
        (("--server", "http://127.0.0.1:8001"), "kubectl --server http://127.0.0.1:8001 get nodes"),
        (("--kubeconfig", "/a", "--context", "c"), "kubectl --kubeconfig /a --context c get nodes"),
        (("--kubeconfig", "kubelet"), f"kubectl --kubeconfig {KUBELETS_OWN[0]} get nodes"),
        (("--kubeconfig", "/a:/b c", "--context", "c"), "KUBECONFIG='/a:/b c' kubectl --context c get nodes"),
    ],
)
def test_kubectl_undo_command_addresses_the_same_cluster(
    tmp_path: Path, words: tuple[str, ...], line: str
) -> None:
    own = tmp_path / KUBELETS_OWN[0].lstrip("/")
    own.parent.mkdir(parents=True)
    own.write_text("{}")
    assert kubectl(Host(tmp_path, {}), words, "get", "nodes") == line
