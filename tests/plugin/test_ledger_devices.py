"""Losses and how the kubelet sees them: events through the ledger, without a driver."""

from __future__ import annotations

from dataclasses import replace

from gpunode.gpu.model import Inventory, Reading, Topology
from gpunode.gpu.nvml import GpuEvent
from gpunode.plugin.config.settings import HealthSettings, Settings
from gpunode.plugin.health import HealthChecker
from gpunode.plugin.ledger import Ledger
from gpunode.plugin.model import KubeletDevice, Resource, ResourcePlan, Unit
from tests.plugin.nodes import RESOURCE, MemoryLog, gpu, inventory, uuid

NOW = 1_700_000_000.0
LOST = "the GPU is lost (NVML 15)"


class PlainBackend:
    """Advertises every GPU that has a UUID, in two shares each; replaces a vendor's whole backend."""

    def plan(self, settings: Settings, inventory: Inventory) -> ResourcePlan:
        units = [Unit(item.uuid, item.uuid, str(item.index)) for item in inventory.gpus if item.uuid]
        devices = tuple(KubeletDevice(f"{unit.id}::{share}", unit) for unit in units for share in range(2))
        return ResourcePlan((Resource(RESOURCE, devices),))

    def prepare(self, settings: Settings, inventory: Inventory, plan: ResourcePlan) -> None:
        """Does nothing."""


class Node:
    def __init__(self, count: int = 4) -> None:
        self.now = NOW
        self.log = MemoryLog()
        checker = HealthChecker(HealthSettings(), self.log)
        self.ledger = Ledger(PlainBackend(), Settings(), checker, self.log, lambda: self.now)  # type: ignore[arg-type]
        self.see(inventory(count))

    def see(self, seen: Inventory, seconds: float = 0.0) -> Node:
        self.now += seconds
        self.ledger.seen(seen, Topology())
        return self

    def later(self, seconds: float) -> Node:
        self.now += seconds
        self.ledger.tick()
        return self

    @property
    def version(self) -> int:
        return self.ledger.feeds[RESOURCE].snapshot().version

    def unhealthy(self) -> dict[str, str]:
        """By GPU, with the reason; both shares agree."""
        found: dict[str, str] = {}
        for device in self.ledger.feeds[RESOURCE].snapshot().devices:
            if device.problem is not None:
                assert found.setdefault(device.unit.id, device.problem.reason) == device.problem.reason
            else:
                assert device.unit.id not in found
        return found


def without(count: int, *indices: int) -> Inventory:
    full = inventory(count)
    return full._replace(gpus=tuple(item for item in full.gpus if item.index not in indices))


def broken(count: int, index: int, reason: str = LOST) -> Inventory:
    full = inventory(count)
    return full._replace(
        gpus=tuple(replace(item, error=reason * (item.index == index)) for item in full.gpus)
    )


def test_unreadable_gpu_does_not_hide_the_others() -> None:
    node = Node(3).see(broken(3, 1))
    assert node.unhealthy() == {uuid(1): LOST}
    assert len(node.ledger.feeds[RESOURCE].snapshot().devices) == 6


def test_gpu_lost_from_the_start_is_unhealthy_and_the_others_are_not() -> None:
    node = Node(0).see(broken(3, 1))
    assert node.unhealthy() == {uuid(1): LOST}


def test_gpu_without_a_uuid_is_marked_by_its_pci_address() -> None:
    node = Node(2)
    node.see(Inventory("550", gpus=(gpu(0, 0), replace(gpu(1), uuid="", error="Unknown Error"))))
    assert node.unhealthy() == {uuid(1): "Unknown Error"}


def test_only_the_shares_of_a_failing_gpu_are_marked() -> None:
    node = Node()
    before = node.version
    node.ledger.event(GpuEvent("xid", uuid(3), 79))
    assert node.unhealthy() == {uuid(3): "XID 79: the GPU has fallen off the bus"}
    assert node.version == before + 1
    assert node.log.messages("error") == ["GPU is unhealthy"]


def test_lost_gpu_keeps_its_position_and_recovers_at_the_second_complete_poll() -> None:
    node = Node().see(without(4, 2))
    assert list(node.unhealthy()) == [uuid(2)]
    assert list(node.see(inventory(4), 1).unhealthy()) == [uuid(2)]
    assert node.see(inventory(4), 1).unhealthy() == {}
    assert node.log.messages()[-1] == "GPU is healthy again"


def test_gpu_complete_for_some_seconds_recovers_without_a_second_poll() -> None:
    node = Node().see(without(4, 2)).see(inventory(4))
    assert node.later(9).unhealthy()
    assert not node.later(2).unhealthy()


def test_intermittent_gpu_does_not_flap() -> None:
    node = Node().see(without(4, 1))
    version = node.version
    for _ in range(5):
        node.see(inventory(4), 1).see(without(4, 1), 1)
    assert node.version == version


def test_second_loss_within_the_hour_needs_the_hold_time() -> None:
    node = Node().see(without(4, 1))
    node.see(inventory(4), 1).see(inventory(4), 1)
    assert node.unhealthy() == {}
    node.see(without(4, 1), 60).see(inventory(4), 1).see(inventory(4), 1)
    assert node.later(50).unhealthy()
    assert not node.later(11).unhealthy()


def test_loss_in_a_reading_counts_and_clears_with_a_valid_one() -> None:
    node = Node()
    node.ledger.readings([Reading(uuid(1), error=LOST)])
    assert node.unhealthy() == {uuid(1): LOST}
    node.see(inventory(4), 1).see(inventory(4), 1)
    assert node.unhealthy() == {uuid(1): LOST}
    node.ledger.readings([Reading(uuid(1), ecc_volatile=0)])
    assert node.see(inventory(4), 1).unhealthy() == {}


def test_recovery_from_a_loss_does_not_clear_an_xid_at_once() -> None:
    node = Node()
    node.ledger.event(GpuEvent("xid", uuid(1), 79))
    node.see(without(4, 1), 1).see(inventory(4), 1).see(inventory(4), 1)
    assert node.unhealthy() == {uuid(1): "XID 79: the GPU has fallen off the bus"}
    assert node.later(61).unhealthy() == {}


def test_broken_driver_makes_all_unhealthy_is_logged_once_and_clears_at_the_second_poll() -> None:
    node = Node()
    node.ledger.broken("no answer", False)
    assert node.unhealthy() == {}
    node.ledger.broken("library mismatch", True)
    node.ledger.broken("library mismatch", True)
    assert node.unhealthy() == {uuid(index): "library mismatch" for index in range(4)}
    assert len(node.log.messages("error")) == 4
    assert len(node.see(inventory(4), 1).unhealthy()) == 4
    assert node.see(inventory(4), 1).unhealthy() == {}


def test_thousand_xids_give_few_log_lines() -> None:
    node = Node(8)
    for number in range(1000):
        node.ledger.event(GpuEvent("xid", uuid(number % 8), 48 + number % 100))
    assert len(node.unhealthy()) == 8
    assert len(node.log.messages("error")) <= 8 * 4  # a line only for a more serious problem
