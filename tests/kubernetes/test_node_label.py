"""`gpunode node label`, as a user meets it, against a server that refuses what a real one refuses."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from fixtures.api_server import JSON_PATCH, ApiServer, Fault, kubeconfig
from tests.kubernetes.conftest import Gpunode


def labels(api: ApiServer) -> dict[str, str]:
    found = api.node("gpu-1")["metadata"]["labels"]
    return {key: value for key, value in found.items() if not key.startswith("kubernetes.io/")}


def undo_of(told: dict[str, str]) -> list[str]:
    """The undo's words after `gpunode`."""
    return shlex.split(told["undo"])[1:]


def test_labels_are_set_changed_and_removed_in_one_patch(api: ApiServer, run: Gpunode) -> None:
    api.node("gpu-1")["metadata"]["labels"]["old"] = "x"
    done = run("node", "label", "nvidia.com/gpu.present=true", "pool=b", "old-", "gone-", "-o", "json")
    assert done.code == 0, done.err
    assert labels(api) == {"pool": "b", "nvidia.com/gpu.present": "true"}
    (sent,) = api.changes()
    assert (sent.method, sent.path, sent.content_type) == ("PATCH", "/api/v1/nodes/gpu-1", JSON_PATCH)
    data = done.document["data"]
    assert data["patch"] == sent.body
    assert {one["key"]: (one["before"], one["after"]) for one in data["changes"]} == {
        "nvidia.com/gpu.present": (None, "true"),
        "pool": ("a", "b"),
        "old": ("x", None),
    }

    back = run(*undo_of(data))
    assert back.code == 0, back.err
    assert labels(api) == {"pool": "a", "old": "x"}


def test_a_dry_run_shows_exactly_the_patch_and_sends_nothing(api: ApiServer, run: Gpunode) -> None:
    dry = run("node", "label", "a.b/c=1", "pool-", "--dry-run", "-o", "json")
    shown = run("node", "label", "a.b/c=1", "pool-", "--dry-run")
    assert api.changes() == []
    assert labels(api) == {"pool": "a"}
    start = shown.out.index("[{")
    assert json.loads(shown.out[start:]) == dry.document["data"]["patch"]
    assert "/metadata/labels/a.b~1c" in shown.out
    real = run("node", "label", "a.b/c=1", "pool-")
    assert real.code == 0
    assert api.changes()[0].body == dry.document["data"]["patch"]


def test_what_is_so_already_is_not_sent(api: ApiServer, run: Gpunode) -> None:
    done = run("node", "label", "pool=a", "gone-")
    assert (done.code, done.out) == (0, "node gpu-1 unchanged\n")
    assert api.changes() == []


def test_a_node_without_any_label_gets_its_map(api: ApiServer, run: Gpunode) -> None:
    del api.node("gpu-1")["metadata"]["labels"]
    assert run("node", "label", "x=1", "y=").code == 0
    assert labels(api) == {"x": "1", "y": ""}


def test_a_key_with_a_tilde_is_no_label(run: Gpunode) -> None:
    done = run("node", "label", "a~b=1")
    assert (done.code, "can't be a label's key" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nothing"], "neither sets nor removes"),
        (["a=1", "a-"], "given twice"),
        (["a=has space"], "can't be its value"),
        (["/a=1"], "can't be a label's key"),
        ([f"a={'x' * 64}"], "can't be its value"),
        (["A.b/c=1"], "can't be a label's key"),
    ],
)
def test_what_can_not_be_meant_reaches_no_server(
    api: ApiServer, run: Gpunode, words: list[str], says: str
) -> None:
    done = run("node", "label", *words)
    assert done.code == 2
    assert says in done.err
    assert api.asked == []


def test_labels_that_somebody_else_sets_meanwhile_are_kept(api: ApiServer, run: Gpunode) -> None:
    def other() -> None:
        node = api.node("gpu-1")
        node["metadata"]["labels"]["pool"] = "theirs"
        api.store.put("Node", node)

    api.faults.append(Fault("PATCH", "/nodes/", "meanwhile", act=other))
    done = run("node", "label", "pool=b", "-o", "json")
    assert done.code == 0, done.err
    assert labels(api) == {"pool": "b"}
    assert len(api.changes()) == 2  # the first tested for a value that was no longer there
    assert "trying again" in done.err


def test_a_heartbeat_in_between_is_looked_at_again(api: ApiServer, run: Gpunode) -> None:
    def heartbeat() -> None:
        api.store.put("Node", api.node("gpu-1"))

    api.faults.append(Fault("PATCH", "/nodes/", "meanwhile", act=heartbeat))
    assert run("node", "label", "new=1").code == 0
    assert labels(api) == {"pool": "a", "new": "1"}
    assert len(api.changes()) == 2


def test_a_kubelet_may_label_its_own_node_and_no_other(api: ApiServer, run: Gpunode, tmp_path: Path) -> None:
    api.users["kubelet-token"] = "system:node:gpu-1"
    api.add_node("gpu-2")
    path = tmp_path / "kubelet.conf"
    path.write_text(kubeconfig(api, "kubelet-token"))
    own = run("node", "label", "--kubeconfig", str(path), "x=1")
    assert own.code == 0, own.err
    other = run("node", "label", "--kubeconfig", str(path), "--node", "gpu-2", "x=1")
    assert other.code == 3
    assert 'User "system:node:gpu-1" cannot patch' in other.err
    assert str(path) in other.err


def test_the_undo_names_the_same_node_and_the_same_way(api: ApiServer, run: Gpunode, tmp_path: Path) -> None:
    path = tmp_path / "a b.yaml"
    path.write_text(kubeconfig(api))
    done = run("node", "label", "--kubeconfig", str(path), "--context", "test", "x=1", "-o", "json")
    words = undo_of(done.document["data"])
    assert words == ["node", "label", "--node", "gpu-1", "--kubeconfig", str(path), "--context", "test", "x-"]
    assert run(*words, NODE_NAME="elsewhere").code == 0
    assert labels(api) == {"pool": "a"}
