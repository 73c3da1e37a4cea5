"""Exact versions: one that every package of the driver has, out of what the package manager offers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from gpunode.dataclass import dataclass
from gpunode.facts.driver import version_numbers
from gpunode.facts.driver_targets import REPOSITORY
from gpunode.facts.gpu_support import branch
from gpunode.facts.packages import upstream
from gpunode.packages.driver_choice import Choice
from gpunode.packages.driver_model import DriverPackage, Refusal, Wish
from gpunode.packages.driver_route import (
    CUDA_DEBIAN,
    CUDA_RPM,
    CUDA_UBUNTU,
    DEBIAN,
    SUSE,
    UBUNTU,
    Name,
    Route,
)
from gpunode.packages.manager import Available, PackageState

_NVIDIA, _OTHERS = "NVIDIA's repository", "the distribution's own"


@dataclass(frozen=True)
class Resolved:
    """The packages with their versions and the driver's own; what is in the way; what is worth knowing."""

    version: str = ""
    packages: tuple[DriverPackage, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()


def driver_version(version: str) -> str:
    """``580.159.03`` of ``3:580.159.03-1.el9`` and of SUSE's ``580.159.03_k6.4.0_150600.21-1.1``."""
    return upstream(version).partition("_")[0]


def resolve(
    names: Sequence[Name], states: Mapping[str, PackageState], choice: Choice, route: Route, wish: Wish
) -> Resolved:
    """The newest driver of the branch that all packages which must have it are offered in."""
    offers = {one.name: _offers(states[one.name], route, one.exact) for one in names}
    left_out = [one.name for one in names if not one.must and not offers[one.name]]
    missing = [one.name for one in names if one.must and not offers[one.name]]
    notes = [f"{name} is left out: nobody offers it here" for name in left_out]
    if missing:
        return Resolved(refusals=(_missing(missing, choice, route),), notes=tuple(notes))
    wanted = [one for one in names if offers[one.name]]
    exact = {one.name: offers[one.name] for one in wanted if one.exact}
    jump = _transitional(exact, choice)
    if jump is not None:
        return Resolved(refusals=(jump,), notes=tuple(notes))
    shared = _shared([offers for name, offers in exact.items()], choice, wish)
    if not shared:
        optional = {one.name for one in wanted if one.exact and not one.must}
        needed = {name: offers for name, offers in exact.items() if name not in optional}
        shared = _shared(list(needed.values()), choice, wish)
        if not shared or not optional:
            return Resolved(refusals=(_nothing_shared(needed, choice, wish),), notes=tuple(notes))
        behind = [name for name in optional if shared not in map(_own, exact[name])]
        notes += [f"{name} is left out: it isn't there in {shared}" for name in sorted(behind)]
        wanted = [one for one in wanted if one.name not in behind]
    packages = tuple(_package(one, states[one.name], offers[one.name], shared) for one in wanted)
    refusals = (*_held(packages, states), *_disagreement(wanted, states, route))
    return Resolved(shared, packages, refusals, tuple(notes))


def _offers(state: PackageState, route: Route, exact: bool) -> tuple[Available, ...]:
    """What can be had of a package from where the plan takes the driver; what is merely installed counts."""
    if not exact or route.name == SUSE:
        return state.available
    wanted = _OTHERS if route.name in (UBUNTU, DEBIAN) else _NVIDIA
    return tuple(
        one
        for one in state.available
        if not one.origins or any(_vendor(origin, route) == wanted for origin in one.origins)
    )


def _vendor(origin: str, route: Route) -> str:
    mine = (
        REPOSITORY in origin
        or origin.startswith("cuda-")
        or origin in route.ids
        or (route.base and origin.startswith(route.base))
    )
    return _NVIDIA if mine else _OTHERS


def _own(offer: Available) -> str:
    return driver_version(offer.version)


def _shared(offers: Sequence[tuple[Available, ...]], choice: Choice, wish: Wish) -> str:
    """The newest driver version that all have, of the branch or the one that was asked for; empty if none."""
    sets = [{_own(one) for one in some} for some in offers]
    common = set.intersection(*sets) if sets else set()
    fit = [one for one in common if branch(one) == choice.branch and wish.version in ("", one)]
    return max(fit, key=version_numbers, default="")


def _transitional(exact: Mapping[str, tuple[Available, ...]], choice: Choice) -> Refusal | None:
    """A package of one branch by its name that installs another: Ubuntu's lead on to the next one."""
    for name, offers in exact.items():
        found = {branch(_own(one)) for one in offers}
        if str(choice.branch) in re.split(r"[^0-9]+", name) and found and choice.branch not in found:
            newest = max(offers, key=lambda one: version_numbers(_own(one)))
            number = branch(_own(newest))
            return Refusal(
                "transitional-package",
                f"{name} is transitional: it installs {_own(newest)}, of branch {number}",
                f"--branch {number}, or another one that is still kept",
            )
    return None


def _missing(names: Sequence[str], choice: Choice, route: Route) -> Refusal:
    where = "the package manager's repositories" if not route.directory else f"{route.directory}"
    hints = {
        UBUNTU: "enable restricted and multiverse if they aren't, apt-get update; or: --repository nvidia",
        DEBIAN: "enable contrib and non-free if they aren't, apt-get update; or: --repository nvidia",
        CUDA_UBUNTU: "read the indexes: apt-get update; or another --branch",
        CUDA_DEBIAN: "read the indexes: apt-get update; or another --branch",
        CUDA_RPM: "read the indexes: dnf makecache --refresh; or another --branch",
        SUSE: "read the indexes: zypper refresh; or another --branch",
    }
    return Refusal(
        "package-missing",
        f"branch {choice.branch} can't be had here: {', '.join(names)} isn't offered by {where}",
        hints[route.name],
    )


def _nothing_shared(exact: Mapping[str, tuple[Available, ...]], choice: Choice, wish: Wish) -> Refusal:
    shown = ", ".join(f"{name} {_newest(offers, choice)}" for name, offers in exact.items())
    what = f"version {wish.version}" if wish.version else f"one version of branch {choice.branch}"
    return Refusal(
        "no-common-version",
        f"{what} isn't offered for all packages: {shown}",
        "name a version that all have with --version, or wait until the repository has them",
    )


def _newest(offers: Sequence[Available], choice: Choice) -> str:
    fit = [_own(one) for one in offers if branch(_own(one)) == choice.branch]
    return max(fit, key=version_numbers, default="not at all")


def _package(one: Name, state: PackageState, offers: Sequence[Available], version: str) -> DriverPackage:
    chosen = offers[0]
    if one.exact:
        chosen = next(offer for offer in offers if _own(offer) == version)
    elif state.candidate:
        chosen = state.offered(state.candidate) or chosen
    return DriverPackage(one.name, chosen.version, state.installed, next(iter(chosen.origins), ""), one.exact)


def _held(packages: Sequence[DriverPackage], states: Mapping[str, PackageState]) -> Iterator[Refusal]:
    names = [
        one.name
        for one in packages
        if states[one.name].held and one.installed and one.installed != one.version
    ]
    if names:
        here = next(one.installed for one in packages if one.name == names[0])
        yield Refusal(
            "held",
            f"somebody holds {', '.join(names)} at {driver_version(here)}",
            f"keep that one: --version {driver_version(here)}; or take the hold off yourself",
        )


def _disagreement(
    names: Sequence[Name], states: Mapping[str, PackageState], route: Route
) -> Iterator[Refusal]:
    """Two repositories with packages of the same names and other versions: upgrades wander between them."""
    if route.said or route.name == SUSE:
        return
    for one in names:
        newest: dict[str, str] = {}
        for offer in states[one.name].available:
            for origin in offer.origins:
                newest.setdefault(_vendor(origin, route), offer.version)
        if one.exact and len(newest) > 1 and len(set(newest.values())) > 1:
            shown = " and ".join(f"{version} ({vendor})" for vendor, version in sorted(newest.items()))
            yield Refusal(
                "two-repositories",
                f"two repositories offer {one.name}: {shown}",
                "say which: --repository distribution, or --repository nvidia; --hold keeps it there",
            )
            return
