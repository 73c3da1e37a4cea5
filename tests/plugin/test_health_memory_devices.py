"""A GPU that was seen once stays known, and nothing else does."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gpunode.gpu.model import GPU_IS_LOST, Gpu
from gpunode.plugin.model import NOT_LISTED, complete_inventory
from tests.plugin.gpus import cut, gpu, inventory, uuid


def test_lost_mig_gpu_keeps_its_mig_devices():
    before = inventory(cut(0, "1g.10gb", "2g.20gb"), gpu(1))
    half_read = Gpu(0, uuid(0), "", "", mig_enabled=True, error="GPU is lost")
    now = complete_inventory(inventory(half_read, gpu(1)), before)
    assert now.gpus[0] == replace(before.gpus[0], error="GPU is lost")
    unlisted = complete_inventory(inventory(gpu(1)), before)
    assert unlisted.gpus[0] == replace(before.gpus[0], error=NOT_LISTED, error_code=GPU_IS_LOST)


def test_new_layout_on_a_healthy_gpu_replaces_the_old_one():
    before = inventory(cut(0, "1g.10gb", "2g.20gb"))
    after = inventory(cut(0, "3g.40gb"))
    assert complete_inventory(after, before) == after
    assert complete_inventory(inventory(gpu(0)), before) == inventory(gpu(0))


def test_gpu_without_uuid_is_matched_by_address_or_index():
    before = inventory(gpu(0), gpu(1))
    by_address = Gpu(0, "", "", gpu(1).pci, error="GPU is lost")
    found = complete_inventory(inventory(gpu(0), replace(by_address, index=1)), before)
    assert [(one.uuid, one.error) for one in found.gpus] == [(uuid(0), ""), (uuid(1), "GPU is lost")]
    by_index = Gpu(1, "", "", "", error="GPU is lost")
    found = complete_inventory(inventory(gpu(0), by_index), before)
    assert [(one.uuid, one.error) for one in found.gpus] == [(uuid(0), ""), (uuid(1), "GPU is lost")]


def test_gpu_never_read_completely_is_completed_from_what_it_reports():
    first = Gpu(0, uuid(0), "", "", error="Unknown Error")
    more = Gpu(0, uuid(0), "NVIDIA H100", "0000:19:00.0", 3, error="GPU is lost")
    assert complete_inventory(inventory(more), inventory(first)).gpus == (more,)
    assert complete_inventory(inventory(first), inventory(more)).gpus == (
        replace(more, error="Unknown Error"),
    )


def test_returning_gpu_is_complete_again():
    lost = complete_inventory(inventory(), inventory(gpu(0)))
    assert complete_inventory(inventory(gpu(0)), lost) == inventory(gpu(0))


KINDS = st.sampled_from(["sound", "cut", "recut", "error", "nameless", "gone"])
NODES = st.lists(KINDS, min_size=4, max_size=4)


def node(kinds):
    made = {
        "sound": lambda index: gpu(index),
        "cut": lambda index: cut(index, "1g.10gb"),
        "recut": lambda index: cut(index, "3g.40gb", "3g.40gb"),
        "error": lambda index: Gpu(index, uuid(index), "", "", error="Unknown Error"),
        "nameless": lambda index: Gpu(index, "", "", "", error="GPU is lost"),
    }
    return inventory(*(made[kind](index) for index, kind in enumerate(kinds) if kind != "gone"))


@given(st.lists(NODES, min_size=1, max_size=6))
def test_any_history_keeps_known_devices_and_does_not_change_healthy_ones(history):
    known = None
    seen: set[str] = set()
    for kinds in history:
        now = node(kinds)
        known = complete_inventory(now, known)
        seen |= {one.uuid for one in now.gpus if one.uuid}
        found = [one.uuid for one in known.gpus if one.uuid]
        assert len(found) == len(set(found))
        assert set(found) == seen
        described = {one.uuid: one for one in known.gpus}
        for one in now.gpus:
            if not one.error:
                assert described[one.uuid] == one
        sound = {one.uuid for one in now.gpus if not one.error}
        assert all(one.error for one in known.gpus if one.uuid not in sound)
        assert [one.index for one in known.gpus] == sorted(one.index for one in known.gpus)
        assert complete_inventory(now, known) == known
