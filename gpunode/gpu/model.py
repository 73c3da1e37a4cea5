"""The types: a GPU, a MIG device, the inventory. The same from NVML, a recording or a simulation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from gpunode.output.typed import from_plain

_UUID = re.compile(r"((?:GPU|MIG)-[0-9a-f]{8})-[0-9a-f-]{27}")


def short_uuid(device: str) -> str:
    """The first group of a UUID, which distinguishes the GPUs of a node; empty for other ids."""
    match = _UUID.fullmatch(device)
    return match[1] if match else ""


class MigSize(NamedTuple):
    """A MIG device's part of its GPU, by nvmlDeviceGetAttributes; None where only the slices are known.

    The engines are those that copy, decode and encode video, decode JPEG, and compute optical flow (OFA).
    """

    gpu_slices: int
    compute_slices: int
    multiprocessors: int | None = None
    copy_engines: int | None = None
    decoders: int | None = None
    encoders: int | None = None
    jpeg: int | None = None
    ofa: int | None = None


@dataclass(frozen=True)
class MigDevice:
    """One MIG compute instance. `index` is the slot on its GPU; `gi` and `ci` are NVML's instance ids. `size`
    is None if it is not recorded, as in older recordings."""

    index: int
    uuid: str
    profile: str
    gi: int
    ci: int
    memory_bytes: int
    size: MigSize | None = None


GPU_IS_LOST = 15
"""NVML_ERROR_GPU_IS_LOST: the GPU fell off the bus or can't be reached."""


@dataclass(frozen=True)
class Gpu:
    """One physical GPU as NVML reports it.

    `pci` is ``0000:3b:00.0`` in lower case, as sysfs spells it; `minor` is N of /dev/nvidiaN, which need not
    equal `index`; `numa` is None if the platform doesn't report it. `mig_capable` is whether it supports MIG.
    `clique` is the NVLink partition that it has joined, ``<cluster uuid>.<clique id>``. A GPU that NVML lists
    but can't describe has `error` set and only the values that could be read: it never hides the others.
    `error_code` is NVML's return code for that error, None if it isn't NVML's.
    """

    index: int
    uuid: str
    name: str
    pci: str
    minor: int | None = None
    memory_bytes: int = 0
    compute_capability: str = ""
    numa: int | None = None
    mig_enabled: bool = False
    mig: tuple[MigDevice, ...] = ()
    error: str = ""
    mig_capable: bool = False
    clique: str = ""
    error_code: int | None = None


class Inventory(NamedTuple):
    """All GPUs of a node. `cuda_version` is the newest CUDA the driver supports, such as ``12.8``."""

    driver_version: str
    cuda_version: str = ""
    gpus: tuple[Gpu, ...] = ()
    simulated: bool = False


def inventory_from_json(data: Any, where: str = "") -> Inventory:
    """Read an `Inventory` back from the output of `plain`. `PlainError`, a ValueError, for anything else."""
    inventory = from_plain(Inventory, data, where=where)
    gpus = tuple(
        replace(gpu, mig_capable=True) if gpu.mig_enabled else gpu  # older recordings have only the mode
        for gpu in inventory.gpus
    )
    return inventory._replace(gpus=gpus)


class Reading(NamedTuple):
    """One GPU's reading of its own health; None for values that it, or its driver, doesn't report.

    `error` is NVML's error if the GPU can't be queried, `error_code` its return code. ECC counts are
    uncorrectable errors: `ecc_volatile` since the last reset, `ecc_aggregate` of its life. `recovery_action`
    is one of `nvml_health.RECOVERY_ACTIONS`. `fabric_state` is not-started, in-progress or completed;
    `fabric_error` is empty for success and for GPUs without a fabric. `busy_percent` and `memory_used_bytes`
    are the present use, `parts_used_bytes` that of MIG devices by UUID, as far as it can be attributed to one
    of them.
    `generation` changes with a reboot, a reload or a replacement of the driver.
    """

    uuid: str
    error: str = ""
    ecc_volatile: int | None = None
    ecc_aggregate: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    retired_pending: bool | None = None
    recovery_action: str | None = None
    fabric_state: str | None = None
    fabric_error: str = ""
    busy_percent: int | None = None
    memory_used_bytes: int | None = None
    generation: str = ""
    parts_used_bytes: Mapping[str, int] = MappingProxyType({})
    error_code: int | None = None


class Pair(NamedTuple):
    """Proximity of two GPUs, by UUID with `first` < `second`.

    `level` is NVML's common ancestor (0 board, 10 switch, 20 switches, 30 host bridge, 40 NUMA node, 50
    system), None if unknown; `nvlinks` counts direct links, of the two directions the smaller
    number.
    """

    first: str
    second: str
    level: int | None = None
    nvlinks: int = 0


class Topology(NamedTuple):
    """The links between the GPUs of a node. `switch_links` has each GPU's active links to NVSwitches, by
    UUID."""

    pairs: tuple[Pair, ...] = ()
    switch_links: Mapping[str, int] = MappingProxyType({})


# Names of MIG profiles, as NVIDIA's tools and resource names spell them: ``1c.3g.20gb+me``.

# by NVML_GPU_INSTANCE_PROFILE_*: media extensions, all of them, graphics, none of them; plain has no suffix
_SUFFIXES = {
    7: "+me",
    8: "+me",
    10: "+gfx",
    11: "+gfx",
    12: "+gfx",
    13: "-me",
    14: "-me",
    15: "+me.all",
    16: "+me.all",
    17: "+gfx",
}


def profile_name(
    gpu_slices: int, compute_slices: int, memory_mib: int, gpu_memory_bytes: int, profile: int | None
) -> str:
    """The profile of a MIG device, from NVML's attributes.

    The memory in the name is not the device's own: it is its share of the GPU in eighths, rounded up,
    multiplied by the GPU's memory in whole GiB, rounded up, and that product rounded to whole GiB with halves
    rounded up. `profile` is the GPU instance's profile number, None without permission to read it.
    """
    share = _divide_up(8 * (memory_mib << 20), gpu_memory_bytes)
    gib = (share * _divide_up(gpu_memory_bytes, 1 << 30) + 4) // 8
    compute = "" if compute_slices == gpu_slices else f"{compute_slices}c."
    suffix = _SUFFIXES.get(profile, "") if profile is not None else ""
    return f"{compute}{gpu_slices}g.{gib}gb{suffix}"


def _divide_up(number: int, by: int) -> int:
    return -(-number // by)
