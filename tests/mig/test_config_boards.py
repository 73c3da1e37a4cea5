"""Configurations on nodes of several boards, without a driver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from fixtures.mig_tables import BOARDS
from gpunode.mig.config import DesiredLayouts, ImpossibleMigConfig, LayoutEntry, desired_layouts, parse
from gpunode.mig.model import GpuLayout, Layouts
from gpunode.mig.plan import plan
from tests.mig.conftest import EXAMPLES
from tests.mig.test_placement import board

DISPLAY = 0x1FB010DE


def node(*names: str) -> Layouts:
    """Whole GPUs of these boards; ``display`` is a board without MIG."""
    found = []
    for index, name in enumerate(names):
        if name == "display":
            gpu = GpuLayout(f"GPU-{index}", index, "NVIDIA T400", "", device_id=DISPLAY)
        else:
            ids = BOARDS[name]
            gpu = replace(board(name), current=False, pending=False, uuid=f"GPU-{index}", index=index)
            gpu = replace(gpu, device_id=ids.device_id, subsystem_id=ids.subsystem_id)
        found.append(gpu)
    return Layouts("", tuple(found))


def desired(entries: Sequence[LayoutEntry], layouts: Layouts) -> DesiredLayouts:
    found = desired_layouts("x", "a", entries, layouts)
    plan("x", found.all)
    return found


def entries(*lines: str) -> tuple[LayoutEntry, ...]:
    text = "version: v1\nmig-configs:\n  a:\n" + "".join(f"  - {{{line}}}\n" for line in lines)
    return parse(text.encode(), "x").labels["a"]


@pytest.mark.parametrize("name", BOARDS)
@pytest.mark.parametrize("label", ["all-1g", "all-balanced"])
def test_documented_examples_fit_every_board(name: str, label: str) -> None:
    with open(EXAMPLES, "rb") as file:
        found = desired(parse(file.read(), EXAMPLES).labels[label], node(name, name))
    assert [wish.gpu.index for wish in found.all] == [0, 1]
    slots = BOARDS[name].slots
    assert (
        found.all[0].profiles
        and sum(found.all[0].profiles.values())
        == {
            ("all-1g", 8): 7,
            ("all-1g", 4): 4,
            ("all-balanced", 8): 4,
            ("all-balanced", 4): 3,
        }[label, slots]
    )


def test_workstation_with_a_display_board() -> None:
    """As a DGX Station A100 has it: NVML's index 3 is the display's."""
    station = node("a100-80gb", "a100-80gb", "a100-80gb", "display", "a100-80gb")
    found = desired(
        entries(
            'device-filter: "0x20B210DE", devices: [0], mig-enabled: false, mig-devices: {}',
            'device-filter: "0x20B210DE", devices: [1], mig-enabled: true, mig-devices: {3g.40gb: 2}',
            'device-filter: "0x20B210DE", devices: [2, 4], mig-enabled: true, mig-devices: {1g.10gb: 7}',
            'device-filter: "0x1FB010DE", devices: [3], mig-enabled: false, mig-devices: {}',
        ),
        station,
    )
    assert [(wish.gpu.index, wish.enabled, dict(wish.profiles)) for wish in found.all] == [
        (0, False, {}),
        (1, True, {"3g.40gb": 2}),
        (2, True, {"1g.10gb": 7}),
        (3, False, {}),
        (4, True, {"1g.10gb": 7}),
    ]
    assert found.notes == () and found.unnamed == ()


def test_one_label_gives_two_models_their_own_layout() -> None:
    found = desired(
        entries(
            'device-filter: ["0x20B710DE", "0x1EB810DE"], devices: all, mig-enabled: true,'
            " mig-devices: {1g.6gb: 4}",
            'device-filter: "0x233010DE:0x16C110DE", devices: all, mig-enabled: true,'
            " mig-devices: {1c.3g.40gb: 3, 1g.10gb+me: 1}",
        ),
        node("h100", "a30", "display"),
    )
    assert [dict(wish.profiles) for wish in found.all] == [{"1c.3g.40gb": 3, "1g.10gb+me": 1}, {"1g.6gb": 4}]


def test_other_subsystem_is_another_board() -> None:
    layouts = Layouts("", (replace(node("h100").gpus[0], subsystem_id=0x16C010DE),))
    filtered = entries('device-filter: "0x233010DE:0x16C110DE", devices: all, mig-enabled: false')
    with pytest.raises(ImpossibleMigConfig, match="no entry of 'a' matches a GPU of this node"):
        desired(filtered, layouts)


def test_gpu_without_data_may_match_any_filter() -> None:
    dead = GpuLayout("", 1, "", "", error="GPU is lost (NVML 15)")
    layouts = Layouts("", (*node("h100").gpus, dead))
    filtered = 'device-filter: "0x233010DE", devices: {}, mig-enabled: {}'
    for last in ("false", "true, mig-devices: {1g.10gb: 7}"):
        with pytest.raises(ImpossibleMigConfig) as raised:
            desired(entries(filtered.format("all", "false"), filtered.format("[1]", last)), layouts)
        assert raised.value.faults == ("x:4: GPU 1 can't be queried: GPU is lost (NVML 15)",)
    assert len(desired(entries(filtered.format("[0]", "false")), layouts).all) == 1
