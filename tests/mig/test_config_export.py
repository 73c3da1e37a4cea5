"""The present layouts as mig-parted's configuration: which GPUs share an entry, and its names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import yaml

from gpunode.mig.config import as_json, as_yaml, desired_layouts, difference, export, parse
from gpunode.mig.model import (
    ComputeInstance,
    GpuInstance,
    GpuLayout,
    Layouts,
    Placement,
    Profile,
    device_name,
    inferred_compute,
)

A100, H100, T4 = 0x20B010DE, 0x233010DE, 0x1EB810DE
ONE, TWO, THREE = ("1g.5gb", 1, 0, 19), ("2g.10gb", 2, 1, 14), ("3g.20gb", 3, 2, 9)


def gpu(index: int, *cut: Sequence[Any], device: int = A100, on: bool | None = None, capable: bool = True):
    """A GPU cut into these profiles; one of (profile, slices, ...) has compute instances of those slices."""
    instances = []
    for number, one in enumerate(cut):
        (name, slices, profile, identity), *parts = one if isinstance(one[0], tuple) else (one, one[1])
        compute = tuple(
            ComputeInstance(n, part, profile=device_name(name, slices, part)) for n, part in enumerate(parts)
        )
        place = Placement(number, slices)
        instances.append(GpuInstance(number, profile, identity, name, slices, place, compute))
    current = bool(cut) if on is None else on
    profiles = tuple(
        Profile(p, i, n, s, 0, 7, compute=inferred_compute(s)) for n, s, p, i in (ONE, TWO, THREE)
    )
    return GpuLayout(
        *(f"GPU-{index}", index, "a GPU", "0000:01:00.0", device),
        capable=capable,
        current=current and capable,
        pending=current and capable,
        instances=tuple(instances),
        profiles=profiles,
    )


def entry(devices: object, enabled: bool, filters: object = None, **counts: int) -> dict[str, object]:
    made = {"device-filter": filters} if filters else {}
    names = {name.replace("_", ".").lstrip("."): count for name, count in counts.items()}
    return {**made, "devices": devices, "mig-enabled": enabled, "mig-devices": names}


CASES = {
    "one GPU": ([gpu(0, ONE, ONE)], [entry("all", True, _1g_5gb=2)]),
    "alike": ([gpu(0, ONE, TWO), gpu(1, TWO, ONE)], [entry("all", True, _1g_5gb=1, _2g_10gb=1)]),
    "off": ([gpu(0), gpu(1)], [entry("all", False)]),
    "on and empty": ([gpu(0, on=True)], [entry("all", True)]),
    "two groups of one model": (
        [gpu(0, ONE), gpu(1), gpu(2, ONE)],
        [entry([0, 2], True, _1g_5gb=1), entry([1], False)],
    ),
    "two models, cut alike": ([gpu(0), gpu(1, device=H100)], [entry("all", False)]),
    "two models, cut otherwise": (
        [gpu(0, ONE), gpu(1, device=H100)],
        [entry("all", True, "0x20B010DE", _1g_5gb=1), entry("all", False, "0x233010DE")],
    ),
    "a group of several models": (
        [gpu(0), gpu(1, device=H100), gpu(2, ONE, device=H100)],
        [entry([0, 1], False, ["0x20B010DE", "0x233010DE"]), entry([2], True, "0x233010DE", _1g_5gb=1)],
    ),
    "one without MIG is one with MIG off": (
        [gpu(0, device=T4, capable=False), gpu(1)],
        [entry("all", False)],
    ),
    "parts of an instance": (
        [gpu(0, (THREE, 1, 2), (TWO, 2))],
        [entry("all", True, **{"1c_3g_20gb": 1, "2c_3g_20gb": 1, "2g_10gb": 1})],
    ),
    "an instance that holds nothing": ([gpu(0, ONE, (TWO,))], [entry("all", True, _1g_5gb=1)]),
    "no GPU": ([], []),
}


@pytest.mark.parametrize("case", CASES)
def test_exported_entries(case):
    gpus, wanted = CASES[case]
    assert export(Layouts("", tuple(gpus)), "today") == {"version": "v1", "mig-configs": {"today": wanted}}


@pytest.mark.parametrize("case", [name for name in CASES if name != "no GPU"])
@pytest.mark.parametrize("form", [as_yaml, as_json])
def test_exported_file_parses_to_the_current_layout(case, form):
    layouts = Layouts("", tuple(CASES[case][0]))
    chosen, entries = parse(form(export(layouts)).encode(), "mig.yaml").select("")
    assert chosen == "current"
    wanted = desired_layouts("mig.yaml", chosen, entries, layouts).all
    assert {one.gpu.index for one in wanted} >= {one.index for one in layouts.gpus if one.capable}
    assert [difference(one) for one in wanted if difference(one)] == []


def test_yaml_is_formatted_as_by_mig_parted():
    text = as_yaml(export(Layouts("", (gpu(0, ONE), gpu(1), gpu(2, device=H100))), "now"))
    assert text == (
        "version: v1\n"
        "mig-configs:\n"
        "  now:\n"
        "  - device-filter: '0x20B010DE'\n"
        "    devices: [0]\n"
        "    mig-enabled: true\n"
        "    mig-devices:\n"
        "      1g.5gb: 1\n"
        "  - device-filter:\n"
        "    - '0x20B010DE'\n"
        "    - '0x233010DE'\n"
        "    devices: [1, 2]\n"
        "    mig-enabled: false\n"
        "    mig-devices: {}\n"
    )


def test_both_formats_have_equal_content():
    document = export(Layouts("", (gpu(0, ONE, (THREE, 1, 1)), gpu(1))))
    assert yaml.safe_load(as_yaml(document)) == json.loads(as_json(document)) == document
