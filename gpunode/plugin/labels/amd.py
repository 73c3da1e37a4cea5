"""The labels of a node with AMD GPUs, as AMD's node labeller sets them. Pure.

One value for all GPUs is ``amd.com/gpu.KIND=VALUE``, several are ``amd.com/gpu.KIND.VALUE=COUNT``; both forms
are under beta.amd.com as well, except for the driver's own values. Firmware is only under beta.amd.com.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpunode.gpu.amd import (
    DRIVER,
    AmdGpu,
    KfdNode,
    listed,
    missing,
    place_of,
    read_inventory,
    read_nodes,
    text_of,
)
from gpunode.host import Host
from gpunode.plugin.labels.model import Labels, boolean, label_value, valid_labels

_DOMAIN, _BETA = "amd.com/gpu", "beta.amd.com/gpu"
_OF_THE_DRIVER = (
    *("driver-version", "driver-src-version"),
    *("compute-memory-partition", "compute-partitioning-supported", "memory-partitioning-supported"),
)
_FAMILIES = {
    **{6: "SI", 7: "CI", 8: "VI", 9: "AI", 12: "GC_12_0_0"},
    **{801: "CZ", 810: "CZ", 902: "RV", 909: "RV", 0x90C: "RV"},
}
_GFX = re.compile(r"gfx(\d{1,2})(\d)([0-9a-f])")


@dataclass(frozen=True)
class Card:
    """One GPU. `partition` is ``spx_nps1``, empty where it can't be divided. `firmware` has the versions of
    features and code of each part. Empty texts and zeros are unknown."""

    gfx: str = ""
    device_id: str = ""
    product: str = ""
    memory_bytes: int = 0
    simds: int = 0
    units: int = 0
    partition: str = ""
    firmware: Mapping[str, tuple[int, int]] = field(default_factory=dict)


class Driver(NamedTuple):
    """Values of the first GPU that reports them: the driver's version and that of its source, empty for the
    kernel's own, and whether the GPU's compute units and its memory can be divided."""

    version: str = ""
    source: str = ""
    compute_partitions: bool = False
    memory_partitions: bool = False


def amd_labels(cards: Sequence[Card], driver: Driver, firmware: bool) -> Labels:
    """Every label; none without a GPU."""
    values: dict[str, str] = {}
    if cards:
        for kind, labels in _kinds(cards, driver):
            values |= _labels(kind, Counter(_word(label) for label in labels if label))
        values |= _firmware(cards) if firmware else {}
    return valid_labels(values)


def _kinds(cards: Sequence[Card], driver: Driver) -> Iterator[tuple[str, list[str]]]:
    """Each GPU's value, by kind of label."""
    yield "family", [family(card.gfx) for card in cards]
    yield "driver-version", [driver.version] * len(cards)
    yield "driver-src-version", [driver.source] * len(cards)
    yield "device-id", [card.device_id for card in cards]
    yield "product-name", [card.product for card in cards]
    yield "vram", [_gigabytes(card.memory_bytes) if card.memory_bytes else "" for card in cards]
    yield "simd-count", [str(card.simds or "") for card in cards]
    yield "cu-count", [str(card.units or "") for card in cards]
    partitions = [card.partition for card in cards if card.partition]
    if len(set(partitions)) == 1:
        yield "compute-memory-partition", partitions
    yield "compute-partitioning-supported", [boolean(driver.compute_partitions)] * len(cards)
    yield "memory-partitioning-supported", [boolean(driver.memory_partitions)] * len(cards)


def _gigabytes(size: int) -> str:
    """Rounded, a half upwards: an APU's 512 MiB are 1G."""
    return f"{((size >> 20) + 512) // 1024}G"


def _word(text: str) -> str:
    """The name in the node labeller's form: blanks become underscores, brackets are removed."""
    return label_value(re.sub(r"[()\[\]]", "", text).strip().replace(" ", "_"))


