"""AMD GPUs from sysfs: amdgpu's PCI devices and partitions, KFD's compute nodes, and the links between them.

Missing or invalid values are skipped; a GPU that can't be read has `error` set and hides no other. Formats:
the kernel's amdkfd (kfd_topology.c), amdgpu (ras, compute partitions) and amdxcp drivers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from gpunode.errors import GpunodeError
from gpunode.gpu.driver_traces import boot_id, module, names_in
from gpunode.gpu.model import Gpu, Inventory, MigDevice, Pair, Reading, Topology
from gpunode.host import Host

# Reader for sysfs of AMD's drivers: missing, unreadable or invalid values read as empty.

DRIVER = "/sys/module/amdgpu/drivers/pci:amdgpu"
KFD = "/sys/class/kfd/kfd/topology"
PLATFORM = "/sys/devices/platform"
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_NUMBER = re.compile(r"-?[0-9]{1,20}")
_IDS = ("/usr/share/libdrm/amdgpu.ids", "/opt/amdgpu/share/libdrm/amdgpu.ids")
Place = tuple[int, int, int]
"""Domain, bus and device of a PCI address."""


def parse_properties(text: str) -> dict[str, int]:
    """KFD's ``name number`` lines; other lines are skipped. Pure."""
    properties = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        number = number_of(value)
        if name and number is not None:
            properties[name] = number
    return properties


def product_name(host: Host, at: str) -> str:
    """The board's own, else from libdrm's list, else the device id."""
    name = text_of(host, f"{at}/product_name")
    if name:
        return name
    device, revision = (
        text_of(host, f"{at}/{name}").removeprefix("0x").lower() for name in ("device", "revision")
    )
    ids = parse_ids("\n".join(text_of(host, path) for path in _IDS))
    return ids.get((device, revision)) or f"AMD GPU {device or 'of unknown model'}"


def parse_ids(text: str) -> dict[tuple[str, str], str]:
    """libdrm's amdgpu.ids: device id, revision, name. Pure."""
    rows = (line.split(",", 2) for line in text.splitlines() if not line.startswith("#"))
    return {(row[0].strip().lower(), row[1].strip().lower()): row[2].strip() for row in rows if len(row) == 3}


def addresses(host: Host) -> tuple[str, ...]:
    return tuple(matching(host, DRIVER, _ADDRESS))


def matching(host: Host, directory: str, pattern: re.Pattern[str]) -> Iterator[str]:
    return (name for name in listed(host, directory) if pattern.fullmatch(name))


def listed(host: Host, directory: str) -> tuple[str, ...]:
    """Names, none if the directory can't be read; numbers in their order."""
    names = names_in(host, directory)
    return tuple(sorted(names, key=lambda name: (int(name) if name.isdecimal() else -1, name)))


def text_of(host: Host, path: str) -> str:
    """A file's text, empty if it is missing or can't be read now, which is common in sysfs."""
    return host.text_or_empty(path).strip()


def number_of(text: str) -> int | None:
    return int(text) if _NUMBER.fullmatch(text) else None


def place_of(address: str) -> Place:
    domain, bus, rest = address.split(":")
    return int(domain, 16), int(bus, 16), int(rest.partition(".")[0], 16)


# KFD, the compute side of amdgpu: its nodes, and their links (kfd_topology.c).

_XGMI = 11  # HSA_IOLINK_TYPE_XGMI; 2 is PCI Express
_SAME_NODE, _SYSTEM = 40, 50  # nvmlGpuTopologyLevel_t's values for it


class KfdNode(NamedTuple):
    """One compute node: a GPU or a partition. `links` has the kind of link and its width by node number."""

    number: int
    values: Mapping[str, int]
    memory_bytes: int = 0
    links: Mapping[int, tuple[int, int]] = MappingProxyType({})

    @property
    def place(self) -> Place:
        """Domain, bus and device of the node's GPU."""
        location = self.values.get("location_id", 0)
        return self.values.get("domain", 0), location >> 8 & 0xFF, location >> 3 & 0x1F

    @property
    def partition(self) -> int:
        """The partition's number; a partition uses the three function bits of the PCI address."""
        return self.values.get("location_id", 0) & 7

    @property
    def gfx(self) -> str:
        version = self.values.get("gfx_target_version", 0)
        return f"gfx{version // 10000}{version // 100 % 100}{version % 100:x}" if version else ""


