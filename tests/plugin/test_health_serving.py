"""Health on a node: `plugin serve`, the C stub of NVML and the kubelet stub."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.scenario import (
    Event,
    Fault,
    Scenario,
    gpu_uuid,
    machine,
    mig_uuid,
    mixed_layout,
    with_mig,
)
from fixtures.stubs import StubNode, have_compiler, stub_node
from gpunode.host import Host
from gpunode.plugin.compose import make_service
from gpunode.plugin.config.settings import Settings
from tests.plugin.hanging_nvml import ENDLESS, HangingHost
from tests.plugin.kubelet_stub import KubeletStub
from tests.plugin.nodes import RESOURCE, MemoryLog, children, eventually, texts
from tests.plugin.serving import Serving, Start, kubelet

pytestmark = pytest.mark.skipif(not have_compiler(), reason="gcc is not installed")
MISMATCH, DRIVER_NOT_LOADED = 18, 9


class Node:
    """A machine with a kubelet; `serve` starts the plugin on it."""

    def __init__(self, stub: StubNode, kubelet: KubeletStub, start: Start) -> None:
        self.stub = stub
        self.kubelet = kubelet
        self.start = start
        self.write = stub.write

    def serve(self, scenario: Scenario, *given: str) -> Serving:
        self.write(scenario)
        return self.start("--rediscover-seconds", "0.3", "--health-hold-down", "500ms", *given)

    def ready(self, count: int, resource: str = RESOURCE, seconds: float = 30.0) -> bool:
        return self.kubelet.wait_allocatable(resource, count, seconds)

    def unhealthy(self, resource: str = RESOURCE) -> tuple[str, ...]:
        return self.kubelet.unhealthy(resource)


@pytest.fixture
def node(short: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    stub = stub_node(short, machine(1), libraries="nvml")
    for name, value in stub.env.items():
        monkeypatch.setenv(name, value)
    with kubelet(short) as (made, start):
        yield Node(stub, made, start)


def config(node: Node, short: Path, document: dict[str, object]) -> tuple[str, str]:
    path = short / "config.yaml"
    path.write_text(json.dumps({"version": "v1", **document}))
    return ("--config-file", str(path))


@pytest.mark.full
def test_every_share_of_a_failing_gpu_is_marked_and_recovers(node: Node, short: Path) -> None:
    shared = {"timeSlicing": {"resources": [{"name": RESOURCE, "replicas": 4}]}}
    seen = ("--health-hold-down", "3s")  # the longest time until a poll
    serving = node.serve(machine(3), *config(node, short, {"sharing": shared}), *seen)
    assert node.ready(12), serving.log()
    assert serving.says("watching health events")
    node.write(machine(3).with_event(Event(gpu_uuid(1), data=94)))
    assert node.ready(8), serving.log()
    assert node.unhealthy() == tuple(f"{gpu_uuid(1)}::{share}" for share in range(4))
    assert serving.says('msg="GPU is unhealthy"')  # written after the kubelet has the list
    assert serving.log().count('msg="GPU is unhealthy"') == 1
    assert node.ready(12), serving.log()  # a contained error: healthy again after the hold time


def test_only_the_affected_mig_device_is_marked(node: Node) -> None:
    cut = with_mig(machine(2), 1, mixed_layout(1))
    serving = node.serve(cut, "--mig-strategy", "mixed")
    others = ("nvidia.com/mig-3g.40gb", "nvidia.com/mig-1g.10gb", RESOURCE)
    assert all(node.ready(1, name) for name in (*others, "nvidia.com/mig-2g.20gb")), serving.log()
    assert serving.says("watching health events")
    first = cut.with_event(Event(gpu_uuid(1), data=48, gi=3, ci=0)).with_gpu(1, recovery=None)
    node.write(first)
    assert node.ready(0, "nvidia.com/mig-2g.20gb"), serving.log()
    assert node.unhealthy("nvidia.com/mig-2g.20gb") == (mig_uuid(1, 1),)
    assert [node.kubelet.allocatable(name) for name in others] == [1, 1, 1]
    node.write(first.with_event(Event(gpu_uuid(1), data=79, gi=3, ci=0)))  # this one concerns all of it
    assert all(node.ready(0, name) for name in others[:2]), serving.log()
    assert node.kubelet.allocatable(RESOURCE) == 1


def test_recreated_mig_devices_are_detected_without_ending_a_stream(node: Node) -> None:
    serving = node.serve(with_mig(machine(2), 1, mixed_layout(1)), "--mig-strategy", "mixed")
    assert eventually(lambda: serving.log().count("the kubelet watches") == 5), serving.log()
    before = len(node.kubelet.registrations)
    small = mixed_layout(1)[3]
    seven = [replace(small, index=slot, uuid=mig_uuid(1, slot), gi=7 + slot) for slot in range(7)]
    node.write(with_mig(machine(2), 1, seven))
    assert node.ready(7, "nvidia.com/mig-1g.10gb"), serving.log()
    assert node.ready(0, "nvidia.com/mig-3g.40gb"), serving.log()
    assert len(node.kubelet.registrations) == before
    assert serving.log().count("the kubelet watches") == before


@pytest.mark.full
def test_hotplugged_gpus_are_detected_and_watched(node: Node) -> None:
    serving = node.serve(machine(2))
    assert node.ready(2), serving.log()
    node.write(machine(4))
    assert node.ready(4), serving.log()
    assert serving.says('msg="watching health events" count=4')
    node.write(machine(4).with_event(Event(gpu_uuid(3), data=119)))
    assert node.ready(3), serving.log()
    assert len(node.kubelet.registrations) == 1


def test_driver_upgrade_ends_no_stream(node: Node) -> None:
    """The child's library no longer fits the kernel's module; later both are new."""
    serving = node.serve(replace(machine(2), driver="535.104.05"))
    assert node.ready(2), serving.log()
    assert serving.says("the kubelet watches"), serving.log()  # logged after the kubelet has the list
    stopped = [Fault(call, MISMATCH) for call in ("nvmlInitWithFlags", "nvmlDeviceGetCount")]
    node.write(machine(2).with_faults(*stopped))
    assert node.ready(0), serving.log()
    assert serving.says("library and kernel module have different versions")
    assert node.kubelet.capacity(RESOURCE) == 2
    node.write(replace(machine(2), driver="570.86.10"))
    assert node.ready(2), serving.log()
    assert len(node.kubelet.registrations) == 1
    assert serving.log().count("the kubelet watches") == 1


def test_nvml_crash_only_restarts_the_child(node: Node) -> None:
    serving = node.serve(machine(2))
    assert node.ready(2), serving.log()
    node.write(machine(2).with_faults(Fault("nvmlDeviceGetName", abort=True)))
    assert serving.says("SIGABRT"), serving.log()
    node.write(machine(2))
    assert eventually(lambda: serving.log().count("GPUs found") == 2), serving.log()
    assert node.ready(2), serving.log()
    node.write(machine(2).with_event(Event(gpu_uuid(0), data=79)))
    assert node.ready(1), serving.log()
    assert serving.process.poll() is None


@pytest.mark.full
def test_unhealthy_gpu_is_remembered_over_a_restart_and_cleared_by_a_new_driver(
    node: Node, short: Path
) -> None:
    serving = node.serve(machine(3))
    assert node.ready(3), serving.log()
    assert serving.says("watching health events")
    bad = machine(3).with_event(Event(gpu_uuid(1), data=119))
    node.write(bad)
    assert node.ready(2), serving.log()
    assert serving.end() == 0
    remembered = json.loads((short / "state/health.json").read_text())
    assert [(mark["gpu"], mark["code"]) for mark in remembered["marks"]] == [(gpu_uuid(1), "xid-119")]
    again = node.serve(bad)
    assert node.ready(2), again.log()
    assert node.unhealthy() == (gpu_uuid(1),)
    assert again.end() == 0
    upgraded = node.serve(replace(bad, driver="570.86.10"))
    assert node.ready(3), upgraded.log()


def test_reading_marks_a_gpu_without_any_event(node: Node) -> None:
    serving = node.serve(machine(2), "--health-poll-interval", "300ms")
    assert node.ready(2), serving.log()
    node.write(machine(2).with_gpu(1, remap=(1, 0)))
    assert node.ready(1), serving.log()
    assert serving.says("a row of memory waits for a reset to be remapped")
    node.write(machine(2))
    assert node.ready(2), serving.log()


def test_only_xid_48_counts_if_all_others_are_disabled(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DP_DISABLE_HEALTHCHECKS", "all")
    monkeypatch.setenv("DP_ENABLE_HEALTHCHECKS", "48")
    serving = node.serve(machine(3), "--health-hold-down", "1h")  # this one would clear by itself
    assert node.ready(3), serving.log()
    assert serving.says("watching health events")
    first = machine(3).with_event(Event(gpu_uuid(0), data=79))
    node.write(first)
    assert serving.says("xid=79"), serving.log()
    node.write(first.with_event(Event(gpu_uuid(2), data=48)))
    assert node.ready(2), serving.log()
    assert node.unhealthy() == (gpu_uuid(2),)


def test_thousand_xids_give_few_log_lines(node: Node) -> None:
    serving = node.serve(machine(4))
    assert node.ready(4), serving.log()
    assert serving.says("watching health events")
    before = serving.log().count("\n")
    storm = tuple(Event(gpu_uuid(number % 4), data=(31, 79)[number % 2]) for number in range(1000))
    node.write(replace(machine(4), events=storm))
    assert node.ready(2), serving.log()
    assert serving.says("xid=31")
    assert serving.log().count("\n") - before <= 8


def test_sigusr1_closes_nvml_so_that_the_driver_can_be_unloaded(node: Node) -> None:
    serving = node.serve(machine(2))
    assert node.ready(2), serving.log()
    serving.process.send_signal(signal.SIGUSR1)
    assert serving.says("NVML is closed temporarily"), serving.log()
    assert eventually(lambda: children_with_nvml(serving.process.pid) == [])
    assert node.kubelet.allocatable(RESOURCE) == 2
    assert serving.end() == 0


def children_with_nvml(parent: int) -> list[int]:
    maps = {pid: texts([Path(f"/proc/{pid}/maps")]) for pid in children(parent)}
    return [pid for pid, found in maps.items() if any("libnvidia-ml" in text for text in found)]


@contextmanager
def embedded(short: Path, scenario: Scenario) -> Iterator[tuple[StubNode, KubeletStub, MemoryLog]]:
    """The same in this process, where a query that hangs uses its time limit up at once."""
    stub = stub_node(short, scenario, libraries="nvml")
    log = MemoryLog()
    settings = Settings(
        kubelet_socket=str(short / "dp/kubelet.sock"),
        state_dir=str(short / "state"),
        probe_seconds=45.0,  # a child may need some of it to start
        rediscover_seconds=0.2,
    )
    service = make_service(HangingHost(environ={**os.environ, **stub.env}), settings, log)
    with KubeletStub(Host(), str(short / "dp")) as made:
        service.start()
        try:
            yield stub, made, log
        finally:
            service.stop()
            service.join()


HANG: list[Callable[[str], Fault]] = [
    lambda uuid: replace(ENDLESS, call="nvmlDeviceGetHandleByIndex", uuid=uuid),
    lambda uuid: replace(ENDLESS, call="nvmlDeviceGetTotalEccErrors", uuid=uuid),
    lambda uuid: Fault("nvmlDeviceGetUUID", uuid=uuid, abort=True),
]


@pytest.mark.full
@pytest.mark.parametrize("fault", HANG, ids=["handle-hangs", "reading-hangs", "crashes"])
def test_gpu_that_hangs_or_crashes_nvml_does_not_affect_the_others(
    short: Path, fault: Callable[[str], Fault]
) -> None:
    with embedded(short, machine(4)) as (stub, made, log):
        assert made.wait_allocatable(RESOURCE, 4, 30), log.lines
        stub.write(machine(4).with_faults(fault(gpu_uuid(2))))
        assert made.wait_allocatable(RESOURCE, 3, 60), log.lines
        assert made.unhealthy(RESOURCE) == (gpu_uuid(2),)
        stub.write(machine(4).with_faults(fault(gpu_uuid(2))).with_event(Event(gpu_uuid(3), data=79)))
        assert made.wait_allocatable(RESOURCE, 2, 30), log.lines
        assert len(made.registrations) == 1


@pytest.mark.full
def test_hanging_nvml_makes_all_gpus_unhealthy_until_it_responds(short: Path) -> None:
    with embedded(short, machine(2)) as (stub, made, log):
        assert made.wait_allocatable(RESOURCE, 2, 30), log.lines
        hangs = [replace(ENDLESS, call=call) for call in ("nvmlInitWithFlags", "nvmlDeviceGetCount")]
        stub.write(machine(2).with_faults(*hangs))
        assert made.wait_allocatable(RESOURCE, 0, 60), log.lines
        assert eventually(lambda: any("did not answer within 45 s" in reason for reason in log.reasons()))
        assert len(made.registrations) == 1
