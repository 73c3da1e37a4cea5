"""AMD GPUs from sysfs: amdgpu's PCI devices and partitions, KFD's compute nodes, and the links between them.

What isn't there or makes no sense is passed over; a GPU that can't be read has `error` set and hides no
other. Formats: the kernel's amdkfd (kfd_topology.c), amdgpu (ras, compute partitions) and amdxcp drivers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from gpunode.dataclass import dataclass
from gpunode.errors import GpunodeError
from gpunode.gpu.amd_kfd import KfdNode, read_nodes
from gpunode.gpu.amd_sysfs import (
    DRIVER,
    KFD,
    PLATFORM,
    Place,
    ProductNames,
    addresses,
    listed,
    matching,
    number_of,
    place_of,
    text_of,
)
from gpunode.gpu.model import Gpu, Inventory, MigDevice, Reading
from gpunode.host import Host

MODULE = "/sys/module/amdgpu"
BOOT_ID = "/proc/sys/kernel/random/boot_id"
RECOVERY = f"{MODULE}/parameters/gpu_recovery"
"""Unless it is 0 the driver resets a GPU by itself after an uncorrectable error, and retires the page."""
VERSION = f"{MODULE}/version"  # the out-of-tree driver's; the kernel's own has none
NO_KFD = "KFD, the compute side of the driver, does not know this GPU"
_PARTITION = re.compile(r"amdgpu_xcp[._]([0-9]{1,3})")  # older kernels have the dot
_NODE = re.compile(r"(card|renderD)([0-9]{1,4})")


@dataclass(frozen=True)
class AmdPartition(MigDevice):
    """One compute partition of a GPU; `uuid` is its device's name in sysfs, of the first the GPU's own."""

    paths: tuple[str, ...] = ()


@dataclass(frozen=True)
class AmdGpu(Gpu):
    """`uuid` and `pci` are the PCI address, `compute_capability` is ``gfx942``. `partition_type` is
    ``cpx_nps4``, empty where the GPU can't be divided; `mig` holds the partitions if there are several.
    `paths` are the device nodes of the whole GPU."""

    partition_type: str = ""
    paths: tuple[str, ...] = ()


def missing(host: Host) -> str:
    """What of the driver isn't there; empty if all of it is."""
    if not host.is_dir(DRIVER):
        return f"the amdgpu driver is not loaded: {DRIVER} is not there"
    if not host.is_dir(KFD):
        return f"the amdgpu driver has no compute side: {KFD} is not there"
    return ""


def trace(host: Host) -> tuple[object, ...]:
    """Something that changes when GPUs come, go or are divided anew. Cheap: it is asked again and again."""
    found = addresses(host)
    modes = tuple(text_of(host, f"{DRIVER}/{name}/current_compute_partition") for name in found)
    partitions = tuple(matching(host, PLATFORM, _PARTITION)) if any(modes) else ()
    nodes = tuple(listed(host, f"{KFD}/nodes"))
    return found, modes, partitions, nodes, text_of(host, f"{KFD}/generation_id"), generation(host)


def generation(host: Host) -> str:
    """Another text after a reboot or a reload of the driver: sysfs counts its inodes."""
    try:
        seen = host.stat(MODULE)
    except GpunodeError:
        seen = None
    return f"{text_of(host, BOOT_ID)}/{seen.st_ino if seen else 0}"


def read_inventory(host: Host, nodes: Mapping[int, KfdNode] | None = None) -> Inventory:
    """Every GPU that amdgpu drives, by PCI address; `nodes` are `read_nodes`' if they are at hand."""
    by_minor = {node.values["drm_render_minor"]: node for node in (nodes or read_nodes(host)).values()}
    partitions = _partitions(host, by_minor)
    names = ProductNames(host)
    gpus = []
    for index, address in enumerate(addresses(host)):
        try:
            gpus.append(_gpu(host, index, address, by_minor, partitions, names))
        except GpunodeError as error:
            gpus.append(AmdGpu(index, address, "", address, error=error.message))
    return Inventory(text_of(host, VERSION), "", tuple(gpus))


def _gpu(
    host: Host,
    index: int,
    address: str,
    by_minor: Mapping[int, KfdNode],
    partitions: Mapping[Place, list[AmdPartition]],
    names: ProductNames,
) -> AmdGpu:
    at = f"{DRIVER}/{address}"
    host.listdir(at)  # `Unreadable` for a directory that is closed, where files merely seem absent
    paths, minor = _device_nodes(host, at)
    node = by_minor.get(minor) if minor is not None else None
    numa = number_of(text_of(host, f"{at}/numa_node"))
    modes = [text_of(host, f"{at}/current_{kind}_partition").lower() for kind in ("compute", "memory")]
    kind = "_".join(modes) if all(re.fullmatch(r"[a-z0-9]{1,8}", mode) for mode in modes) else ""
    memory = number_of(text_of(host, f"{at}/mem_info_vram_total")) or (node.memory_bytes if node else 0)
    others = partitions.get(place_of(address), [])
    mine: tuple[AmdPartition, ...] = ()
    if node and others:
        first = AmdPartition(0, address, kind, node.partition, 0, node.memory_bytes, paths=paths)
        mine = (
            first,
            *(
                AmdPartition(n, p.uuid, kind, p.gi, 0, p.memory_bytes, paths=p.paths)
                for n, p in _count(others)
            ),
        )
    return AmdGpu(
        index,
        address,
        names.of(at),
        address,
        minor=minor,
        memory_bytes=max(memory, 0),
        compute_capability=node.gfx if node else "",
        numa=numa if numa is not None and numa >= 0 else None,
        mig=mine,
        error="" if node else NO_KFD,
        partition_type=kind,
        paths=paths,
    )


def _count(partitions: list[AmdPartition]) -> Iterator[tuple[int, AmdPartition]]:
    return enumerate(sorted(partitions, key=lambda one: (one.gi, one.index)), 1)


def _partitions(host: Host, by_minor: Mapping[int, KfdNode]) -> dict[Place, list[AmdPartition]]:
    """The partitions beside the first, by their GPU's place. Devices that KFD doesn't know are spare ones."""
    found: dict[Place, list[AmdPartition]] = {}
    for name in matching(host, PLATFORM, _PARTITION):
        try:
            paths, minor = _device_nodes(host, f"{PLATFORM}/{name}")
        except GpunodeError:
            continue  # spare ones can't be told from closed ones; the GPU itself is listed anyway
        node = by_minor.get(minor) if minor is not None else None
        if node is not None:
            number = int(re.sub(r"\D", "", name))
            one = AmdPartition(number, name, "", node.partition, 0, node.memory_bytes, paths=paths)
            found.setdefault(node.place, []).append(one)
    return found


def _device_nodes(host: Host, at: str) -> tuple[tuple[str, ...], int | None]:
    """The device nodes of a DRM device, and its render minor."""
    found = [match for name in host.listdir(f"{at}/drm") if (match := _NODE.fullmatch(name))]
    minor = next((int(match[2]) for match in found if match[1] == "renderD"), None)
    return tuple(f"/dev/dri/{match[0]}" for match in found), minor


# --- condition ------------------------------------------------------------------------------------------


def read_condition(host: Host, gpu: Gpu) -> Reading:
    """Errors since the driver was loaded, and the present use. A GPU that sleeps is left asleep."""
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
    """The ``ue: 0`` line of a RAS counter; None while the driver can't tell. Pure."""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "ue":
            return number_of(value.strip())
    return None
