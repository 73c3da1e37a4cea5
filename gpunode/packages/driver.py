"""The driver's plan: what these GPUs and this kernel need, why, where from, and the commands for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpunode.dataclass import dataclass, replace
from gpunode.errors import PreconditionError
from gpunode.facts.gpu_support import branch
from gpunode.host import Host
from gpunode.packages import driver_commands as commands
from gpunode.packages.driver_building import lacking_headers, to_build
from gpunode.packages.driver_choice import Choice, choose, known_as_of
from gpunode.packages.driver_model import OPEN, Decision, DriverPackage, DriverPlan, Situation, Wish
from gpunode.packages.driver_preview import previewed, to_hold, unable_to_hold
from gpunode.packages.driver_refusals import against_module, against_node
from gpunode.packages.driver_route import (
    CUDA_RPM,
    DKMS,
    PACKAGES,
    PREBUILT,
    Name,
    Route,
    choose_route,
    package_names,
)
from gpunode.packages.driver_versions import Resolved, driver_version, resolve
from gpunode.packages.manager import Command, Manager, PackagesError, PackageState, Wanted

_NO_NEW_KERNELS = (
    "a held driver gets no modules for newer kernels: hold those too, or upgrade driver and kernel together"
)

States = Mapping[str, PackageState]


def manager_of(host: Host, family: str) -> Manager:
    """The node's own; on a recorded machine without programs that of its family."""
    from gpunode.packages.find import find_manager

    try:
        return find_manager(host)
    except PreconditionError as error:
        if host.live or error.code != "no-package-manager":
            raise
    if family == "debian":
        from gpunode.packages.apt import Apt

        return Apt.of(host)
    if family == "suse":
        from gpunode.packages.zypper import Zypper

        return Zypper(host)
    from gpunode.packages.dnf import Dnf

    return Dnf(host)


def plan_driver(host: Host, situation: Situation, wish: Wish) -> DriverPlan:
    """The whole plan, refusals and all. The package manager is asked, and nothing is changed."""
    barred = against_node(situation)
    choice = choose(situation, wish)
    base = DriverPlan(
        choice.branch,
        choice.flavour,
        installed=situation.version,
        decisions=choice.decisions,
        refusals=(*barred, *choice.refusals),
        notes=(*choice.notes, *(f"not looked at: {what}" for what in situation.unread)),
    )
    if not situation.gpus or any(one.code in ("container", "wsl2", "tegra", "immutable") for one in barred):
        return replace(base, branch=0, flavour="", decisions=(), notes=())
    route = choose_route(situation, wish, choice)
    base = replace(
        base,
        route=route.name,
        decisions=(*base.decisions, *route.decisions),
        refusals=(*base.refusals, *route.refusals),
    )
    if not route.name:
        return base
    return _with_packages(
        base, situation, wish, choice, route, manager_of(host, situation.distribution.family)
    )


def _with_packages(
    base: DriverPlan, situation: Situation, wish: Wish, choice: Choice, route: Route, manager: Manager
) -> DriverPlan:
    headers = lacking_headers(situation)
    states, why = _look(manager, situation, route, choice, headers)
    known = bool(states) and not route.add and not commands.changes_stream(situation, route, choice)
    way = _way(situation, route, choice, states, known)
    names = package_names(situation, route, choice, way)
    found = resolve(names, states, choice, route, wish) if known else _unresolved(names, situation, wish)
    needs = to_build(situation, route, headers, states) if way == DKMS else ((), ())
    signed = way == PREBUILT or (route.name == "suse" and choice.flavour == OPEN)
    refusals = (*base.refusals, *found.refusals, *against_module(situation, signed=signed), *needs[1])
    decisions = (*base.decisions, *_decisions(situation, way, found, headers, known=known))
    notes = (*base.notes, *found.notes, *_fits(situation, base), *((why,) if why else ()))
    if states and not known:
        notes += ("exact versions are told once the package manager knows the repository and its stream",)
    plan = replace(
        base, version=found.version, packages=found.packages, decisions=decisions, refusals=refusals,
        notes=notes, resolved=known and bool(found.version),
        watched=_considered(situation, route, choice, headers),
    )  # fmt: skip
    end = manager.finish() if states else None
    if end is None and _up_to_date(situation, plan):
        if not situation.loaded:
            notes += ("the driver is installed and not loaded; gpunode doctor says why",)
        loose = [one.name for one in plan.packages if not states[one.name].held] if wish.hold else []
        if loose:
            return replace(plan, commands=(manager.hold(loose),), notes=notes)
        return replace(plan, up_to_date=True, notes=notes)
    work = _Work(manager, route, choice, way, needs[0], end)
    return _with_commands(plan, situation, wish, work)


@dataclass(frozen=True)
class _Work:
    """How the plan comes about. `headers` are installed first; `end` finishes what was killed before us."""

    manager: Manager
    route: Route
    choice: Choice
    way: str
    headers: Sequence[Wanted]
    end: Command | None


