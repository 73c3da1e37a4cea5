"""`gpunode labels --vendor amd`: the labels of AMD's node labeller."""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures.amd import amd_machine
from gpunode.plugin.labels.amd import Card, Driver, amd_labels
from tests.cli import gpunode
from tests.plugin.labels.test_make_command import labels_below, values


def test_amd(tmp_path: Path) -> None:
    machine = amd_machine(tmp_path, "mi300x")
    for index in range(8):
        machine.write(f"{machine.at(index)}/available_compute_partition", "SPX, DPX, QPX, CPX\n")
    machine.write("/sys/module/amdgpu/version", "6.12.12\n")
    debug = "VCE feature version: 0, firmware version: 0x00000000\n"
    debug += "MEC feature version: 50, firmware version: 0x0000009d\n"
    machine.write("/sys/kernel/debug/dri/1/amdgpu_firmware_info", debug)
    found = values(gpunode("labels", "--vendor", "amd", "--firmware", "--root", str(tmp_path)))
    assert labels_below(found, "amd.com/gpu") == {
        "family": "AI",
        "driver-version": "6.12.12",
        "device-id": "74a1",
        "product-name": "AMD_Instinct_MI300X_OAM",
        "vram": "192G",
        "simd-count": "1216",
        "cu-count": "304",
        "compute-memory-partition": "spx_nps1",
        "compute-partitioning-supported": "true",
        "memory-partitioning-supported": "false",
    }
    assert labels_below(found, "beta.amd.com/gpu") == {
        "family": "AI",
        "family.AI": "8",
        "device-id": "74a1",
        "device-id.74a1": "8",
        "product-name": "AMD_Instinct_MI300X_OAM",
        "product-name.AMD_Instinct_MI300X_OAM": "8",
        "vram": "192G",
        "vram.192G": "8",
        "simd-count": "1216",
        "simd-count.1216": "8",
        "cu-count": "304",
        "cu-count.304": "8",
        "firmware.MEC.feat.50": "1",
        "firmware.MEC.fw.157": "1",
        "firmware.VCE.feat.0": "1",
        "firmware.VCE.fw.0": "1",
    }
    assert all(name.startswith(("amd.com/gpu.", "beta.amd.com/gpu.")) for name in found)


@pytest.mark.parametrize(("mib", "word"), [(512, "1G"), (511, "0G"), (24560, "24G"), (196592, "192G")])
def test_amd_memory_is_rounded_as_by_the_node_labeller(mib: int, word: str) -> None:
    found = amd_labels((Card("gfx1103", memory_bytes=mib << 20),), Driver(), firmware=False).values
    assert found["amd.com/gpu.vram"] == word


def test_amd_gpus_of_several_models(tmp_path: Path) -> None:
    amd_machine(tmp_path, "desktop")
    found = values(gpunode("labels", "--vendor", "amd", "--root", str(tmp_path)))
    assert found["amd.com/gpu.family.GC_11_0_0"] == "1"
    assert found["amd.com/gpu.family.GC_10_3_6"] == "1"
    assert found["amd.com/gpu.product-name.AMD_Radeon_RX_7900_XTX"] == "1"
    assert "amd.com/gpu.family" not in found
    assert "amd.com/gpu.compute-memory-partition" not in found
    empty = tmp_path / "empty"
    empty.mkdir()
    none = gpunode("labels", "--vendor", "amd", "--root", str(empty))
    assert (none.code, none.out) == (0, "no labels\n")
    assert "the amdgpu driver is not loaded" in none.err
