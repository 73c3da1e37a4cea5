"""The labels of a node with NVIDIA GPUs, by GPU feature discovery's formulas (0.20). Pure.

Where GPU feature discovery is inconsistent or random, this isn't: a node with several models gets the most
frequent one, on a tie the first GPU's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from gpunode.cdi.nodes import NodeFacts
from gpunode.errors import GpunodeError
from gpunode.facts.pci import DEVICES, PciGpu, VirtualGpu, memory_bars, read_gpus, read_vgpus
from gpunode.gpu.child import ChildFailure, answer, start, unusable
from gpunode.gpu.model import Gpu, Inventory, MigDevice, inventory_from_json
from gpunode.host import Host
from gpunode.plugin.config.settings import LabelSettings, Settings
from gpunode.plugin.labels.model import (
    TIMESTAMP,
    UNKNOWN_DRIVER,
    Labels,
    Machine,
    boolean,
    sanitised,
    valid_labels,
)
from gpunode.plugin.model import ResourcePlan, Unit, deselection, ruled_name
from gpunode.plugin.nvidia.platform import ONE_DEVICE, TEGRA, platform_of
from gpunode.plugin.nvidia.resources import DISPLAY_ONLY, GPU, MIG, Notes, mig_name, units_of

# The labels of resources, ``nvidia.com/gpu.product`` and the like: of whole GPUs and MIG devices. Pure.

BASE = "nvidia.com/gpu"
_Unit = TypeVar("_Unit")
_FAMILIES = {1: "tesla", 2: "fermi", 3: "kepler", 5: "maxwell", 6: "pascal", 9: "hopper"}
_FAMILIES |= {10: "blackwell", 12: "blackwell", 13: "rubin"}
_SPLIT = {7: (5, "volta", "turing"), 8: (9, "ampere", "ada-lovelace")}
"""Families that share a major number: the minor number from which on it is the second."""


class MigPart(NamedTuple):
    """A MIG device with its GPU."""

    gpu: Gpu
    mig: MigDevice


class Share(NamedTuple):
    """How units are shared: number of devices of each, strategy, and whether under another name."""

    replicas: int
    strategy: str = "none"
    renamed: bool = False


def gpus_to_label(settings: Settings, gpus: Iterable[Gpu]) -> tuple[Gpu, ...]:
    """The GPUs to label: no display card, and none that `include` or `exclude` removes."""
    result = []
    for gpu in gpus:
        units = _units(settings, gpu)
        reasons, _ = deselection(settings, units)
        if gpu.name in DISPLAY_ONLY or (units and all(unit.id in reasons for unit in units)):
            continue
        result.append(replace(gpu, mig=tuple(mig for mig in gpu.mig if mig.uuid not in reasons)))
    return tuple(result)


def unknown_words(settings: Settings, gpus: Iterable[Gpu]) -> list[str]:
    """Warnings for selectors of `include` and `exclude` that match nothing on this node."""
    return deselection(settings, [unit for gpu in gpus for unit in _units(settings, gpu)])[1]


def _units(settings: Settings, gpu: Gpu) -> list[Unit]:
    return [candidate.unit for candidate in units_of(gpu, settings.mig_strategy, NodeFacts({}), Notes())]


def resource_labels(
    settings: Settings, plan: ResourcePlan, gpus: Sequence[Gpu], warnings: list[str]
) -> dict[str, str]:
    """Labels of every resource of these GPUs. A GPU that can't be read isn't counted."""
    sound = [gpu for gpu in gpus if not gpu.error and gpu.name]
    values: dict[str, str] = {}
    if not sound:
        return values
    values |= _whole(settings, plan, BASE, sound, warnings)
    parts = [MigPart(gpu, mig) for gpu in sound for mig in gpu.mig]
    whole_gpus = [gpu for gpu in sound if settings.mig_strategy == "none" or not gpu.mig_enabled]
    for name, gpus_of_name in _by_rule(settings, GPU, [(gpu.name, gpu) for gpu in whole_gpus]).items():
        if name and name != BASE:
            values |= _whole(settings, plan, name, gpus_of_name, warnings)
    if settings.mig_strategy == "single":
        values |= _single(settings, plan, sound, parts, warnings)
    if settings.mig_strategy == "mixed":
        ruled = _by_rule(settings, MIG, [(part.mig.profile, part) for part in parts])
        for rule, rule_parts in ruled.items():
            for profile in sorted({part.mig.profile for part in rule_parts}):
                same = [part for part in rule_parts if part.mig.profile == profile]
                values |= _parts(settings, plan, rule or mig_name(profile), same, warnings)
    return values


def _by_rule(settings: Settings, kind: str, units: Iterable[tuple[str, _Unit]]) -> dict[str, list[_Unit]]:
    """Units by the name that a rule gives them, "" for those without."""
    by_name: dict[str, list[_Unit]] = {}
    for key, unit in units:
        by_name.setdefault(ruled_name(settings.rules, kind, key), []).append(unit)
    return by_name


def _whole(
    settings: Settings, plan: ResourcePlan, name: str, gpus: Sequence[Gpu], warnings: list[str]
) -> dict[str, str]:
    """Whole GPUs. Those in MIG mode count as well, but a container can't get them whole: no replicas."""
    model = _commonest([gpu.name for gpu in gpus], name, warnings)
    same = [gpu for gpu in gpus if gpu.name == model]
    share = _share(settings, plan, name, [gpu.uuid for gpu in same if not gpu.mig_enabled])
    count = _count(plan, name, [gpu.uuid for gpu in same], warnings)
    values = _base(name, sanitised(model), count, share)
    return values | _memory(name, same[0].memory_bytes) | _architecture(name, same[0])


