"""What NVML says of one GPU's condition, settings and use; all that the doctor judges GPUs by.

Every item is None where this GPU, its driver or this user's rights don't tell. The words are nvml.h's own,
spelled with hyphens. condition_reader.py asks NVML, a recording holds the same under ``nvml.conditions``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from gpunode.dataclass import dataclass, field, fields
from gpunode.gpu.model import Gpu, Inventory, Reading
from gpunode.result import camel

COMPUTE_MODES = ("default", "exclusive-thread", "prohibited", "exclusive-process")
"""NVML_COMPUTEMODE_* from 0 on."""

VIRTUALIZATION = ("none", "passthrough", "vgpu", "host-vgpu", "host-vsga")
"""NVML_GPU_VIRTUALIZATION_MODE_* from 0 on; vgpu is a virtual GPU as its guest sees it."""

ADDRESSING = ("none", "hmm", "ats")
"""NVML_DEVICE_ADDRESSING_MODE_* from 0 on: how GPU and host share memory addresses."""

SLOWDOWNS = {0x8: "hw-slowdown", 0x20: "sw-thermal", 0x40: "hw-thermal", 0x80: "hw-power-brake"}
"""Bits of nvmlClocksEventReasons that say that something holds a GPU back. Idle clocks, chosen clocks, the
power cap and the like are no such reason."""


@dataclass(frozen=True)
class GpuProcess:
    """A process on a GPU: as this process namespace numbers it, 0 if it is in none of ours."""

    pid: int
    graphics: bool = False
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Fabric:
    """The NVLink fabric (nvmlGpuFabricInfoV_t). `state` is one of `readings.FABRIC_STATES`, `status` NVML's
    return code of the training, `cluster` the cluster's UUID without hyphens (zeros for none), `health` the
    mask NVML_GPU_FABRIC_HEALTH_MASK_*: two bits each, 1 is true (degraded bandwidth, route recovery,
    unhealthy route, access timeout recovery from bit 0 on), then four bits of an incorrect configuration."""

    state: str | None = None
    status: int | None = None
    cluster: str | None = None
    clique: int | None = None
    health: int | None = None


@dataclass(frozen=True)
class Licence:
    """Licensing of a virtual GPU: `supported` says that it needs one, `licensed` that one of its features has
    a licence."""

    supported: bool | None = None
    licensed: bool | None = None
    products: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Condition:
    """One GPU. `index`, `uuid` and `pci` are those of the inventory's `Gpu`.

    `error` is NVML's answer where the GPU can't be asked, `error_code` its return code. Temperatures are in
    degrees Celsius, power in milliwatts, memory in bytes. `remapped` and `retired` count memory rows and
    pages that were taken out of use for uncorrectable errors, `retired_pages` those of either cause.
    `ecc_mode`, `mig_mode`: on or off now, with `_next` after the next reset. `slowdowns` are `SLOWDOWNS` that
    held in two samples. `nvlinks` are the states of links 0, 1, ... `addressing` is one of `ADDRESSING`.
    `cc_enabled` and `cc_ready` are the whole node's: confidential computing, and whether its GPUs take work.
    """

    index: int = 0
    uuid: str = ""
    pci: str = ""
    error: str = ""
    error_code: int | None = None
    reading: Reading = field(default_factory=lambda: Reading(""))
    sram_threshold_exceeded: bool | None = None
    remapped: int | None = None
    retired: int | None = None
    retired_pages: int | None = None
    channel_repair_pending: bool | None = None
    tpc_repair_pending: bool | None = None
    inforom_valid: bool | None = None
    persistence: bool | None = None
    compute_mode: str | None = None
    ecc_mode: bool | None = None
    ecc_mode_next: bool | None = None
    mig_mode: bool | None = None
    mig_mode_next: bool | None = None
    virtualization: str | None = None
    gsp_enabled: bool | None = None
    gsp_default: bool | None = None
    gsp_version: str | None = None
    addressing: str | None = None
    slowdowns: tuple[str, ...] | None = None
    temperature: int | None = None
    temperature_slowdown: int | None = None
    power_limit: int | None = None
    power_limit_default: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_replays: int | None = None
    nvlinks: tuple[bool, ...] | None = None
    fabric: Fabric = field(default_factory=Fabric)
    memory_total: int | None = None
    memory_used: int | None = None
    memory_reserved: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    display_active: bool | None = None
    licence: Licence = field(default_factory=Licence)
    cc_enabled: bool | None = None
    cc_ready: bool | None = None


def conditions_from_json(data: Any, inventory: Inventory) -> tuple[Condition, ...]:
    """Read back an object of conditions by index ("0"), () for None. The names of a GPU are those of the
    inventory. An item of a wrong type counts as untold; TypeError, AttributeError or ValueError if there are
    no objects."""
    known = {gpu.index: gpu for gpu in inventory.gpus}
    return tuple(
        _condition(item, known.get(int(key)) or Gpu(int(key), "", "", ""))
        for key, item in sorted(({} if data is None else data).items(), key=lambda pair: int(pair[0]))
    )


def _condition(item: Mapping[str, Any], gpu: Gpu) -> Condition:
    told = {**_told(Condition, item), "index": gpu.index, "uuid": gpu.uuid, "pci": gpu.pci}
    processes = item.get("processes")
    if isinstance(processes, list) and all(isinstance(one, dict) for one in processes):
        told["processes"] = tuple(GpuProcess(**{"pid": 0} | _told(GpuProcess, one)) for one in processes)
    return Condition(
        **told,
        reading=Reading(**{**_told(Reading, item.get("reading", {})), "uuid": gpu.uuid}),
        fabric=Fabric(**_told(Fabric, item.get("fabric", {}))),
        licence=Licence(**_told(Licence, item.get("licence", {}))),
    )


_TYPES = {"int": int, "str": str, "bool": bool}  # by a field's annotation, without "| None"
_TUPLES = {"tuple[str, ...]": str, "tuple[bool, ...]": bool}


def _told(kind: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """The plain fields of a dataclass that `data`, with names in camelCase, has with their right type."""
    found: dict[str, Any] = {}
    known = _plain_fields(kind)
    for key, value in data.items():
        name, expected, inner = known.get(key, ("", None, None))
        if type(value) is expected:
            found[name] = value
        elif inner is not None and isinstance(value, list) and all(type(item) is inner for item in value):
            found[name] = tuple(value)
    return found


@cache
def _plain_fields(kind: Any) -> Mapping[str, tuple[str, type | None, type | None]]:
    """By name in camelCase: the field's own name, its type, and that of a tuple's items; None if neither."""
    found = {}
    for one in fields(kind):
        annotation = str(one.type).removesuffix(" | None")
        found[camel(one.name)] = (one.name, _TYPES.get(annotation), _TUPLES.get(annotation))
    return found
