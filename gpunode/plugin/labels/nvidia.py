"""The labels of a node with NVIDIA GPUs, by GPU feature discovery's formulas (0.20). Pure.

Where that is of two minds, or leaves it to chance, this isn't: on a node with several models the one that
most GPUs have is told, of two such the first GPU's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from gpunode.gpu.model import Gpu, Inventory
from gpunode.plugin.labels import nvidia_resources as resources
from gpunode.plugin.labels.model import TIMESTAMP, Labels, Machine, made, sanitised
from gpunode.plugin.model import Plan
from gpunode.plugin.settings import Settings

_GRAPHICS, _COMPUTE = 0x030000, 0x030200  # PCI classes: VGA controller, 3D controller


def nvidia_labels(
    settings: Settings, inventory: Inventory | None, plan: Plan, machine: Machine, now: float
) -> Labels:
    """Every label. Without a GPU, or an inventory, only the time and what concerns vGPUs.

    `plan` is what `nvidia.resources.plan` makes of the same inventory and settings; `now` is in seconds since
    the epoch.
    """
    values = {} if settings.labels.no_timestamp else {TIMESTAMP: str(int(now))}
    warnings: list[str] = []
    gpus = resources.counted(settings, inventory.gpus) if inventory else ()
    if inventory:
        warnings += resources.unknown_words(settings, inventory.gpus)
    if inventory and gpus:
        values["nvidia.com/gpu.machine"] = sanitised(machine.product) or "unknown"
        values |= _versions(inventory)
        values |= _capabilities(settings, gpus)
        values |= resources.resource_labels(settings, plan, gpus, warnings)
        values["nvidia.com/gpu.mode"] = _mode(inventory, gpus, machine)
        values |= _clique(gpus)
        warnings += [f"GPU {gpu.index} isn't counted: {gpu.error}" for gpu in gpus if gpu.error]
    else:
        warnings.append("no GPU was found on this node")
    values |= _vgpu(machine)
    return made(values, warnings)


def _versions(inventory: Inventory) -> Iterator[tuple[str, str]]:
    """Driver and CUDA, under their keys of now and those of before, which many selectors still have."""
    driver = inventory.driver_version
    major, _, rest = driver.partition(".")
    minor, _, revision = rest.partition(".")
    yield from _keyed(
        "driver-version", (("major", major), ("minor", minor), ("revision", revision), ("full", driver))
    )
    yield from _keyed("driver", (("major", major), ("minor", minor), ("rev", revision)))
    cuda = inventory.cuda_version
    if cuda:
        major, _, minor = cuda.partition(".")
        yield from _keyed("runtime-version", (("major", major), ("minor", minor), ("full", cuda)))
        yield from _keyed("runtime", (("major", major), ("minor", minor)))


def _keyed(what: str, parts: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    return ((f"nvidia.com/cuda.{what}.{name}", value) for name, value in parts)


def _capabilities(settings: Settings, gpus: Sequence[Gpu]) -> dict[str, str]:
    mps = settings.sharing is not None and settings.sharing.strategy == "mps"
    found = {
        "nvidia.com/mig.capable": _word(any(gpu.mig_capable for gpu in gpus)),
        "nvidia.com/mps.capable": _word(mps and not any(gpu.mig_enabled for gpu in gpus)),
    }
    if settings.mig_strategy != "none":
        found["nvidia.com/mig.strategy"] = settings.mig_strategy
    return found


def _word(true: bool) -> str:
    return "true" if true else "false"


def _mode(inventory: Inventory, gpus: Sequence[Gpu], machine: Machine) -> str:
    """What the GPUs are made for, by their PCI class: `graphics` can drive a screen."""
    gpus = [gpu for gpu in gpus if not gpu.error] or gpus
    if inventory.simulated:  # they are on no bus; cards for a screen go by this name
        kinds = {_GRAPHICS if "GeForce" in gpu.name else _COMPUTE for gpu in gpus}
    else:
        kinds = {machine.classes.get(gpu.pci, 0) for gpu in gpus}
    return "graphics" if kinds == {_GRAPHICS} else "compute" if kinds == {_COMPUTE} else "unknown"


def _clique(gpus: Sequence[Gpu]) -> Mapping[str, str]:
    """The NVLink partition, if all GPUs that are in one are in the same."""
    found = Counter(gpu.clique for gpu in gpus if gpu.clique)
    return {"nvidia.com/gpu.clique": next(iter(found))} if len(found) == 1 else {}


def _vgpu(machine: Machine) -> dict[str, str]:
    if machine.vgpu is None:
        return {}
    found = {"nvidia.com/vgpu.present": _word(machine.vgpu)}
    if machine.vgpu:
        told = zip(("version", "branch"), machine.host_driver, strict=True)
        found |= {f"nvidia.com/vgpu.host-driver-{name}": text for name, text in told}
    return found
