"""What a module that is built on this node needs: headers of its kernels, and DKMS."""

from __future__ import annotations

from collections.abc import Mapping

from gpunode.facts.kernel_headers import header_package
from gpunode.packages.driver_model import Refusal, Situation
from gpunode.packages.driver_route import CUDA_RPM, Route
from gpunode.packages.manager import PackageState, Wanted, matches

_EPEL = "https://dl.fedoraproject.org/pub/epel/epel-release-latest-{}.noarch.rpm"


def lacking_headers(situation: Situation) -> dict[str, Wanted]:
    """By kernel, the package that it needs for building modules; only for kernels that haven't got it."""
    family = situation.distribution.family
    found = {one: header_package(family, one) for one in situation.kernels if one not in situation.headers}
    return {release: Wanted(*package) for release, package in found.items() if package[0]}


def to_build(
    situation: Situation, route: Route, headers: Mapping[str, Wanted], states: Mapping[str, PackageState]
) -> tuple[tuple[Wanted, ...], tuple[Refusal, ...]]:
    """Headers to install first, and what can't be had. Without `states` nothing is refused."""
    if not states:
        return tuple(headers.values()), ()
    refusals: list[Refusal] = []
    wanted: list[Wanted] = []
    for release, package in headers.items():
        version = _offered(states[package.name], package.version)
        if version:
            wanted.append(Wanted(package.name, version if package.version else ""))
        else:
            refusals.append(_no_headers(situation, release, package))
    if route.name == CUDA_RPM and not states["dkms"].available:
        refusals.append(_no_dkms(situation))
    return tuple(wanted), tuple(refusals)


def _offered(state: PackageState, version: str) -> str:
    """The whole version that fits; empty if none is offered."""
    fits = (
        one.version
        for one in state.available
        if not version or matches(one.version, version) or one.version.startswith(f"{version}.")
    )
    return next(fits, "")


def _no_headers(situation: Situation, release: str, package: Wanted) -> Refusal:
    running = release == situation.kernel
    first = "boot" if running else "install"
    named = f"{package.name}-{package.version}" if package.version else package.name
    return Refusal(
        "headers-missing",
        f"the headers of kernel {release} can't be had: nobody offers {named}",
        f"{first} a kernel whose headers are offered, then run this again",
    )


def _no_dkms(situation: Situation) -> Refusal:
    system = situation.distribution
    if system.id in ("fedora", "amzn"):
        hint = f"it is in {system.name}'s own repositories: see that they are enabled"
    else:
        hint = f"it is in EPEL: dnf install {_EPEL.format(system.version.partition('.')[0])}"
    return Refusal("dkms-missing", "the module is built by DKMS, which no repository here offers", hint)
