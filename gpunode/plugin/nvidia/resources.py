"""The resources that NVIDIA GPUs are advertised as: MIG strategy, selection, names, sharing.

A GPU that can't be advertised is left out with its reason; the others stay. Only settings that are invalid on
every node are an error.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from gpunode.cdi.nodes import NodeFacts, gpu_node, mig_nodes
from gpunode.errors import ConfigError
from gpunode.gpu.model import Gpu, Inventory, MigDevice
from gpunode.host import Host
from gpunode.plugin.config.settings import Settings, SharedResource, resource_name_problem
from gpunode.plugin.model import (
    KubeletDevice,
    LeftOut,
    Problem,
    ResourcePlan,
    Unit,
    deselection,
    gpu_unit,
    idle_rules,
    ruled_name,
)
from gpunode.plugin.nvidia.platform import (
    NEEDED,
    NVML,
    Site,
    imex_node,
    one_device_plan,
    platform_of,
    read_site,
)
from gpunode.plugin.sharing import Refusal, share

# What MPS can share, and how often.


def mps_refusal(settings: Settings, cuda_version: str, cut_gpus: Container[str]) -> Refusal:
    """What `sharing.share` configures for each unit. `cut_gpus` are whole GPUs in MIG mode.

    `ConfigError` for more replicas than a GPU of any kind can have with this driver.
    """
    sharing = settings.sharing
    if sharing is None or sharing.strategy != "mps":
        return lambda unit, entry: ""
    from gpunode.plugin.mps.layout import limit

    most = limit("", cuda_version)
    for entry in sharing.resources:
        if entry.replicas > most:
            raise ConfigError(
                f"sharing.mps: {entry.name}: {entry.replicas} replicas: MPS has {most} clients at most",
                hint=f"replicas: {most}, or use timeSlicing",
            )

    def refusal(unit: Unit, entry: SharedResource) -> str:
        if unit.partition or unit.id in cut_gpus:
            return "MPS can't share MIG devices: use timeSlicing, or keep it out of `devices`"
        most = limit(unit.compute_capability, cuda_version)
        if entry.replicas > most:
            return (
                f"{entry.replicas} replicas are wanted, and MPS has {most} clients at most on a GPU of "
                f"compute capability {unit.compute_capability}"
            )
        return ""

    return refusal


# The parts of a GPU that can be given to a container: the whole, or its MIG devices.

GPU, MIG = "gpu", "mig"


class Candidate(NamedTuple):
    """A unit that may be advertised. `sound` is false if its GPU can't be read now.

    `missing` are device files of it that are unknown. `cut` is a whole GPU in MIG mode.
    """

    unit: Unit
    problem: Problem | None = None
    sound: bool = True
    missing: str = ""
    cut: bool = False


class Notes:
    """Notes of a plan in addition to its resources; filled while it is made."""

    def __init__(self) -> None:
        self.left_out: list[LeftOut] = []
        self.warnings: list[str] = []

    def leave_out(self, unit: Unit, reason: str) -> None:
        self.left_out.append(LeftOut(unit.index, unit.id, reason))


def units_of(gpu: Gpu, strategy: str, facts: NodeFacts, notes: Notes) -> tuple[Candidate, ...]:
    """The units of a GPU under a MIG strategy. A GPU that can't be read has its last known units."""
    if strategy == "none" or not gpu.mig_enabled:
        return (_whole(gpu, facts, notes),)
    if not gpu.mig:
        reason = gpu.error or f"MIG mode is on and it holds no MIG device: {_no_devices(gpu)}"
        notes.left_out.append(LeftOut(str(gpu.index), gpu.uuid, reason))
    return tuple(_part(gpu, mig, facts) for mig in sorted(gpu.mig, key=lambda mig: mig.index))


def _no_devices(gpu: Gpu) -> str:
    return (
        f"make some (nvidia-smi mig -i {gpu.index} -cgi ... -C) or end it (nvidia-smi -i {gpu.index} -mig 0)"
    )


def _whole(gpu: Gpu, facts: NodeFacts, notes: Notes) -> Candidate:
    node = gpu_node(gpu, facts)
    unit = gpu_unit(gpu, (node,) if node else ())
    problem = None
    if gpu.mig_enabled and (gpu.mig or gpu.error):
        notes.warnings.append(
            f"GPU {gpu.index} is in MIG mode and mig-strategy is none: containers get it whole, and CUDA "
            "uses one of its MIG devices only; set mig-strategy to mixed or single"
        )
    elif gpu.mig_enabled:
        problem = Problem("mig-mode", f"MIG mode is on and it holds no MIG device: {_no_devices(gpu)}")
    missing = "" if node else "the number of its device file (/dev/nvidiaN) is unknown"
    return Candidate(unit, problem, not gpu.error, missing, gpu.mig_enabled)