def _with_commands(plan: DriverPlan, situation: Situation, wish: Wish, work: _Work) -> DriverPlan:
    if not plan.packages:
        return plan
    choice, route, manager = work.choice, work.route, work.manager
    reboot = _reboot(situation, plan, work.way)
    before = branch(situation.version)
    here = {True: "open", False: "proprietary", None: choice.flavour}[situation.opened]
    switching = bool(before) and (before != choice.branch or here != choice.flavour)
    preparing = (
        *commands.make_known(route, manager),
        *commands.streams(situation, route, choice, manager),
    )
    installs = commands.installs(
        situation, plan.packages, work.headers, manager, branch=choice.branch, switching=switching
    )
    if wish.hold:
        plan = replace(plan, refusals=(*plan.refusals, *unable_to_hold(manager)))
    plan, changes = previewed(plan, manager, installs[-1])
    hold = (manager.hold(to_hold(plan, changes)),) if wish.hold else ()
    finishing = commands.finishing(situation, plan.packages, hold, reboot=bool(reboot))
    steps = (
        *((work.end,) if work.end else ()),
        *preparing,
        *installs,
        *commands.settling(situation),
        *finishing,
    )
    if wish.hold and work.way == PREBUILT:
        plan = replace(plan, notes=(*plan.notes, _NO_NEW_KERNELS))
    return replace(
        plan, files=commands.files(situation, route), commands=steps,
        preparing=len(preparing) and len(preparing) + bool(work.end),
        finishing=len(finishing), changes=changes, reboot=reboot,
        watched=tuple(dict.fromkeys((*plan.watched, *(one.name for one in changes), *_here(situation)))),
        stream_back=commands.streams_back(situation, route, choice, manager),
    )  # fmt: skip


def _here(situation: Situation) -> tuple[str, ...]:
    """The driver's packages that are installed: a new one may push them out."""
    found = situation.packages.containing("nvidia")
    return tuple(one.name for one in found if "container" not in one.name)


def _fits(situation: Situation, base: DriverPlan) -> tuple[str, ...]:
    """That a driver which runs is all right as it is."""
    same = branch(situation.version) == base.branch and (situation.opened is True) == (base.flavour == OPEN)
    if not situation.loaded or not same or base.refusals:
        return ()
    return (
        f"driver {situation.version} is loaded and fits: this is only needed for a newer one of its branch",
    )


def _considered(
    situation: Situation, route: Route, choice: Choice, headers: Mapping[str, Wanted]
) -> tuple[str, ...]:
    """Every package that the plan may name, by whichever way the module comes."""
    names = [one.name for way in route.ways for one in package_names(situation, route, choice, way)]
    return tuple(dict.fromkeys((*names, *(one.name for one in headers.values()))))


def _look(
    manager: Manager, situation: Situation, route: Route, choice: Choice, headers: Mapping[str, Wanted]
) -> tuple[States, str]:
    """The states of all packages that the plan may name; none, and why, where nobody can be asked."""
    names = _considered(situation, route, choice, headers)
    try:
        return manager.look((*names, *(("dkms",) if route.name == CUDA_RPM else ()))), ""
    except PackagesError as error:
        return {}, f"versions aren't known: {error.message}"


def _way(situation: Situation, route: Route, choice: Choice, states: States, known: bool) -> str:
    """Prebuilt modules where the archive has them for this kind of kernel, else DKMS."""
    for way in route.ways[:-1]:
        names = package_names(situation, route, choice, way)
        if not known or all(states[one.name].available for one in names if one.must and not one.exact):
            return way
    return route.ways[-1]


def _unresolved(names: Sequence[Name], situation: Situation, wish: Wish) -> Resolved:
    here = situation.packages.installed
    packages = tuple(
        DriverPackage(one.name, "", here[one.name].version if one.name in here else "", "", one.exact)
        for one in names
        if one.must or one.name in here or commands.is_pin(one.name)
    )
    return Resolved(wish.version, packages)


def _decisions(
    situation: Situation, way: str, found: Resolved, headers: Mapping[str, Wanted], *, known: bool
) -> tuple[Decision, ...]:
    decisions = []
    if found.version:
        decisions.append(
            Decision("version", found.version, "the newest that every package here has", "package manager")
        )
    if way == PREBUILT:
        reason = "the archive has modules for Ubuntu's kernels"
        source = "package manager" if known else known_as_of(PACKAGES)
        decisions.append(Decision("module comes", "built and signed", reason, source))
    elif way == DKMS:
        lacking = ", ".join(headers) or "none"
        reason = f"kernels whose headers aren't here yet: {lacking}"
        decisions.append(Decision("module comes", "built here by DKMS", reason, "/lib/modules/*/build"))
    if situation.switches:
        more = " and the NVLink subnet manager" if situation.nvlink5 else ""
        reason = f"{situation.switches} NVSwitches; it ends at once beside a driver of another version"
        decisions.append(
            Decision("fabric manager", f"at the driver's version{more}", reason, "/sys/bus/pci/devices")
        )
    if situation.secure_boot:
        signed = {True: "enrolled", False: "not enrolled", None: "not known"}[situation.key_enrolled]
        reason = "the kernel loads signed modules alone" + (
            f"; this node's key is {signed}" if way == DKMS else ""
        )
        decisions.append(Decision("Secure Boot", "on", reason, "efivar SecureBoot"))
    return tuple(decisions)


def _reboot(situation: Situation, plan: DriverPlan, way: str) -> str:
    """Why this can't take effect without one; empty if it can."""
    if situation.loaded and (not plan.version or plan.version != situation.version):
        return f"driver {situation.version} is loaded: until the reboot module and libraries don't fit"
    if (
        situation.loaded
        and {True: "open", False: "proprietary", None: plan.flavour}[situation.opened] != plan.flavour
    ):
        return "the module of the other kind is loaded"
    if situation.nouveau:
        return f"{situation.nouveau[0]}: it lets go of the GPUs with the next boot"
    prebuilt = any(one.name.endswith(f"-{situation.kernel}") for one in plan.packages)
    if way == PREBUILT and plan.resolved and not prebuilt:
        return f"there is no module for the running kernel {situation.kernel}: a newer kernel comes along"
    return ""


def _up_to_date(situation: Situation, plan: DriverPlan) -> bool:
    if not plan.resolved or any(one.code != "gpu-in-use" for one in plan.refusals):
        return False
    same = all(one.installed == one.version for one in plan.packages)
    return same and (not situation.version or driver_version(situation.version) == plan.version)
