"""Reads what of AMD's GPUs goes into labels: sysfs, KFD, and debugfs for the firmware."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gpunode.gpu.amd import AmdGpu, missing, read_inventory
from gpunode.gpu.amd_kfd import KfdNode, read_nodes
from gpunode.gpu.amd_sysfs import DRIVER, listed, place_of, text_of
from gpunode.host import Host
from gpunode.plugin.labels.amd import Card, Driver

_DEBUG = "/sys/kernel/debug/dri"
_FIRMWARE = re.compile(r"(\S+) feature version: (\d+), firmware version: 0x([0-9a-fA-F]+)\s*$", re.MULTILINE)


def read_cards(host: Host, firmware: bool) -> tuple[tuple[Card, ...], Driver, str]:
    """Every GPU that can be read, the driver, and why there is none; empty if there is."""
    if reason := missing(host):
        return (), Driver(), reason
    nodes = read_nodes(host)
    gpus = [gpu for gpu in read_inventory(host, nodes).gpus if isinstance(gpu, AmdGpu) and not gpu.error]
    cards = tuple(_card(host, gpu, nodes, firmware) for gpu in gpus)
    return cards, _driver(host, gpus), "" if cards else "the amdgpu driver has no GPU"


def _card(host: Host, gpu: AmdGpu, nodes: Mapping[int, KfdNode], firmware: bool) -> Card:
    mine = [node for node in nodes.values() if node.place == place_of(gpu.pci)]
    simds = sum(node.values.get("simd_count", 0) for node in mine)
    per_unit = mine[0].values.get("simd_per_cu", 0) if mine else 0
    return Card(
        gfx=gpu.compute_capability,
        device_id=text_of(host, f"{DRIVER}/{gpu.pci}/device").removeprefix("0x"),
        product=gpu.name,
        memory_bytes=gpu.memory_bytes,
        simds=simds,
        units=simds // per_unit if per_unit > 0 else 0,
        partition=gpu.partition_type,
        firmware=_firmware(host, gpu) if firmware else {},
    )


def _driver(host: Host, gpus: list[AmdGpu]) -> Driver:
    for gpu in gpus:
        at = f"{DRIVER}/{gpu.pci}"
        version, source = (text_of(host, f"{at}/driver/module/{name}") for name in ("version", "srcversion"))
        if version or source:
            break
    else:
        version, source = (text_of(host, f"/sys/module/amdgpu/{name}") for name in ("version", "srcversion"))
    first = set(listed(host, f"{DRIVER}/{gpus[0].pci}")) if gpus else set()
    return Driver(
        version,
        source,
        "available_compute_partition" in first,
        "available_memory_partition" in first,
    )


def _firmware(host: Host, gpu: AmdGpu) -> dict[str, tuple[int, int]]:
    """By debugfs' amdgpu_firmware_info, which root may read; nothing else tells feature versions."""
    minors = [path.removeprefix("/dev/dri/card") for path in gpu.paths if path.startswith("/dev/dri/card")]
    for minor in minors:
        found = _FIRMWARE.findall(text_of(host, f"{_DEBUG}/{minor}/amdgpu_firmware_info"))
        return {name: (int(feature), int(version, 16)) for name, feature, version in found}
    return {}
