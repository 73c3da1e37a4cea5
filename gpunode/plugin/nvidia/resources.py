"""What NVIDIA GPUs are advertised as: MIG strategy, selection, names, sharing.

One GPU never costs the others: what can't be advertised is left out with its reason. Only settings that can
hold on no node are an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpunode.dataclass import replace
from gpunode.gpu.model import Gpu, Inventory
from gpunode.host import Host
from gpunode.plugin.model import Device, LeftOut, Plan, Problem, Unit
from gpunode.plugin.naming import idle_rules, ruled_name
from gpunode.plugin.nvidia.alike import keep_alike
from gpunode.plugin.nvidia.mps_limits import mps_refusal
from gpunode.plugin.nvidia.platform import NVML, one_device_plan, platform_of
from gpunode.plugin.nvidia.site import NEEDED, Site, imex_node, read_site
from gpunode.plugin.nvidia.units import GPU, MIG, Candidate, cut, with_problem
from gpunode.plugin.select import deselected
from gpunode.plugin.settings import Settings, resource_name_problem
from gpunode.plugin.sharing import share

DOMAIN = "nvidia.com"
DISPLAY_ONLY = {"DGX Display", "NVIDIA DGX Display"}  # drives a monitor, runs no CUDA


class _Notes:
    """What a plan has to say beside its resources; filled while it is made."""

    def __init__(self) -> None:
        self.left_out: list[LeftOut] = []
        self.warnings: list[str] = []

    def leave_out(self, unit: Unit, reason: str) -> None:
        self.left_out.append(LeftOut(unit.index, unit.id, reason))


def plan(host: Host, settings: Settings, inventory: Inventory, site: Site | None = None) -> Plan:
    """Resources and devices for this inventory; files are read, nothing is changed. `site` if it was read.

    `ConfigError` if two entries of a sharing section name the same device, or a name can't be one.
    """
    if inventory.simulated:  # it has no device file, and the machine underneath is of no matter
        settings = replace(settings, pass_device_specs=False, imex_channel_ids=())
    platform = NVML if inventory.simulated else platform_of(host, settings, inventory)
    if platform != NVML:
        return one_device_plan(platform, settings)
    notes = _Notes()
    site = site or read_site(host, settings, inventory)
    candidates = _candidates(settings, inventory, site, notes)
    chosen = _selected(settings, candidates, notes)
    named = _named(settings, chosen, notes)
    devices = {
        name: tuple(Device(one.unit.id, one.unit, one.problem) for one in units)
        for name, units in named.items()
    }
    cut_gpus = frozenset(one.unit.id for one in chosen if one.cut)
    shared = share(devices, settings.sharing, mps_refusal(settings, inventory.cuda_version, cut_gpus))
    resources = tuple(replace(resource, common=site.common) for resource in shared.resources)
    return Plan(resources, (*notes.left_out, *shared.left_out), (*notes.warnings, *shared.warnings))


# --- units ----------------------------------------------------------------------------------------------


def _candidates(settings: Settings, inventory: Inventory, site: Site, notes: _Notes) -> list[Candidate]:
    """Every unit of the node, as people count them."""
    found: list[Candidate] = []
    for gpu in _distinct(inventory.gpus, notes):
        parts = cut(gpu, settings.mig_strategy, site.facts)
        notes.left_out += [parts.left_out] if parts.left_out else []
        notes.warnings += [parts.warning] if parts.warning else []
        found += parts.candidates
    found.sort(key=lambda one: one.unit.order)
    problems = _problems_of_all(settings, site, notes)
    return [_with_problems(settings, one, problems) for one in _unique(found, notes)]


def _distinct(gpus: Iterable[Gpu], notes: _Notes) -> Iterable[Gpu]:
    for gpu in gpus:
        if gpu.name in DISPLAY_ONLY:
            continue
        if gpu.uuid:
            yield gpu
        else:
            notes.left_out.append(LeftOut(str(gpu.index), "", gpu.error or "NVML tells no UUID"))


def _unique(candidates: Iterable[Candidate], notes: _Notes) -> Iterable[Candidate]:
    """The kubelet knows devices by their ids: of two that tell the same one, the first counts."""
    seen: dict[str, str] = {}
    for one in candidates:
        first = seen.setdefault(one.unit.id, one.unit.index)
        if first == one.unit.index:
            yield one
        else:
            notes.leave_out(one.unit, f"device {first} has the same UUID")


def _problems_of_all(settings: Settings, site: Site, notes: _Notes) -> Problem | None:
    if settings.pass_device_specs and (lacking := [one for one in NEEDED if one not in site.common.nodes]):
        notes.warnings.append(
            f"pass-device-specs: containers go without {' and '.join(lacking)}, as there is no such file: "
            "nvidia-modprobe -c 0 -u makes them; a plugin in a container sees them if it is privileged"
        )
    if not site.imex_missing or not settings.imex_channel_ids:
        return None
    nodes = " and ".join(imex_node(channel) for channel in settings.imex_channel_ids)
    how = f"{nodes} isn't there; load the module nvidia with NVreg_CreateImexChannel0=1"
    if settings.imex_required:
        return Problem("imex", f"IMEX is required and {how}")
    notes.warnings.append(f"containers get no IMEX channel: {how}")
    return None


def _with_problems(settings: Settings, one: Candidate, problem: Problem | None) -> Candidate:
    if problem is not None:
        one = with_problem(one, problem)
    if settings.pass_device_specs and one.missing and one.sound:
        reason = f"pass-device-specs is on and {one.missing}"
        one = with_problem(one, Problem("device-nodes", f"{reason}: nvidia-smi makes device files"))
    return one


def _selected(settings: Settings, candidates: Sequence[Candidate], notes: _Notes) -> list[Candidate]:
    """What `include` and `exclude` leave."""
    reasons, warnings = deselected(settings, [one.unit for one in candidates])
    notes.warnings += warnings
    for one in candidates:
        if one.unit.id in reasons:
            notes.leave_out(one.unit, reasons[one.unit.id])
    return [one for one in candidates if one.unit.id not in reasons]


# --- names ----------------------------------------------------------------------------------------------


def _named(settings: Settings, candidates: Sequence[Candidate], notes: _Notes) -> dict[str, list[Candidate]]:
    """Units by resource name, in their order."""
    named: dict[str, list[Candidate]] = {}
    standard: list[Candidate] = []
    for kind in (GPU, MIG):
        notes.warnings += idle_rules(
            settings.rules, kind, [_told(one) for one in candidates if one.kind == kind]
        )
    for one in candidates:
        name = ruled_name(settings.rules, one.kind, _told(one))
        problem = _unnameable(settings, one, name)
        if problem:
            notes.leave_out(one.unit, problem)
        elif name:
            named.setdefault(name, []).append(one)
        elif one.kind == MIG and settings.mig_strategy == "mixed":
            named.setdefault(mig_name(one.unit.profile), []).append(one)
        else:
            standard.append(one)
    if settings.mig_strategy == "single":
        standard = keep_alike(settings.resource_name, standard, notes.leave_out)
    if standard:
        named.setdefault(settings.resource_name, []).extend(standard)
    for units in named.values():
        units.sort(key=lambda one: one.unit.order)
    return named


def _told(one: Candidate) -> str:
    """What naming rules go by."""
    return one.unit.profile if one.kind == MIG else one.unit.name


def mig_name(profile: str) -> str:
    """The resource of a MIG profile, ``nvidia.com/mig-1g.10gb.me`` for ``1g.10gb+me``."""
    return f"{DOMAIN}/mig-{profile.replace('+', '.')}"


def _unnameable(settings: Settings, one: Candidate, ruled: str) -> str:
    """Why a unit gets no name; empty if it gets one."""
    if one.kind == GPU and not one.unit.name and not one.sound:
        by_model = any(rule.kind == GPU for rule in settings.rules)
        return "it can't be read, and resources.gpus names GPUs by their model" if by_model else ""
    if ruled:
        return resource_name_problem(ruled)
    if one.kind == MIG and settings.mig_strategy == "mixed":
        name = mig_name(one.unit.profile)
        problem = resource_name_problem(name) if one.unit.profile else "its profile can't be told"
        return f"{problem}; give it a name in resources.mig" if problem else ""
    return ""