def _part(gpu: Gpu, mig: MigDevice, facts: NodeFacts) -> Candidate:
    node, caps = gpu_node(gpu, facts), mig_nodes(gpu, mig, facts)
    unit = gpu_unit(gpu, (node, *caps) if node and caps else (), mig)
    missing = "" if unit.paths else "/proc/driver/nvidia-caps/mig-minors doesn't have its capabilities"
    return Candidate(unit, sound=not gpu.error, missing=missing)


# MIG strategy `single`: only interchangeable units under one name.


def keep_alike(name: str, candidates: Sequence[Candidate], notes: Notes) -> list[Candidate]:
    """The units of one kind, whole GPUs or one MIG profile; `notes` get the others.

    The kind that is on the most GPUs is kept, so that one GPU which lost its layout, or has another one,
    doesn't change the kind of the others. On a tie MIG is preferred to whole GPUs, because the strategy is
    chosen for MIG, then the kind with more devices, then that of the first GPU. A GPU that can't be read has
    no vote while another one has. The profile of a whole GPU is empty.
    """
    voters = [candidate.unit for candidate in candidates if candidate.sound]
    voters = voters or [candidate.unit for candidate in candidates]
    if not voters:
        return []

    def votes(profile: str) -> tuple[int, bool, int]:
        same = [unit for unit in voters if unit.profile == profile]
        return len({unit.gpu for unit in same}), profile != "", len(same)

    ordered = list(dict.fromkeys(unit.profile for unit in voters))
    profile = max(ordered, key=votes)  # on a tie the first
    for candidate in candidates:
        if candidate.unit.profile != profile:
            notes.leave_out(
                candidate.unit,
                f"mig-strategy is single and {name} means {_kind_text(profile)} here,"
                f" this is {_kind_text(candidate.unit.profile)}; "
                "mig-strategy mixed gives each kind a name of its own",
            )
    return [candidate for candidate in candidates if candidate.unit.profile == profile]


def _kind_text(profile: str) -> str:
    return f"a MIG device {profile}" if profile else "a whole GPU"


DOMAIN = "nvidia.com"
DISPLAY_ONLY = {"DGX Display", "NVIDIA DGX Display"}  # drives a monitor, runs no CUDA


def plan(host: Host, settings: Settings, inventory: Inventory, site: Site | None = None) -> ResourcePlan:
    """Resources and devices for this inventory; files are read, nothing is changed. `site` if it was read.

    `ConfigError` if two entries of a sharing section name the same device, or a name isn't valid.
    """
    if inventory.simulated:  # it has no device files, and those of the host machine are irrelevant
        settings = replace(settings, pass_device_specs=False, imex_channel_ids=())
    platform = NVML if inventory.simulated else platform_of(host, settings, inventory)
    if platform != NVML:
        return one_device_plan(platform, settings)
    notes = Notes()
    site = site or read_site(host, settings, inventory)
    candidates = _candidates(settings, inventory, site, notes)
    selected = _selected(settings, candidates, notes)
    by_name = _by_resource_name(settings, selected, notes)
    devices = {
        name: tuple(
            KubeletDevice(candidate.unit.id, candidate.unit, candidate.problem) for candidate in units
        )
        for name, units in by_name.items()
    }
    cut_gpus = frozenset(candidate.unit.id for candidate in selected if candidate.cut)
    shared = share(devices, settings.sharing, mps_refusal(settings, inventory.cuda_version, cut_gpus))
    resources = tuple(replace(resource, common=site.common) for resource in shared.resources)
    return ResourcePlan(resources, (*notes.left_out, *shared.left_out), (*notes.warnings, *shared.warnings))


# --- units ----------------------------------------------------------------------------------------------


def _candidates(settings: Settings, inventory: Inventory, site: Site, notes: Notes) -> list[Candidate]:
    """Every unit of the node, in the usual order."""
    candidates: list[Candidate] = []
    for gpu in _distinct(inventory.gpus, notes):
        candidates += units_of(gpu, settings.mig_strategy, site.facts, notes)
    candidates.sort(key=_order)
    problem = _problem_of_all(settings, site, notes)
    return [_with_problem(settings, candidate, problem) for candidate in _unique(candidates, notes)]


def _distinct(gpus: Iterable[Gpu], notes: Notes) -> Iterable[Gpu]:
    for gpu in gpus:
        if gpu.name in DISPLAY_ONLY:
            continue
        if gpu.uuid:
            yield gpu
        else:
            notes.left_out.append(LeftOut(str(gpu.index), "", gpu.error or "NVML reports no UUID"))


