"""Inputs of a plan besides NVML: device files that are created and removed while the plugin serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpunode.gpu.model import Topology
from gpunode.host import Host
from gpunode.host.reading import DeviceNode
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.ledger import Ledger
from gpunode.plugin.nvidia.backend import LOOK_SECONDS, NvidiaBackend
from tests.plugin.fakes import FakeChecker
from tests.plugin.gpus import GPU_RESOURCE, gpu, inventory
from tests.plugin.nodes import MemoryLog, eventually

CHANNEL = "/dev/nvidia-caps-imex-channels/channel0"


class Elsewhere(Host):
    """This machine without its own device files."""

    def device(self, path: str) -> DeviceNode | None:
        return None if path.startswith("/dev/nvidia") else super().device(path)


class Node:
    """Two GPUs on a machine with its device files below `root`: a link to /dev/null is one as well."""

    def __init__(self, root: Path, settings: Settings) -> None:
        self.root = root
        (root / "dev").mkdir()
        host = Elsewhere()
        self.log = MemoryLog()
        self.backend = NvidiaBackend(host, settings, self.log)
        self.ledger = Ledger(self.backend, settings, FakeChecker(), self.log, lambda: 0.0)
        self.backend.replan = self.ledger.replan
        self.ledger.seen(inventory(gpu(0), gpu(1)), Topology())
        self.now = 0.0
        self.backend.tick(self.now)

    def make(self, path: str) -> None:
        place = self.root / path.lstrip("/")
        place.parent.mkdir(exist_ok=True)
        place.symlink_to("/dev/null")

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.backend.tick(self.now)

    def nodes(self) -> list[str]:
        feed = self.ledger.feeds[GPU_RESOURCE].snapshot()
        answer = self.backend.answer(self.ledger.settings, feed, [feed.devices[0].id])
        return [node.container for node in answer.nodes]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(dev_root=str(tmp_path), container_driver_root="", pass_device_specs=True)


def test_control_nodes_created_later_are_allocated(tmp_path: Path, settings: Settings) -> None:
    node = Node(tmp_path, settings)
    version = node.ledger.feeds[GPU_RESOURCE].snapshot().version
    assert node.nodes() == ["/dev/nvidia0"]
    node.make("/dev/nvidia-uvm")
    node.later(LOOK_SECONDS - 1)
    assert node.nodes() == ["/dev/nvidia0"]
    node.later(2)
    assert eventually(lambda: node.nodes() == ["/dev/nvidia-uvm", "/dev/nvidia0"])
    assert any("/dev/nvidia-uvm" in line for line in node.log.messages("warning"))
    assert eventually(lambda: "/dev/nvidia-uvm" not in "".join(node.ledger.plan.warnings))
    assert node.ledger.feeds[GPU_RESOURCE].snapshot().version == version  # nothing that the kubelet counts


def test_required_imex_channel_may_appear_later(tmp_path: Path, settings: Settings) -> None:
    node = Node(
        tmp_path,
        Settings(
            dev_root=settings.dev_root, container_driver_root="", imex_channel_ids=(0,), imex_required=True
        ),
    )
    feed = node.ledger.feeds[GPU_RESOURCE]
    assert feed.snapshot().healthy == 0
    node.make(CHANNEL)
    node.later(LOOK_SECONDS + 1)
    assert eventually(lambda: feed.snapshot().healthy == 2)


def test_refused_configuration_is_not_planned(tmp_path: Path, settings: Settings) -> None:
    node = Node(tmp_path, settings)
    plan = node.ledger.plan
    node.backend.plan(Settings(), inventory(gpu(0)))  # and never prepared
    node.later(LOOK_SECONDS + 1)
    assert node.ledger.plan is plan
    node.make("/dev/nvidia-uvm")
    node.later(LOOK_SECONDS + 1)
    assert eventually(lambda: "/dev/nvidia-uvm" in node.nodes())


def test_bug_in_planning_is_raised(tmp_path: Path, settings: Settings) -> None:
    node = Node(tmp_path, settings)

    def fail() -> None:
        raise ZeroDivisionError

    node.backend.replan = fail
    node.make("/dev/nvidia-uvm")
    node.later(LOOK_SECONDS + 1)

    def raised() -> bool:
        try:
            node.later(LOOK_SECONDS + 1)
        except ZeroDivisionError:
            return True
        return False

    assert eventually(raised)