def _architecture(name: str, gpu: Gpu) -> dict[str, str]:
    major, dot, minor = gpu.compute_capability.partition(".")
    if not dot:
        return {}
    return {
        f"{name}.family": family(int(major), int(minor)),
        f"{name}.compute.major": major,
        f"{name}.compute.minor": minor,
    }


def family(major: int, minor: int) -> str:
    """The architecture of a compute capability."""
    if major in _SPLIT:
        first, before, after = _SPLIT[major]
        return before if minor < first else after
    return _FAMILIES.get(major, "undefined")


def _single(
    settings: Settings, plan: ResourcePlan, gpus: Sequence[Gpu], parts: Sequence[MigPart], warnings: list[str]
) -> dict[str, str]:
    """MIG devices in the place of GPUs, if all are alike; else no resource that a pod could request."""
    cut_gpus = [gpu for gpu in gpus if gpu.mig_enabled]
    if not cut_gpus:
        return {}
    empty = [gpu.index for gpu in cut_gpus if not gpu.mig]
    profiles = sorted({part.mig.profile for part in parts})
    if len(cut_gpus) == len(gpus) and not empty and len(profiles) == 1:
        model = _commonest([part.gpu.name for part in parts], BASE, [])
        return _architecture(BASE, _first(gpus, model)) | _parts(settings, plan, BASE, parts, warnings)
    why = (
        f"GPU {empty[0]} is in MIG mode and holds no MIG device"
        if empty
        else f"there are MIG devices of {' and '.join(profiles)}"
        if len(profiles) > 1
        else "only some GPUs are in MIG mode"
    )
    warnings.append(f"mig-strategy is single and {why}: {BASE}.product is MIG-INVALID")
    model = _commonest([gpu.name for gpu in cut_gpus], BASE, [])
    values = _base(BASE, f"{sanitised(model)}-MIG-INVALID", 0, Share(0, ""))
    return values | {f"{BASE}.memory": "0"} | _architecture(BASE, _first(cut_gpus, model))


def _first(gpus: Sequence[Gpu], model: str) -> Gpu:
    return next(gpu for gpu in gpus if gpu.name == model)


def _parts(
    settings: Settings, plan: ResourcePlan, name: str, parts: Sequence[MigPart], warnings: list[str]
) -> dict[str, str]:
    """MIG devices of one profile."""
    model = _commonest([part.gpu.name for part in parts], name, warnings)
    first = next(part.mig for part in parts if part.gpu.name == model)
    ids = [part.mig.uuid for part in parts]
    share, count = _share(settings, plan, name, ids), _count(plan, name, ids, warnings)
    values = _base(name, f"{sanitised(model)}-MIG-{first.profile.replace('+', '.')}", count, share)
    values |= _memory(name, first.memory_bytes)
    size = first.size
    if size is not None:
        counts = {
            **{"multiprocessors": size.multiprocessors, "slices.gi": size.gpu_slices},
            **{"slices.ci": size.compute_slices, "engines.copy": size.copy_engines},
            **{"engines.decoder": size.decoders, "engines.encoder": size.encoders},
            **{"engines.jpeg": size.jpeg, "engines.ofa": size.ofa},
        }
        values |= {f"{name}.{key}": str(value) for key, value in counts.items() if value is not None}
    return values


def _base(name: str, product: str, count: int, share: Share) -> dict[str, str]:
    shared = share.strategy not in ("", "none") and not share.renamed
    return {
        f"{name}.product": f"{product}-SHARED" if shared else product,
        f"{name}.count": str(count),
        f"{name}.replicas": str(share.replicas),
        f"{name}.sharing-strategy": share.strategy,
    }


def _memory(name: str, size: int) -> dict[str, str]:
    return {f"{name}.memory": str(size >> 20)} if size >> 20 else {}