def _unique(candidates: Iterable[Candidate], notes: Notes) -> Iterable[Candidate]:
    """The kubelet knows devices by their ids: of two that report the same id, the first counts."""
    seen: dict[str, str] = {}
    for candidate in candidates:
        first = seen.setdefault(candidate.unit.id, candidate.unit.index)
        if first == candidate.unit.index:
            yield candidate
        else:
            notes.leave_out(candidate.unit, f"device {first} has the same UUID")


def _order(candidate: Candidate) -> tuple[int, ...]:
    return candidate.unit.order


def _problem_of_all(settings: Settings, site: Site, notes: Notes) -> Problem | None:
    if settings.pass_device_specs and (lacking := [path for path in NEEDED if path not in site.common.nodes]):
        notes.warnings.append(
            f"pass-device-specs: containers go without {' and '.join(lacking)}, as there is no such file: "
            "nvidia-modprobe -c 0 -u makes them; a plugin in a container sees them if it is privileged"
        )
    if not site.imex_missing or not settings.imex_channel_ids:
        return None
    nodes = " and ".join(imex_node(channel) for channel in settings.imex_channel_ids)
    how = f"{nodes} does not exist; load the module nvidia with NVreg_CreateImexChannel0=1"
    if settings.imex_required:
        return Problem("imex", f"IMEX is required and {how}")
    notes.warnings.append(f"containers get no IMEX channel: {how}")
    return None


def _with_problem(settings: Settings, candidate: Candidate, problem: Problem | None) -> Candidate:
    """With its first problem: its own, that of all GPUs, or a missing device file."""
    problem = candidate.problem or problem
    if problem is None and settings.pass_device_specs and candidate.missing and candidate.sound:
        reason = f"pass-device-specs is on and {candidate.missing}"
        problem = Problem("device-nodes", f"{reason}: nvidia-smi makes device files")
    return candidate._replace(problem=problem)


def _selected(settings: Settings, candidates: Sequence[Candidate], notes: Notes) -> list[Candidate]:
    """The units that `include` and `exclude` leave."""
    reasons, warnings = deselection(settings, [candidate.unit for candidate in candidates])
    notes.warnings += warnings
    for candidate in candidates:
        if candidate.unit.id in reasons:
            notes.leave_out(candidate.unit, reasons[candidate.unit.id])
    return [candidate for candidate in candidates if candidate.unit.id not in reasons]


# --- names ----------------------------------------------------------------------------------------------


def _by_resource_name(
    settings: Settings, candidates: Sequence[Candidate], notes: Notes
) -> dict[str, list[Candidate]]:
    """Units by resource name, in their order."""
    by_name: dict[str, list[Candidate]] = {}
    standard: list[Candidate] = []
    for kind in (GPU, MIG):
        keys = [candidate.unit.naming_key for candidate in candidates if candidate.unit.kind == kind]
        notes.warnings += idle_rules(settings.rules, kind, keys)
    for candidate in candidates:
        name = ruled_name(settings.rules, candidate.unit.kind, candidate.unit.naming_key)
        problem = _unnameable(settings, candidate, name)
        if problem:
            notes.leave_out(candidate.unit, problem)
        elif name:
            by_name.setdefault(name, []).append(candidate)
        elif candidate.unit.kind == MIG and settings.mig_strategy == "mixed":
            by_name.setdefault(mig_name(candidate.unit.profile), []).append(candidate)
        else:
            standard.append(candidate)
    if settings.mig_strategy == "single":
        standard = keep_alike(settings.resource_name, standard, notes)
    if standard:
        by_name.setdefault(settings.resource_name, []).extend(standard)
    for units in by_name.values():
        units.sort(key=_order)
    return by_name


def mig_name(profile: str) -> str:
    """The resource of a MIG profile, ``nvidia.com/mig-1g.10gb.me`` for ``1g.10gb+me``."""
    return f"{DOMAIN}/mig-{profile.replace('+', '.')}"


def _unnameable(settings: Settings, candidate: Candidate, ruled: str) -> str:
    """Why a unit gets no name; empty if it gets one."""
    if candidate.unit.kind == GPU and not candidate.unit.name and not candidate.sound:
        by_model = any(rule.kind == GPU for rule in settings.rules)
        return "it can't be read, and resources.gpus names GPUs by their model" if by_model else ""
    if ruled:
        return resource_name_problem(ruled)
    if candidate.unit.kind == MIG and settings.mig_strategy == "mixed":
        name = mig_name(candidate.unit.profile)
        problem = resource_name_problem(name) if candidate.unit.profile else "its profile is unknown"
        return f"{problem}; give it a name in resources.mig" if problem else ""
    return ""
