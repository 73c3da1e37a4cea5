"""`gpunode node taint`, as a user meets it."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from fixtures.api_server import ApiServer
from tests.kubernetes.conftest import Gpunode

OURS = "nvidia.com/gpu=present:NoSchedule"


def taints(api: ApiServer) -> list[dict[str, Any]]:
    found = api.node("gpu-1")["spec"].get("taints", [])
    assert isinstance(found, list)
    return found


def test_a_taint_comes_and_goes_with_its_undo(api: ApiServer, run: Gpunode) -> None:
    done = run("node", "taint", OURS, "-o", "json")
    assert done.code == 0, done.err
    assert taints(api) == [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]
    back = run(*shlex.split(done.document["data"]["undo"])[1:])
    assert back.code == 0, back.err
    assert "taints" not in api.node("gpu-1")["spec"]


def test_other_taints_stay_as_they_are(api: ApiServer, run: Gpunode) -> None:
    theirs = {
        "key": "node.kubernetes.io/unreachable",
        "effect": "NoExecute",
        "timeAdded": "2026-11-21T12:00:00Z",
    }
    api.add_node("gpu-1", taints=[theirs, {"key": "nvidia.com/gpu", "value": "old", "effect": "NoSchedule"}])
    done = run("node", "taint", OURS, "x:PreferNoSchedule", "-o", "json")
    assert done.code == 0, done.err
    assert taints(api) == [
        theirs,
        {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"},
        {"key": "x", "effect": "PreferNoSchedule"},
    ]
    assert run(*shlex.split(done.document["data"]["undo"])[1:]).code == 0
    assert [one.get("value") for one in taints(api)] == [None, "old"]


@pytest.mark.parametrize(
    ("word", "left"),
    [
        ("k-", []),
        ("k:NoSchedule-", ["PreferNoSchedule"]),
        ("k=v:NoSchedule-", ["PreferNoSchedule"]),
        ("k=other:NoSchedule-", ["NoSchedule", "PreferNoSchedule"]),
    ],
)
def test_what_is_taken_away_is_what_was_named(
    api: ApiServer, run: Gpunode, word: str, left: list[str]
) -> None:
    both = [{"key": "k", "value": "v", "effect": one} for one in ("NoSchedule", "PreferNoSchedule")]
    api.add_node("gpu-1", taints=both)
    assert run("node", "taint", word).code == 0
    assert [one["effect"] for one in taints(api)] == left


def test_pods_are_only_evicted_when_that_is_meant(api: ApiServer, run: Gpunode) -> None:
    refused = run("node", "taint", "x=y:NoExecute")
    assert refused.code == 3
    assert "would end every pod on gpu-1" in refused.err
    assert api.changes() == []
    dry = run("node", "taint", "x=y:NoExecute", "--dry-run")
    assert (dry.code, "wants --yes" in dry.err) == (0, True)
    assert run("node", "taint", "x=y:NoExecute", "--yes").code == 0
    assert run("node", "taint", "x=y:NoExecute").out == "node gpu-1 unchanged\n"


@pytest.mark.parametrize(
    "words", [["x=y"], ["x=y:NoSuch"], ["x=y:NoSchedule", "x-"], ["x=1:NoSchedule", "x=2:NoSchedule"], ["-"]]
)
def test_what_can_not_be_meant_is_refused(api: ApiServer, run: Gpunode, words: list[str]) -> None:
    done = run("node", "taint", "--", *words)
    assert (done.code, api.asked) == (2, [])


def test_a_kubelet_may_not_taint(api: ApiServer, run: Gpunode) -> None:
    api.users["admin-token"] = "system:node:gpu-1"
    done = run("node", "taint", OURS, "-o", "json")
    assert done.code == 3
    assert done.document["errors"][0]["code"] == "kubernetes-forbidden"
    assert taints(api) == []