def _count(plan: ResourcePlan, name: str, ids: Sequence[str], warnings: list[str]) -> int:
    """How many of these units can be shared as configured: the plugin advertises no other, and MPS can't
    share MIG devices.
    """
    left_out = [item for item in plan.left_out if item.unshareable and item.id in ids]
    for reason, number in Counter(item.reason for item in left_out).items():
        units = "1 device isn't" if number == 1 else f"{number} devices aren't"
        warnings.append(f"{name}: {units} advertised: {reason}")
    return len(ids) - len({item.id for item in left_out})


def _share(settings: Settings, plan: ResourcePlan, name: str, ids: Sequence[str]) -> Share:
    """How these units are advertised; units that aren't advertised have no replicas."""
    own = settings.resource_name if name == BASE else name
    desired = set(ids)
    best = Share(0)
    for resource in plan.resources:
        unit_ids = [
            unit.id for unit in resource.units if unit.id in desired or (desired and unit.id in ONE_DEVICE)
        ]
        if not unit_ids:
            continue
        count = max(resource.share_counts.get(unit, 0) for unit in unit_ids)
        candidate = Share(count, resource.sharing, resource.name != own) if count else Share(1)
        best = max(best, candidate, key=lambda share: (share.replicas, share.strategy != "none"))
    return best


def _commonest(models: Sequence[str], name: str, warnings: list[str]) -> str:
    """The model of most units, on a tie the first one's. One name has one product."""
    counts = Counter(models)
    model_name = max(counts, key=lambda model: counts[model])  # on a tie the first
    if len(counts) > 1:
        others = ", ".join(f"{count} {model}" for model, count in counts.items())
        how = "resources.gpus in a config file gives each model a name of its own"
        warnings.append(f"there are {others}: {name}.* describes {model_name}; {how}")
    return model_name


_GRAPHICS, _COMPUTE = 0x030000, 0x030200  # PCI classes: VGA controller, 3D controller


def nvidia_labels(
    settings: Settings, inventory: Inventory | None, plan: ResourcePlan, machine: Machine, now: float
) -> Labels:
    """Every label. Without a GPU, or an inventory, only the time and what concerns vGPUs.

    `plan` is what `nvidia.resources.plan` makes of the same inventory and settings; `now` is in seconds since
    the epoch.
    """
    values = {} if settings.labels.no_timestamp else {TIMESTAMP: str(int(now))}
    warnings: list[str] = []
    gpus = gpus_to_label(settings, inventory.gpus) if inventory else ()
    if inventory:
        warnings += unknown_words(settings, inventory.gpus)
    if inventory and gpus:
        values["nvidia.com/gpu.machine"] = sanitised(machine.product) or "unknown"
        values |= _versions(inventory)
        values |= _capabilities(settings, gpus)
        values |= resource_labels(settings, plan, gpus, warnings)
        values["nvidia.com/gpu.mode"] = _mode(inventory, gpus, machine)
        values |= _clique(gpus)
        warnings += [f"GPU {gpu.index} isn't counted: {gpu.error}" for gpu in gpus if gpu.error]
    else:
        warnings.append("no GPU was found on this node")
    values |= _vgpu(machine)
    return valid_labels(values, warnings)


def _versions(inventory: Inventory) -> Iterator[tuple[str, str]]:
    """Driver and CUDA, under their current keys and the old ones, which many selectors still have."""
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
    labels = {
        "nvidia.com/mig.capable": boolean(any(gpu.mig_capable for gpu in gpus)),
        "nvidia.com/mps.capable": boolean(
            settings.shares_by_mps and not any(gpu.mig_enabled for gpu in gpus)
        ),
    }
    if settings.mig_strategy != "none":
        labels["nvidia.com/mig.strategy"] = settings.mig_strategy
    return labels


def _mode(inventory: Inventory, gpus: Sequence[Gpu], machine: Machine) -> str:
    """The mode of the GPUs, by their PCI class: `graphics` can drive a screen."""
    gpus = [gpu for gpu in gpus if not gpu.error] or gpus
    if inventory.simulated:  # they are on no bus; display cards are known by name
        kinds = {_GRAPHICS if "GeForce" in gpu.name else _COMPUTE for gpu in gpus}
    else:
        kinds = {machine.classes.get(gpu.pci, 0) for gpu in gpus}
    return "graphics" if kinds == {_GRAPHICS} else "compute" if kinds == {_COMPUTE} else "unknown"


def _clique(gpus: Sequence[Gpu]) -> Mapping[str, str]:
    """The NVLink partition, if all GPUs that are in one are in the same."""
    cliques = Counter(gpu.clique for gpu in gpus if gpu.clique)
    return {"nvidia.com/gpu.clique": next(iter(cliques))} if len(cliques) == 1 else {}