def _labels(kind: str, counts: Counter[str]) -> Iterator[tuple[str, str]]:
    for value, count in counts.items():
        if len(counts) > 1:
            yield f"{_DOMAIN}.{kind}.{value}", str(count)
        else:
            yield f"{_DOMAIN}.{kind}", value
        if kind in _OF_THE_DRIVER:
            continue
        yield f"{_BETA}.{kind}.{value}", str(count)
        if len(counts) == 1:
            yield f"{_BETA}.{kind}", value


def _firmware(cards: Sequence[Card]) -> dict[str, str]:
    counts = Counter(
        f"{_BETA}.firmware.{name}.{what}.{version}"
        for card in cards
        for name, versions in card.firmware.items()
        for what, version in zip(("feat", "fw"), versions, strict=True)
    )
    return {key: str(count) for key, count in counts.items()}


def family(gfx: str) -> str:
    """libdrm's word for the family (AMDGPU_FAMILY_* in amdgpu_drm.h) of a GPU such as ``gfx942``; "" if it
    isn't known. The kernel goes by the same version of the graphics core (amdgpu_discovery.c)."""
    match = _GFX.fullmatch(gfx)
    if match is None:
        return ""
    major, minor, step = int(match[1]), int(match[2]), int(match[3], 16)
    if major == 10:
        return {3: "VGH", 5: "YC", 6: "GC_10_3_6", 7: "GC_10_3_7"}.get(step, "NV") if minor == 3 else "NV"
    if major == 11:
        return "GC_11_5_0" if minor == 5 else "GC_11_0_1" if step > 2 else "GC_11_0_0"
    exact = major * 100 + minor * 16 + step if major == 9 else major * 100 + minor * 10 + step
    return _FAMILIES.get(exact) or _FAMILIES.get(major, "")


# Reads the data of AMD's GPUs for labels: sysfs, KFD, and debugfs for the firmware.

_DEBUG = "/sys/kernel/debug/dri"
_FIRMWARE = re.compile(r"(\S+) feature version: (\d+), firmware version: 0x([0-9a-fA-F]+)\s*$", re.MULTILINE)


def read_cards(host: Host, firmware: bool) -> tuple[tuple[Card, ...], Driver, str]:
    """Every readable GPU, the driver, and why there is no driver; empty if there is one."""
    if reason := missing(host):
        return (), Driver(), reason
    nodes = read_nodes(host)
    gpus = [gpu for gpu in read_inventory(host, nodes).gpus if isinstance(gpu, AmdGpu) and not gpu.error]
    cards = tuple(_card(host, gpu, nodes, firmware) for gpu in gpus)
    return cards, _driver(host, gpus), "" if cards else "the amdgpu driver has no GPU"


def _card(host: Host, gpu: AmdGpu, nodes: Mapping[int, KfdNode], firmware: bool) -> Card:
    nodes_of_gpu = [node for node in nodes.values() if node.place == place_of(gpu.pci)]
    simds = sum(node.values.get("simd_count", 0) for node in nodes_of_gpu)
    per_unit = nodes_of_gpu[0].values.get("simd_per_cu", 0) if nodes_of_gpu else 0
    return Card(
        gfx=gpu.compute_capability,
        device_id=text_of(host, f"{DRIVER}/{gpu.pci}/device").removeprefix("0x"),
        product=gpu.name,
        memory_bytes=gpu.memory_bytes,
        simds=simds,
        units=simds // per_unit if per_unit > 0 else 0,
        partition=gpu.partition_type,
        firmware=_amd_cards_firmware(host, gpu) if firmware else {},
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


def _amd_cards_firmware(host: Host, gpu: AmdGpu) -> dict[str, tuple[int, int]]:
    """From debugfs' amdgpu_firmware_info, which only root may read; nothing else reports feature versions."""
    card = next((path for path in gpu.paths if path.startswith("/dev/dri/card")), "")
    minor = card.removeprefix("/dev/dri/card")
    text = text_of(host, f"{_DEBUG}/{minor}/amdgpu_firmware_info") if minor else ""
    matches = _FIRMWARE.findall(text)
    return {name: (int(feature), int(version, 16)) for name, feature, version in matches}
