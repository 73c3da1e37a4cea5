"""The nouns: a GPU, a MIG device, the inventory. The same from NVML, a recording or a simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MigDevice:
    """One MIG compute instance. `index` is the slot on its GPU; `gi` and `ci` are NVML's instance ids."""

    index: int
    uuid: str
    profile: str
    gi: int
    ci: int
    memory_bytes: int


@dataclass(frozen=True)
class Gpu:
    """One physical GPU as NVML tells it.

    `pci` is ``0000:3b:00.0`` in lower case, as sysfs spells it; `minor` is N of /dev/nvidiaN, which need not
    equal `index`; `numa` is None if the platform doesn't say. A GPU that NVML lists but can't describe has
    `error` set and holds only what could be read: it never hides the others.
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


@dataclass(frozen=True)
class Inventory:
    """All GPUs of a node. `cuda_version` is the newest CUDA the driver supports, such as ``12.8``."""

    driver_version: str
    cuda_version: str = ""
    gpus: tuple[Gpu, ...] = ()
    simulated: bool = False


def inventory_from_json(data: Mapping[str, Any]) -> Inventory:
    """Read back what `result.plain` made of an `Inventory`. KeyError or TypeError if it is none."""
    return Inventory(
        driver_version=data["driverVersion"],
        cuda_version=data.get("cudaVersion", ""),
        gpus=tuple(_gpu(item) for item in data.get("gpus", ())),
        simulated=data.get("simulated", False),
    )


def _gpu(data: Mapping[str, Any]) -> Gpu:
    return Gpu(
        index=data["index"],
        uuid=data["uuid"],
        name=data["name"],
        pci=data["pci"],
        minor=data.get("minor"),
        memory_bytes=data.get("memoryBytes", 0),
        compute_capability=data.get("computeCapability", ""),
        numa=data.get("numa"),
        mig_enabled=data.get("migEnabled", False),
        mig=tuple(_mig(item) for item in data.get("mig", ())),
        error=data.get("error", ""),
    )


def _mig(data: Mapping[str, Any]) -> MigDevice:
    return MigDevice(
        index=data["index"],
        uuid=data["uuid"],
        profile=data["profile"],
        gi=data["gi"],
        ci=data["ci"],
        memory_bytes=data.get("memoryBytes", 0),
    )