def read_nodes(host: Host) -> dict[int, KfdNode]:
    """The compute nodes of GPUs, by number. Of a GPU's partitions only the first one's links are read: the
    others use the same wires, and 64 partitions have 4000."""
    nodes: dict[int, KfdNode] = {}
    linked: set[Place] = set()
    for name in listed(host, f"{KFD}/nodes"):
        at = f"{KFD}/nodes/{name}"
        values = parse_properties(text_of(host, f"{at}/properties"))
        if name.isdecimal() and values.get("drm_render_minor", 0) > 0 and values.get("simd_count", 0) > 0:
            banks = (
                parse_properties(text_of(host, f"{at}/mem_banks/{bank}/properties"))
                for bank in listed(host, f"{at}/mem_banks")
            )
            memory = sum(bank.get("size_in_bytes", 0) for bank in banks)
            node = KfdNode(int(name), values, memory)
            if node.place not in linked:
                linked.add(node.place)
                node = node._replace(links=_links(host, at))
            nodes[node.number] = node
    return nodes


def _links(host: Host, at: str) -> dict[int, tuple[int, int]]:
    links: dict[int, tuple[int, int]] = {}
    for kind in ("p2p_links", "io_links"):  # a direct link is preferred to a route through the processor
        for name in listed(host, f"{at}/{kind}"):
            values = parse_properties(text_of(host, f"{at}/{kind}/{name}/properties"))
            if "node_to" in values and "type" in values:
                single = values.get("min_bandwidth", 0)
                width = values.get("max_bandwidth", 0) // single if single > 0 else 1
                links[values["node_to"]] = (values["type"], min(max(width, 1), 64))
    return links


def read_topology(inventory: Inventory, nodes: Mapping[int, KfdNode]) -> Topology:
    """XGMI links count like NVLinks; two GPUs without a link record have the greatest distance. Pure."""
    by_place: dict[Place, list[KfdNode]] = {}
    for node in nodes.values():
        by_place.setdefault(node.place, []).append(node)
    known = [(gpu, by_place.get(place_of(gpu.pci), [])) for gpu in inventory.gpus if not gpu.error]
    pairs = []
    for at, (gpu, gpu_nodes) in enumerate(known):
        for other, other_nodes in known[at + 1 :]:
            links = _between(gpu_nodes, other_nodes), _between(other_nodes, gpu_nodes)
            near = gpu.numa is not None and gpu.numa == other.numa
            level = (_SAME_NODE if near else _SYSTEM) if all(links) else None
            xgmi = min((link[1] if link and link[0] == _XGMI else 0) for link in links)
            low, high = sorted((gpu.uuid, other.uuid))
            pairs.append(Pair(low, high, level, xgmi))
    return Topology(tuple(pairs))


def _between(nodes: list[KfdNode], other_nodes: list[KfdNode]) -> tuple[int, int] | None:
    desired = {node.number for node in other_nodes}
    return next((link for node in nodes for to, link in node.links.items() if to in desired), None)


MODULE = "/sys/module/amdgpu"
RECOVERY = f"{MODULE}/parameters/gpu_recovery"
"""Unless it is 0 the driver resets a GPU by itself after an uncorrectable error, and retires the page."""
VERSION = f"{MODULE}/version"  # the out-of-tree driver's; the kernel's own has none
NO_KFD = "KFD, the compute side of the driver, does not know this GPU"
_PARTITION = re.compile(r"amdgpu_xcp[._]([0-9]{1,3})")  # older kernels have the dot
_NODE = re.compile(r"(card|renderD)([0-9]{1,4})")


@dataclass(frozen=True)
class AmdPartition(MigDevice):
    """One compute partition of a GPU; `uuid` is its device's name in sysfs, of the first one the GPU's
    own."""

    paths: tuple[str, ...] = ()


@dataclass(frozen=True)
class AmdGpu(Gpu):
    """`uuid` and `pci` are the PCI address, `compute_capability` is ``gfx942``. `partition_type` is
    ``cpx_nps4``, empty where the GPU can't be divided; `mig` holds the partitions if there are several.
    `paths` are the device nodes of the whole GPU."""

    partition_type: str = ""
    paths: tuple[str, ...] = ()


def missing(host: Host) -> str:
    """The missing parts of the driver; empty if none is missing."""
    if not host.is_dir(DRIVER):
        return f"the amdgpu driver is not loaded: {DRIVER} is not there"
    if not host.is_dir(KFD):
        return f"the amdgpu driver has no compute side: {KFD} is not there"
    return ""


def trace(host: Host) -> tuple[object, ...]:
    """A value that changes when GPUs are added, removed or partitioned again. Cheap, because it is polled."""
    gpus = addresses(host)
    modes = tuple(text_of(host, f"{DRIVER}/{name}/current_compute_partition") for name in gpus)
    partitions = tuple(matching(host, PLATFORM, _PARTITION)) if any(modes) else ()
    nodes = tuple(listed(host, f"{KFD}/nodes"))
    return gpus, modes, partitions, nodes, text_of(host, f"{KFD}/generation_id"), generation(host)


def generation(host: Host) -> str:
    """A text that changes with a reboot or a reload of the driver."""
    return f"{boot_id(host)}/{module(host, MODULE)}"