def _vgpu(machine: Machine) -> dict[str, str]:
    if machine.vgpu is None:
        return {}
    labels = {"nvidia.com/vgpu.present": boolean(machine.vgpu)}
    if machine.vgpu:
        values = zip(("version", "branch"), machine.host_driver, strict=True)
        labels |= {f"nvidia.com/vgpu.host-driver-{name}": text for name, text in values}
    return labels


# The GPUs of a Tegra (Jetson and the like), as CUDA's driver reports them: NVML reports little about them, or
# doesn't exist.


def is_tegra(host: Host, settings: Settings, inventory: Inventory | None) -> bool:
    """Whether to query CUDA; `inventory` is NVML's, None without an answer."""
    if settings.vendor != "nvidia" or settings.simulate or (inventory is not None and inventory.simulated):
        return False
    return platform_of(host, settings, inventory or Inventory("")) == TEGRA


def tegra_inventory(host: Host, seconds: float) -> tuple[Inventory | None, str]:
    """What CUDA's driver reports within `seconds`, else None and why. In a child: CUDA may hang or crash."""
    if not host.live:
        return None, "nothing was recorded of this machine's CUDA"
    try:
        child = start(host, "gpunode.gpu.cuda", {})
        try:
            document = answer(child, seconds, library="CUDA")
        finally:
            child.end()
        if "error" in document:
            return None, str(document["error"]["message"])
        return inventory_from_json(document["inventory"])._replace(driver_version=UNKNOWN_DRIVER), ""
    except ChildFailure as error:
        return None, str(error)
    except (ValueError, KeyError, TypeError) as error:
        return None, unusable(repr(error), "CUDA")


# GPUs that are reserved for virtual machines: NVIDIA's driver doesn't see them, the PCI bus does.

_VENDOR = "10de"
_IDS = tuple(f"/usr/{place}/pci.ids" for place in ("share/hwdata", "share/misc", "local/share", "share"))


def vfio_inventory(host: Host) -> Inventory:
    """The GPUs that vfio-pci, or a variant of it, holds. They report no UUID: the address replaces it."""
    gpus = [gpu for gpu in read_gpus(host) if gpu.for_vms] if host.is_dir(DEVICES) else []
    names = _names(host) if gpus else {}
    return Inventory(
        UNKNOWN_DRIVER, gpus=tuple(_gpu(host, number, gpu, names) for number, gpu in enumerate(gpus))
    )


def _gpu(host: Host, index: int, gpu: PciGpu, names: dict[str, str]) -> Gpu:
    number = gpu.device_id.removeprefix("0x").lower()
    return Gpu(
        index,
        gpu.address,
        names.get(number, f"NVIDIA device {number}"),
        gpu.address,
        memory_bytes=sum(bar.size for bar in memory_bars(host, gpu.address) or ()),
        numa=gpu.numa,
    )


def _names(host: Host) -> dict[str, str]:
    """NVIDIA's devices in the list of PCI ids: its section is indented by one tab, subsystems by two."""
    for path in _IDS:
        lines = iter(host.text_or_empty(path).splitlines())
        if not any(line.startswith(_VENDOR) for line in lines):
            continue
        names = {}
        for line in lines:
            if line[:1] not in ("\t", "#", ""):
                break
            if line[:1] == "\t" and line[1:2] != "\t":
                number, _, name = line.strip().partition("  ")
                names[number] = name
        return names
    return {}


# Reads the machine's facts for NVIDIA's labels.


def read_machine(
    host: Host, settings: LabelSettings, gpus: Iterable[Gpu], vgpus: tuple[VirtualGpu, ...] | None
) -> Machine:
    """Unreadable values stay unknown; nothing here is an error. `vgpus` is the result of `find_vgpus`."""
    last, file = vgpus[-1] if vgpus else None, settings.machine_type_file
    return Machine(
        product=host.text_or_empty(file).strip() if file else "",
        classes={gpu.pci: _class(host, gpu.pci) for gpu in gpus if gpu.pci},
        vgpu=None if vgpus is None else bool(vgpus),
        host_driver=(last.host_driver_version, last.host_driver_branch) if last else ("", ""),
    )


def find_vgpus(host: Host) -> tuple[VirtualGpu, ...] | None:
    """The virtual GPUs of this machine, None if unknown. Reads every device of the PCI bus."""
    try:
        return read_vgpus(host)
    except GpunodeError:
        return None


def _class(host: Host, address: str) -> int:
    """The PCI class, 0 if unknown."""
    try:
        return int(host.text_or_empty(f"{DEVICES}/{address}/class").strip() or "0", 16)
    except ValueError:
        return 0
