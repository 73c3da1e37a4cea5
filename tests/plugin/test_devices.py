"""The resource table: what fails, what heals, and who is told."""

from __future__ import annotations

from dataclasses import replace
from threading import Thread

from gpunode.gpu.model import Inventory
from gpunode.plugin.devices import DeviceTable
from tests.plugin.nodes import gpu, inventory, table, uuid


def unhealthy(made: DeviceTable) -> dict[str, str]:
    return {device.id: device.problem for device in made.snapshot().devices if not device.healthy}


def without(count: int, *indices: int) -> Inventory:
    full = inventory(count)
    return replace(full, gpus=tuple(item for item in full.gpus if item.index not in indices))


def test_one_unreadable_gpu_hides_no_other() -> None:
    made = DeviceTable()
    made.sighting(Inventory("550", gpus=(gpu(0, 0), gpu(1, 0, error="GPU is lost"), gpu(2, 1))))
    assert [device.id for device in made.snapshot().devices] == [uuid(0), uuid(1), uuid(2)]
    assert unhealthy(made) == {uuid(1): "GPU is lost"}


def test_a_gpu_without_a_uuid_is_left_out_and_condemns_its_pci_address() -> None:
    made = table(2)
    made.sighting(Inventory("550", gpus=(gpu(0, 0), replace(gpu(1), uuid="", error="Unknown Error"))))
    assert len(made.snapshot().devices) == 2
    assert unhealthy(made) == {uuid(1): "Unknown Error"}


def test_an_event_marks_exactly_one_gpu_and_does_not_heal() -> None:
    made = table(8)
    (change,) = made.event(uuid(3), "XID 79")
    assert (change.device.id, change.problem) == (uuid(3), "XID 79")
    for _ in range(5):
        assert made.sighting(inventory(8)) == ()
    assert unhealthy(made) == {uuid(3): "XID 79"}


def test_the_first_event_is_the_reason_that_stays() -> None:
    made = table(2)
    made.event(uuid(1), "XID 79")
    assert made.event(uuid(1), "XID 45") == ()
    assert unhealthy(made) == {uuid(1): "XID 79"}


def test_an_event_of_an_unknown_gpu_changes_nothing() -> None:
    made = table(2)
    before = made.snapshot()
    assert made.event("GPU-other", "XID 79") == ()
    assert made.snapshot().version == before.version


def test_a_lost_gpu_keeps_its_place_and_heals_at_the_second_whole_sighting() -> None:
    made = table(4)
    (lost,) = made.sighting(without(4, 2))
    assert lost.problem == "lost: NVML does not list it any more"
    assert len(made.snapshot().devices) == 4
    assert made.sighting(inventory(4)) == ()
    (healed,) = made.sighting(inventory(4))
    assert (healed.device.id, healed.problem) == (uuid(2), "")
    assert unhealthy(made) == {}


def test_a_gpu_that_comes_and_goes_does_not_flap() -> None:
    made = table(2)
    made.sighting(without(2, 1))
    version = made.snapshot().version
    for _ in range(5):
        made.sighting(inventory(2))
        made.sighting(without(2, 1))
    assert made.snapshot().version == version


def test_healing_from_a_loss_does_not_forgive_an_event() -> None:
    made = table(2)
    made.event(uuid(1), "XID 79")
    made.sighting(without(2, 1))
    made.sighting(inventory(2))
    made.sighting(inventory(2))
    assert unhealthy(made) == {uuid(1): "XID 79"}


def test_broken_nvml_makes_all_unhealthy_and_says_so_once() -> None:
    made = table(4)
    assert len(made.all_missing("Driver/library version mismatch")) == 4
    assert made.all_missing("Driver/library version mismatch") == ()


def test_a_new_gpu_is_added_and_display_adapters_are_not() -> None:
    made = table(1)
    made.sighting(Inventory("550", gpus=(gpu(0, 0), gpu(1, 0), replace(gpu(2), name="DGX Display"))))
    assert [device.id for device in made.snapshot().devices] == [uuid(0), uuid(1)]


def test_the_version_grows_only_with_what_the_kubelet_sees() -> None:
    made = table(4)
    version = made.snapshot().version
    made.sighting(inventory(4))
    assert made.snapshot().version == version
    made.event(uuid(0), "XID 79")
    assert made.snapshot().version == version + 1


def test_waiters_wake_for_news_and_when_they_are_no_longer_wanted() -> None:
    made = table(2)
    wanted = [True]
    got: list[object] = []
    version = made.snapshot().version

    def wait() -> None:
        news = made.wait_newer(version, lambda: True)
        got.append(None if news is None else news.version)
        got.append(made.wait_newer(version + 1, lambda: wanted[0]))

    waiter = Thread(target=wait)
    waiter.start()
    made.event(uuid(0), "XID 79")
    wanted[0] = False
    made.wake()
    waiter.join(5)
    assert got == [version + 1, None]


def test_a_gpu_in_mig_mode_is_unhealthy_until_the_mode_is_off() -> None:
    made = table(2)
    cut = replace(inventory(2), gpus=(gpu(0, 0), replace(gpu(1, 1), mig_enabled=True)))
    (change,) = made.sighting(cut)
    assert change.problem == "MIG mode is on: no container can use GPU 1 as a whole"
    assert list(unhealthy(made)) == [uuid(1)]
    made.sighting(inventory(2))
    assert unhealthy(made) == {}
