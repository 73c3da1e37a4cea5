"""Metrics from the driver and from MPS daemons: their C and Python stubs, nothing simulated."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.scenario import machine, mig_uuid, mixed_layout, with_mig
from fixtures.stubs import StubNode, have_compiler, stub_node
from tests.plugin.kubelet_stub import KubeletStub
from tests.plugin.mps.conftest import MpsNode
from tests.plugin.mps.conftest import node as mps_node  # noqa: F401 - a fixture
from tests.plugin.mps.test_supervisor_serve import pid_of, serve
from tests.plugin.nodes import children, eventually, texts
from tests.plugin.observe.node import GPU, LISTEN, QUICK, Values, port_of, scrape, scrape_when, value
from tests.plugin.serving import Serving, Start, kubelet

pytestmark = [pytest.mark.full, pytest.mark.skipif(not have_compiler(), reason="gcc is not installed")]


@pytest.fixture
def node(short: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[StubNode, KubeletStub, Start]]:
    stub = stub_node(short, machine(2), libraries="nvml")
    for name, text in stub.env.items():
        monkeypatch.setenv(name, text)
    with kubelet(short) as (made, start):
        yield stub, made, start


def started(serving: Serving) -> list[list[str]]:
    """The command lines of a process' children."""
    lines = texts(Path(f"/proc/{pid}/cmdline") for pid in children(serving.process.pid))
    return [line.split("\0") for line in lines]


def asks_for_use(argv: list[str]) -> bool:
    """Whether the options of a child that watches GPUs include their utilization."""
    return any(json.loads(word).get("use", False) for word in argv if word.startswith("{"))


def test_utilization_is_that_of_the_gpu_that_a_container_holds(node) -> None:
    stub, stand_in, start = node
    busy = machine(2).with_gpu(0, busy=42, used=5 << 30).with_gpu(1, busy=None, used=7 << 30)
    stub.write(busy)
    serving = start(*LISTEN, *QUICK)
    assert stand_in.wait_allocatable(GPU, 2, 60), serving.log()
    held = {stand_in.admit(f"ml/{name}", "main", {GPU: 1}).ids[0]: name for name in ("a", "b")}
    port = port_of(serving)
    uuids = [gpu.uuid for gpu in busy.gpus]

    def is_complete(found: Values) -> bool:
        """The kubelet's pods may be missing for some seconds: it has one second to list them."""
        return (value(found, DUTY, uuid=uuids[0]), value(found, "gpunode_plugin_pod_resources_up")) == (
            0.42,
            1,
        )

    found = scrape_when(port, is_complete)
    assert value(found, DUTY, uuid=uuids[1]) is None  # a GPU that doesn't report it is not idle
    assert [value(found, USED, uuid=uuid) for uuid in uuids] == [5 << 30, 7 << 30]
    first, second = (held[uuid] for uuid in uuids)
    assert value(found, "gpunode_container_gpu_duty_cycle_ratio", pod=first) == 0.42
    assert value(found, "gpunode_container_gpu_duty_cycle_ratio", pod=second) is None
    assert value(found, "gpunode_container_gpu_memory_used_bytes", pod=second) == 7 << 30
    stub.write(busy.with_gpu(0, busy=0, used=0))
    assert eventually(lambda: value(scrape(port), DUTY, uuid=uuids[0]) == 0, 60)
    assert any(map(asks_for_use, started(serving)))


DUTY, USED = "gpunode_gpu_duty_cycle_ratio", "gpunode_gpu_memory_used_bytes"


def test_memory_of_a_mig_device_belongs_to_its_container_unless_shared(node) -> None:
    stub, stand_in, start = node
    layout = [replace(part, used=(1 + part.index) << 30) for part in mixed_layout(1)]
    halves = [
        replace(layout[0], index=5 + ci, uuid=mig_uuid(1, 5 + ci), gi=5, ci=ci, cslices=1) for ci in (0, 1)
    ]
    stub.write(with_mig(machine(2), 1, [*layout, *halves]))
    serving = start(*LISTEN, "--mig-strategy", "mixed")
    alone, shared = "nvidia.com/mig-2g.20gb", "nvidia.com/mig-1c.3g.40gb"
    assert stand_in.wait_allocatable(alone, 1, 60), serving.log()
    assert stand_in.wait_allocatable(shared, 2, 60), serving.log()
    stand_in.admit("ml/a", "main", {alone: 1})
    stand_in.admit("ml/b", "main", {shared: 1})
    port = port_of(serving)
    assert eventually(
        lambda: value(scrape(port), "gpunode_container_gpu_memory_used_bytes", pod="a") == 2 << 30
    )
    found = scrape(port)
    assert value(found, "gpunode_container_gpu_memory_used_bytes", pod="b") is None
    assert value(found, "gpunode_container_gpu_memory_total_bytes", pod="b") == 40448 << 20


def test_utilization_is_queried_only_if_metrics_are_enabled(node) -> None:
    _, stand_in, start = node
    serving = start(*QUICK)
    assert stand_in.wait_allocatable(GPU, 2, 60), serving.log()
    asking = [argv for argv in started(serving) if "gpunode.gpu.nvml_watcher" in " ".join(argv)]
    assert asking and not any(map(asks_for_use, asking))


def test_mps_is_up_while_every_daemon_serves(mps_node: MpsNode) -> None:  # noqa: F811
    up = "gpunode_plugin_mps_up"
    with kubelet(mps_node.place) as (stand_in, start):
        mps_node.mps.behave(deaf=True)
        serving = serve(mps_node, start, mps_node.config(2), *LISTEN)
        assert eventually(lambda: stand_in.capacity(GPU) == 8, 60), serving.log()
        port = port_of(serving)
        found = scrape(port)
        assert value(found, up, resource=GPU) == 0
        assert value(found, "gpunode_plugin_devices", health="unhealthy", reason="mps") == 8
        mps_node.mps.behave()
        assert stand_in.wait_allocatable(GPU, 8, 60), serving.log()
        assert value(scrape(port), up, resource=GPU) == 1
        mps_node.mps.behave(deaf=True)  # the next one doesn't respond
        os.kill(pid_of(mps_node, 3), signal.SIGKILL)
        assert eventually(lambda: value(scrape(port), up, resource=GPU) == 0), serving.log()
        found = scrape(port)
        assert value(found, "gpunode_plugin_devices", health="unhealthy", reason="mps") == 2
        mps_node.mps.behave()
        assert eventually(lambda: value(scrape(port), up, resource=GPU) == 1, 60), serving.log()
