"""The labels of resources, ``nvidia.com/gpu.product`` and the like: of whole GPUs and MIG devices. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeVar

from gpunode.cdi.nodes import NodeFacts
from gpunode.dataclass import dataclass, replace
from gpunode.gpu.model import Gpu, MigDevice
from gpunode.plugin.labels.model import sanitised
from gpunode.plugin.model import Plan, Unit
from gpunode.plugin.naming import ruled_name
from gpunode.plugin.nvidia.platform import ONE_DEVICE
from gpunode.plugin.nvidia.resources import DISPLAY_ONLY, mig_name
from gpunode.plugin.nvidia.units import GPU, MIG, cut
from gpunode.plugin.select import deselected
from gpunode.plugin.settings import Settings

BASE = "nvidia.com/gpu"
_Unit = TypeVar("_Unit")
_FAMILIES = {1: "tesla", 2: "fermi", 3: "kepler", 5: "maxwell", 6: "pascal", 9: "hopper"}
_FAMILIES |= {10: "blackwell", 12: "blackwell", 13: "rubin"}
_SPLIT = {7: (5, "volta", "turing"), 8: (9, "ampere", "ada-lovelace")}
"""Families that share a major number: the minor number from which on it is the second."""


@dataclass(frozen=True)
class Part:
    """A MIG device with its GPU."""

    gpu: Gpu
    mig: MigDevice


@dataclass(frozen=True)
class Share:
    """How units are shared: into how many devices each, which way, and whether under another name."""

    replicas: int
    strategy: str = "none"
    renamed: bool = False


def counted(settings: Settings, gpus: Iterable[Gpu]) -> tuple[Gpu, ...]:
    """The GPUs that labels are about: no display card, and none that `include` or `exclude` takes away."""
    found = []
    for gpu in gpus:
        units = _units(settings, gpu)
        reasons, _ = deselected(settings, units)
        if gpu.name in DISPLAY_ONLY or (units and all(unit.id in reasons for unit in units)):
            continue
        found.append(replace(gpu, mig=tuple(mig for mig in gpu.mig if mig.uuid not in reasons)))
    return tuple(found)


def unknown_words(settings: Settings, gpus: Iterable[Gpu]) -> list[str]:
    """Warnings for what `include` and `exclude` name and this node hasn't."""
    return deselected(settings, [unit for gpu in gpus for unit in _units(settings, gpu)])[1]


def _units(settings: Settings, gpu: Gpu) -> list[Unit]:
    return [one.unit for one in cut(gpu, settings.mig_strategy, NodeFacts({})).candidates]


def resource_labels(
    settings: Settings, plan: Plan, gpus: Sequence[Gpu], warnings: list[str]
) -> dict[str, str]:
    """Of every resource that these GPUs are, or hold. A GPU that can't be read counts nowhere."""
    sound = [gpu for gpu in gpus if not gpu.error and gpu.name]
    values: dict[str, str] = {}
    if not sound:
        return values
    values |= _whole(settings, plan, BASE, sound, warnings)
    parts = [Part(gpu, mig) for gpu in sound for mig in gpu.mig]
    named = [gpu for gpu in sound if settings.mig_strategy == "none" or not gpu.mig_enabled]
    for name, some in _by_rule(settings, GPU, [(gpu.name, gpu) for gpu in named]).items():
        if name and name != BASE:
            values |= _whole(settings, plan, name, some, warnings)
    if settings.mig_strategy == "single":
        values |= _single(settings, plan, sound, parts, warnings)
    if settings.mig_strategy == "mixed":
        ruled = _by_rule(settings, MIG, [(part.mig.profile, part) for part in parts])
        for rule, found in ruled.items():
            for profile in sorted({part.mig.profile for part in found}):
                same = [part for part in found if part.mig.profile == profile]
                values |= _parts(settings, plan, rule or mig_name(profile), same, warnings)
    return values


def _by_rule(settings: Settings, kind: str, units: Iterable[tuple[str, _Unit]]) -> dict[str, list[_Unit]]:
    """Units by the name that a rule gives them, "" for those without."""
    found: dict[str, list[_Unit]] = {}
    for told, unit in units:
        found.setdefault(ruled_name(settings.rules, kind, told), []).append(unit)
    return found


def _whole(
    settings: Settings, plan: Plan, name: str, gpus: Sequence[Gpu], warnings: list[str]
) -> dict[str, str]:
    """Whole GPUs. Those in MIG mode count as well, but nobody gets them whole: they have no replicas."""
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
    settings: Settings, plan: Plan, gpus: Sequence[Gpu], parts: Sequence[Part], warnings: list[str]
) -> dict[str, str]:
    """MIG devices in the place of GPUs, if they all are alike; else nothing that a pod could ask for."""
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
    warnings.append(f"mig-strategy is single and {why}: {BASE}.product tells that as MIG-INVALID")
    model = _commonest([gpu.name for gpu in cut_gpus], BASE, [])
    values = _base(BASE, f"{sanitised(model)}-MIG-INVALID", 0, Share(0, ""))
    return values | {f"{BASE}.memory": "0"} | _architecture(BASE, _first(cut_gpus, model))


def _first(gpus: Sequence[Gpu], model: str) -> Gpu:
    return next(gpu for gpu in gpus if gpu.name == model)


def _parts(
    settings: Settings, plan: Plan, name: str, parts: Sequence[Part], warnings: list[str]
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
        told = {
            **{"multiprocessors": size.multiprocessors, "slices.gi": size.gpu_slices},
            **{"slices.ci": size.compute_slices, "engines.copy": size.copy_engines},
            **{"engines.decoder": size.decoders, "engines.encoder": size.encoders},
            **{"engines.jpeg": size.jpeg, "engines.ofa": size.ofa},
        }
        values |= {f"{name}.{key}": str(value) for key, value in told.items() if value is not None}
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


def _count(plan: Plan, name: str, ids: Sequence[str], warnings: list[str]) -> int:
    """How many of these units can be shared as configured: the plugin advertises no other, and MPS can't
    share MIG devices.
    """
    left_out = [item for item in plan.left_out if item.unshareable and item.id in ids]
    for reason, number in Counter(item.reason for item in left_out).items():
        units = "1 device isn't" if number == 1 else f"{number} devices aren't"
        warnings.append(f"{name}: {units} advertised: {reason}")
    return len(ids) - len({item.id for item in left_out})


def _share(settings: Settings, plan: Plan, name: str, ids: Sequence[str]) -> Share:
    """How these units are advertised; units that aren't have no replicas."""
    own = settings.resource_name if name == BASE else name
    wanted = set(ids)
    found = Share(0)
    for resource in plan.resources:
        mine = [unit.id for unit in resource.units if unit.id in wanted or (wanted and unit.id in ONE_DEVICE)]
        if not mine:
            continue
        count = max(resource.share_counts.get(unit, 0) for unit in mine)
        one = Share(count, resource.sharing, resource.name != own) if count else Share(1)
        found = max(found, one, key=lambda share: (share.replicas, share.strategy != "none"))
    return found


def _commonest(models: Sequence[str], name: str, warnings: list[str]) -> str:
    """The model of most of them, of several such the first one's. One name has one product."""
    counts = Counter(models)
    found = max(counts, key=lambda model: counts[model])  # the first of several that are equal
    if len(counts) > 1:
        others = ", ".join(f"{count} {model}" for model, count in counts.items())
        how = "resources.gpus in a config file gives each model a name of its own"
        warnings.append(f"there are {others}: {name}.* tells of {found}; {how}")
    return found
