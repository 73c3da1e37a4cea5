"""`gpunode reset` on live nodes: real containerd and dockerd, the plugin's unit, a Node in a cluster."""

from __future__ import annotations

import pytest

from fixtures.api_server import ApiServer
from tests.cli import Ran
from tests.integration.kubernetes_node import UNIT, KubernetesNode
from tests.integration.test_setup_kubernetes import NAME, UNIT_FILE, api, has_unit, node, setup, states

__all__ = ["api", "node"]
pytestmark = [pytest.mark.containerd, pytest.mark.full]
RESOURCE = ("node", "advertise", "--resource", "example.com/gpu", "--count", "4", "--wait", "0")
CONFIG = "/etc/containerd/config.toml"


def reset(node: KubernetesNode, *options: str) -> Ran:
    return node.gpunode("reset", "--node", NAME, *options, "-o", "json")


def snapshot(node: KubernetesNode) -> str:
    """Everything in /etc but the journal's own directory: type, mode, owner, path, and contents."""
    listed = "find . -printf '%y %m %u:%g %p %l\\n' | sort"
    return node.sh(f"cd /etc && {listed} && find . -type f | sort | xargs -d '\\n' md5sum")


def test_everything_is_undone_and_nothing_a_second_time(node: KubernetesNode, api: ApiServer) -> None:
    before, object_before = snapshot(node), api.node(NAME)
    fresh = reset(node)
    assert (fresh.code, fresh.document["data"]["left"]) == (0, []), fresh.err
    assert node.sh("ls /var/lib/gpunode 2> /dev/null || true") == ""

    assert setup(node).code == 0, node.log()
    assert node.gpunode("labels", "--to", "node").code == 0
    assert node.gpunode(*RESOURCE).code in (0, 1)  # no kubelet makes it allocatable
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
    assert {name: state for name, state in states(done).items() if state != "right"} == {
        "plugin": "done",
        "node-labels": "done",
        "node-resources": "done",
        "runtime-containerd": "done",
    }
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
