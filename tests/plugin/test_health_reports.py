"""Each cause that makes a GPU unhealthy, in the log, `plugin status` and the metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plugin.kubelet_stub import KubeletStub
from tests.plugin.nodes import eventually
from tests.plugin.observe.node import GPU, LISTEN, inject, port_of, scrape, status, value
from tests.plugin.serving import Serving, Start, kubelet

CAUSES = {
    1: (("xid", "79"), "xid-79", "reboot"),
    2: (("ecc", "1"), "ecc", "reset"),
    3: (("remap", "pending"), "row-remap", "reset"),
    4: (("remap", "failed"), "row-remap", "replace"),
    5: (("lost",), "lost", ""),
    6: (("fabric", "in-progress"), "fabric", ""),
    7: (("recovery", "drain-and-reset"), "recovery-action", "reset"),
}
"""By GPU: the fault, the problem's code, what mends it. GPU 0 stays sound."""


@pytest.fixture
def node(short: Path) -> Iterator[tuple[Path, KubeletStub, Start]]:
    with kubelet(short) as (stub, start):
        yield short, stub, start


def hold(place: Path, duration: str) -> tuple[str, str]:
    path = place / "config.json"
    path.write_text(json.dumps({"version": "v1", "health": {"holdDown": duration, "pollInterval": "1s"}}))
    return "--config-file", str(path)


def fields(line: str) -> dict[str, str]:
    """A line of logfmt as a machine reads it; one that isn't logfmt fails."""
    pairs = re.findall(r'([\w.-]+)=("(?:[^"\\]|\\.)*"|[^" =]+)(?: |$)', line)
    assert " ".join(f"{key}={text}" for key, text in pairs) == line
    return {key: json.loads(text) if text.startswith('"') else text for key, text in pairs}


def wait_logged(serving: Serving, message: str) -> dict[int, dict[str, str]]:
    """Wait until exactly the GPUs that have a fault have a line with this message; the lines by GPU."""
    found: dict[int, dict[str, str]] = {}

    def complete() -> bool:
        whole, _, _ = serving.log().rpartition("\n")  # without a line that is being written
        lines = [fields(line) for line in whole.splitlines()]
        found.update((int(line["index"]), line) for line in lines if line["msg"] == message)
        return found.keys() == CAUSES.keys()

    assert eventually(complete, 30), serving.log()
    return found


def unhealthy(place: Path) -> set[int]:
    return {int(unit["index"]) for unit in status(place)["data"]["units"] if unit["health"] == "unhealthy"}


@pytest.mark.full
def test_every_cause_is_in_log_status_and_metrics_until_it_ends(node) -> None:
    place, stub, start = node
    serving = start("--simulate", "h100:8", *LISTEN, *hold(place, "1h"))
    assert stub.wait_allocatable(GPU, 8, 60), serving.log()
    for index, (fault, _, _) in CAUSES.items():
        inject(serving, *fault, "--gpu", str(index))
    assert stub.wait_allocatable(GPU, 1, 30), serving.log()

    # the kubelet is told first: the log and the status file follow
    lines = wait_logged(serving, "GPU is unhealthy")
    assert eventually(lambda: unhealthy(place) == CAUSES.keys(), 30), status(place)
    units = {int(unit["index"]): unit for unit in status(place)["data"]["units"]}
    metrics = scrape(port_of(serving))
    for index, (_, code, mend) in CAUSES.items():
        assert (lines[index]["code"], lines[index].get("mend", "")) == (code, mend)
        problem = units[index]["problem"]
        assert (units[index]["health"], problem["code"], problem["mend"]) == ("unhealthy", code, mend)
        assert lines[index]["reason"] == problem["reason"]
        since = "gpunode_gpu_problem_since_timestamp_seconds"
        assert value(metrics, since, uuid=units[index]["gpu"], reason=code, mend=mend)
        assert value(metrics, "gpunode_gpu_healthy", uuid=units[index]["gpu"]) == 0
    assert (units[0]["health"], value(metrics, "gpunode_gpu_healthy", uuid=units[0]["gpu"])) == ("healthy", 1)
    assert value(metrics, "gpunode_plugin_devices", resource=GPU, reason="row-remap") == 2

    inject(serving, "heal", "--gpu", "all")
    hold(place, "0s")
    assert stub.wait_allocatable(GPU, 8, 60), serving.log()
    wait_logged(serving, "GPU is healthy again")
    assert eventually(lambda: status(place)["status"] == "ok", 60)
    inject(serving, "driver", "gone")
    assert stub.wait_allocatable(GPU, 0, 30), serving.log()
    assert eventually(lambda: len(unhealthy(place)) == 8, 30), status(place)
    assert {unit["problem"]["code"] for unit in status(place)["data"]["units"]} == {"driver"}
    assert value(scrape(port_of(serving)), "gpunode_plugin_devices", reason="driver") == 8