def read_inventory(host: Host, nodes: Mapping[int, KfdNode] | None = None) -> Inventory:
    """Every GPU that amdgpu drives, by PCI address; `nodes` is the result of `read_nodes` if already read."""
    by_minor = {node.values["drm_render_minor"]: node for node in (nodes or read_nodes(host)).values()}
    partitions = _partitions(host, by_minor)
    gpus = []
    for index, address in enumerate(addresses(host)):
        try:
            gpus.append(_gpu(host, index, address, by_minor, partitions))
        except GpunodeError as error:
            gpus.append(AmdGpu(index, address, "", address, error=error.message))
    return Inventory(text_of(host, VERSION), "", tuple(gpus))


def _gpu(
    host: Host,
    index: int,
    address: str,
    by_minor: Mapping[int, KfdNode],
    partitions: Mapping[Place, list[AmdPartition]],
) -> AmdGpu:
    at = f"{DRIVER}/{address}"
    host.listdir(at)  # `Unreadable` for a directory without permission, where files would only seem absent
    paths, minor = _device_nodes(host, at)
    node = by_minor.get(minor) if minor is not None else None
    numa = number_of(text_of(host, f"{at}/numa_node"))
    modes = [text_of(host, f"{at}/current_{kind}_partition").lower() for kind in ("compute", "memory")]
    kind = "_".join(modes) if all(re.fullmatch(r"[a-z0-9]{1,8}", mode) for mode in modes) else ""
    memory = number_of(text_of(host, f"{at}/mem_info_vram_total")) or (node.memory_bytes if node else 0)
    others = partitions.get(place_of(address), [])
    own_partitions: list[AmdPartition] = []
    if node and others:
        first = AmdPartition(0, address, kind, node.partition, 0, node.memory_bytes, paths=paths)
        own_partitions = [first, *sorted(others, key=lambda partition: (partition.gi, partition.index))]
    return AmdGpu(
        index,
        address,
        product_name(host, at),
        address,
        minor=minor,
        memory_bytes=max(memory, 0),
        compute_capability=node.gfx if node else "",
        numa=numa if numa is not None and numa >= 0 else None,
        mig=tuple(replace(part, index=at, profile=kind) for at, part in enumerate(own_partitions)),
        error="" if node else NO_KFD,
        partition_type=kind,
        paths=paths,
    )


def _partitions(host: Host, by_minor: Mapping[int, KfdNode]) -> dict[Place, list[AmdPartition]]:
    """The partitions after the first, by their GPU's index. Devices that KFD doesn't know are unused ones."""
    partitions: dict[Place, list[AmdPartition]] = {}
    for name in matching(host, PLATFORM, _PARTITION):
        try:
            paths, minor = _device_nodes(host, f"{PLATFORM}/{name}")
        except GpunodeError:
            continue  # unused or unreadable; the GPU itself is listed anyway
        node = by_minor.get(minor) if minor is not None else None
        if node is not None:
            number = int(re.sub(r"\D", "", name))
            partition = AmdPartition(number, name, "", node.partition, 0, node.memory_bytes, paths=paths)
            partitions.setdefault(node.place, []).append(partition)
    return partitions


def _device_nodes(host: Host, at: str) -> tuple[tuple[str, ...], int | None]:
    """The device nodes of a DRM device, and its render minor."""
    nodes = [match for name in host.listdir(f"{at}/drm") if (match := _NODE.fullmatch(name))]
    minor = next((int(match[2]) for match in nodes if match[1] == "renderD"), None)
    return tuple(f"/dev/dri/{match[0]}" for match in nodes), minor


# --- health --------------------------------------------------------------------------------------------


def read_condition(host: Host, gpu: Gpu) -> Reading:
    """Errors since the driver was loaded, and the present use. A GPU that sleeps is not woken."""
    at = f"{DRIVER}/{gpu.pci}"
    try:
        host.listdir(at)
        if gpu.error or text_of(host, f"{at}/power/runtime_status") == "suspended":
            return Reading(gpu.uuid, error=gpu.error)
        counts = [
            count
            for name in listed(host, f"{at}/ras")
            if name.endswith("_err_count")
            and (count := uncorrectable(text_of(host, f"{at}/ras/{name}"))) is not None
        ]
    except GpunodeError as error:
        return Reading(gpu.uuid, error=error.message)
    return Reading(
        gpu.uuid,
        ecc_volatile=sum(counts) if counts else None,
        recovery_action="none" if counts and text_of(host, RECOVERY) not in ("", "0") else None,
        busy_percent=number_of(text_of(host, f"{at}/gpu_busy_percent")),
        memory_used_bytes=number_of(text_of(host, f"{at}/mem_info_vram_used")),
        generation=generation(host),
    )


def uncorrectable(text: str) -> int | None:
    """The ``ue: 0`` line of a RAS counter; None while the driver doesn't report it. Pure."""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "ue":
            return number_of(value.strip())
    return None
