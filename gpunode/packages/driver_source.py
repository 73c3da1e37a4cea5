"""Where the driver's packages come from, and their names there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gpunode.facts.driver import branch, version_numbers
from gpunode.facts.driver_targets import REPOSITORY
from gpunode.facts.kernels import flavour as kernel_flavour
from gpunode.facts.kernels import header_package
from gpunode.facts.packages import upstream
from gpunode.facts.tables import table
from gpunode.packages.driver_choice import Choice, known_as_of
from gpunode.packages.driver_model import (
    DISTRIBUTION,
    NVIDIA,
    OPEN,
    Decision,
    DriverPackage,
    Refusal,
    Situation,
    Wish,
)
from gpunode.packages.manager import Available, PackageRequest, PackageState, matches

PACKAGES = "driver_packages"
REPOSITORIES = "driver_repositories"
UBUNTU, DEBIAN, SUSE = "ubuntu", "debian", "suse"
CUDA_UBUNTU, CUDA_DEBIAN, CUDA_RPM = "cuda-ubuntu", "cuda-debian", "cuda-rpm"
PREBUILT, DKMS, PLAIN = "prebuilt", "dkms", ""
_ARCHIVE_RELEASE = "-0ubuntu0."  # NVIDIA's packages for Ubuntu are 580.95.05-0ubuntu1
_FOREIGN = {"akmod-nvidia": "RPM Fusion", "xorg-x11-drv-nvidia": "RPM Fusion", "kmod-nvidia": "ELRepo"}


class Route(NamedTuple):
    """`name` is the one in the table of packages, empty if there is none.

    `directory` is NVIDIA's for this distribution, empty where nothing comes from NVIDIA; `base` the address
    of that repository; `add` whether it must be added first; `modular` whether branches are streams of a dnf
    module; `ids` the repository's ids on this node; `key` the key that signs a mirror, empty for NVIDIA's
    own. `said` is true if the user chose.
    """

    name: str
    directory: str = ""
    base: str = ""
    setup: str = ""
    add: bool = False
    modular: bool = False
    said: bool = False
    ids: tuple[str, ...] = ()
    key: bytes = b""
    decisions: tuple[Decision, ...] = ()
    refusals: tuple[Refusal, ...] = ()

    @property
    def ways(self) -> tuple[str, ...]:
        """The possible kinds of module, the better one first."""
        if self.name == UBUNTU:
            return (PREBUILT, DKMS)
        return (PLAIN,) if self.name == SUSE else (DKMS,)


class Name(NamedTuple):
    """A package's name, whether it must have the driver's version, and whether it is optional."""

    name: str
    exact: bool
    must: bool


def choose_route(situation: Situation, wish: Wish, choice: Choice) -> Route:
    """Choose by the distribution, the installed packages and the user's options."""
    system = situation.distribution
    own = {"ubuntu": UBUNTU, "debian": DEBIAN}.get(system.id, SUSE if system.family == "suse" else "")
    foreign = next((vendor for name, vendor in _FOREIGN.items() if name in situation.packages.installed), "")
    if foreign and wish.repository != NVIDIA:
        message = f"the driver here comes from {foreign}"
        return _no_route("other-source", message, f"upgrade it from there, or remove {foreign}'s first")
    if system.family not in ("debian", "rhel", "suse"):
        return _unknown(situation, choice)
    if wish.repository == DISTRIBUTION:
        return _from_distribution(situation, own)
    if not wish.repository and own in (UBUNTU, DEBIAN):
        here, why, source = _prefers_own(situation, own)
        if here:
            return Route(own, decisions=(Decision("from", _WHERE[own], why, source),))
    return _from_nvidia(situation, wish, choice, own)


def _no_route(code: str, message: str, hint: str) -> Route:
    return Route("", refusals=(Refusal(code, message, hint),))


_NVIDIAS = "NVIDIA's repository"
_WHERE = {
    UBUNTU: "Ubuntu's archive",
    DEBIAN: "Debian's archive (non-free)",
    SUSE: "SUSE's signed module, libraries from NVIDIA's repository",
}


def _prefers_own(situation: Situation, own: str) -> tuple[bool, str, str]:
    """Whether the distribution's own packages are preferred on this node, and why."""
    driver = [
        package for package in situation.packages.containing("nvidia") if "container" not in package.name
    ]
    if own == DEBIAN:
        there = [
            package for package in driver if package.name in ("nvidia-kernel-dkms", "nvidia-open-kernel-dkms")
        ]
        own_packages = [
            package for package in there if "~deb" in package.version or not situation.nvidia_repository
        ]
        return (
            bool(own_packages) or situation.debian_own,
            "the driver here is Debian's own",
            "package database",
        )
    if any(_ARCHIVE_RELEASE in package.version for package in driver):
        return True, "the driver here is from it", "package database"
    if situation.nvidia_repository:
        return False, "", ""
    if situation.nvlink5 and situation.switches:
        return False, "", ""  # only NVIDIA has nvlsm
    why = "its modules are built and signed for each kernel, so Secure Boot and kernel upgrades work"
    return True, why, known_as_of(PACKAGES)


def _from_distribution(situation: Situation, own: str) -> Route:
    if own in (UBUNTU, DEBIAN):
        decision = Decision("from", _WHERE[own], "requested on the command line", "--repository distribution")
        return Route(own, said=True, decisions=(decision,))
    name = situation.distribution.name or situation.distribution.id
    return _no_route("no-repository", f"{name} has no driver of its own for computing", "--repository nvidia")


def _from_nvidia(situation: Situation, wish: Wish, choice: Choice, own: str) -> Route:
    row = _row(situation)
    if row is None:
        return _unknown(situation, choice)
    own_mirror = wish.repository not in ("", NVIDIA)
    mirror = wish.repository if own_mirror else f"https://{REPOSITORY}"
    base = f"{mirror.rstrip('/')}/{row['directory']}/{situation.architecture}"
    name = {UBUNTU: CUDA_UBUNTU, DEBIAN: CUDA_DEBIAN, SUSE: SUSE}.get(own, CUDA_RPM)
    add = not situation.has(base if own_mirror else REPOSITORY)
    if add and own_mirror and situation.distribution.family == "debian" and not wish.key:
        # NVIDIA's package that configures apt names NVIDIA's own address, so a mirror needs the user's key
        return _no_route(
            "mirror-not-set-up",
            f"apt doesn't know {base} yet, and its key has to come from you",
            "give the key that the mirror is signed with: --key FILE",
        )
    if wish.repository:
        why, source = "requested on the command line", f"--repository {wish.repository}"
    elif situation.nvidia_repository:
        why, source = "it is set up here", "package manager's repositories"
    elif situation.nvlink5 and situation.switches:
        why, source = "only this repository has nvlsm, which these NVSwitches need", known_as_of(PACKAGES)
    else:
        why = f"it has a driver for {situation.distribution.name or situation.distribution.id}"
        source = known_as_of(REPOSITORIES)
    signed = name == SUSE and choice.flavour == OPEN
    where = f"{_WHERE[SUSE] if signed else _NVIDIAS} ({row['directory']})"
    decision = Decision("from", where, why, source)
    ids = situation.ids(base if own_mirror else REPOSITORY)
    return Route(
        name,
        row["directory"],
        base,
        row["setup"],
        add,
        row["modular"],
        bool(wish.repository),
        ids,
        wish.key,
        (decision,),
    )


def _row(situation: Situation) -> dict[str, Any] | None:
    system = situation.distribution
    major = system.version.partition(".")[0]
    spelt = system.id.partition("-")[0]
    own = spelt in {row["like"] for row in table(REPOSITORIES).rows}
    like = spelt if own else "rhel" if system.family == "rhel" else spelt
    return next(
        (
            row
            for row in table(REPOSITORIES).rows
            if row["like"] == like and row["version"] in (system.version, major)
        ),
        None,
    )


def install_by_tdnf(situation: Situation, choice: Choice) -> str:
    """NVIDIA's commands for Azure Linux, where gpunode doesn't support the package manager.

    "" on other systems, and for GPUs that need the proprietary module, which NVIDIA's guide doesn't offer
    there.
    """
    row = _row(situation)
    if row is None or situation.distribution.id != "azurelinux" or choice.flavour != OPEN:
        return ""
    install = "tdnf install azurelinux-repos-extended && tdnf install nvidia-open"
    if situation.nvidia_repository:
        return install
    name = f"cuda-{row['directory']}.repo"
    address = f"https://{REPOSITORY}/{row['directory']}/{situation.architecture}/{name}"
    return f"curl -fsSLo /etc/yum.repos.d/{name} {address} && {install}"


def _unknown(situation: Situation, choice: Choice) -> Route:
    name = situation.distribution.name or situation.distribution.id or "this distribution"
    if command := install_by_tdnf(situation, choice):
        return _no_route(
            "no-repository", f"gpunode doesn't support tdnf, the package manager of {name}", command
        )
    return _no_route(
        "no-repository",
        f"no driver packages are known for {name}",
        "see https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/",
    )


def package_names(situation: Situation, route: Route, choice: Choice, way: str) -> tuple[Name, ...]:
    """The driver's packages of this route, in the table's order; `way` is one of the route's."""
    holds = {
        "": True,
        PREBUILT: way == PREBUILT,
        DKMS: way == DKMS,
        "switches": situation.switches > 0,
        "switches-nvlink5": situation.switches > 0 and situation.nvlink5,
        "imex": situation.rack,
    }
    words = {
        "branch": str(choice.branch),
        "open": "-open" if choice.flavour == OPEN else "",
        "kernel": kernel_kind(situation),
        "release": situation.kernel,
    }
    return tuple(
        Name(row["name"].format(**words), row["exact"], row["need"] == "must")
        for row in table(PACKAGES).rows
        if row["route"] == route.name
        and row["since"] <= choice.branch
        and not (row["until"] and choice.branch > row["until"])
        and row["module"] in ("", choice.flavour)
        and holds[row["when"]]
    )


def kernel_kind(situation: Situation) -> str:
    """The kernel's flavor in the names of its packages.

    ``generic``, and ``generic-hwe-22.04`` if that package installs new kernels.
    """
    kind = kernel_flavour(situation.kernel)
    if situation.distribution.id != "ubuntu":
        return kind
    tracks = [
        package.name.removeprefix("linux-image-")
        for package in situation.packages.starting(f"linux-image-{kind}")
        if package.name.removeprefix("linux-image-").startswith((f"{kind}-hwe-", f"{kind}-lts-"))
    ]
    return tracks[-1] if tracks else kind


# Requirements of a module that is built on this node: headers of its kernels, and DKMS.

_EPEL = "https://dl.fedoraproject.org/pub/epel/epel-release-latest-{}.noarch.rpm"


def lacking_headers(situation: Situation) -> dict[str, PackageRequest]:
    """By kernel, the package that it needs for building modules; only for kernels without it."""
    family = situation.distribution.family
    packages = {
        release: header_package(family, release)
        for release in situation.kernels
        if release not in situation.headers
    }
    return {release: PackageRequest(*package) for release, package in packages.items() if package[0]}


def to_build(
    situation: Situation,
    route: Route,
    headers: Mapping[str, PackageRequest],
    states: Mapping[str, PackageState],
) -> tuple[tuple[PackageRequest, ...], tuple[Refusal, ...]]:
    """Headers to install first, and those that aren't available. Without `states` nothing is refused."""
    if not states:
        return tuple(headers.values()), ()
    refusals: list[Refusal] = []
    desired: list[PackageRequest] = []
    for release, package in headers.items():
        version = _offered(states[package.name], package.version)
        if version:
            desired.append(PackageRequest(package.name, version if package.version else ""))
        else:
            refusals.append(_no_headers(situation, release, package))
    if route.name == CUDA_RPM and not states["dkms"].available:
        refusals.append(_no_dkms(situation))
    return tuple(desired), tuple(refusals)


def _offered(state: PackageState, version: str) -> str:
    """The matching version in full; empty if none is offered."""
    fits = (
        offer.version
        for offer in state.available
        if not version or matches(offer.version, version) or offer.version.startswith(f"{version}.")
    )
    return next(fits, "")


def _no_headers(situation: Situation, release: str, package: PackageRequest) -> Refusal:
    running = release == situation.kernel
    first = "boot" if running else "install"
    spec = f"{package.name}-{package.version}" if package.version else package.name
    return Refusal(
        "headers-missing",
        f"the headers of kernel {release} aren't available: no repository offers {spec}",
        f"{first} a kernel with available headers, then run this again",
    )


def _no_dkms(situation: Situation) -> Refusal:
    system = situation.distribution
    if system.id in ("fedora", "amzn"):
        hint = f"it is in {system.name}'s own repositories: see that they are enabled"
    else:
        hint = f"it is in EPEL: dnf install {_EPEL.format(system.version.partition('.')[0])}"
    return Refusal("dkms-missing", "the module is built by DKMS, which no repository here offers", hint)


# Exact versions: one that the package manager offers for every package of the driver.

_NVIDIA, _OTHERS = "NVIDIA's repository", "the distribution's own"


class PackageSelection(NamedTuple):
    """The packages with their versions, the driver's version, refusals and notes."""

    version: str = ""
    packages: tuple[DriverPackage, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()


def driver_version(version: str) -> str:
    """``580.159.03`` from ``3:580.159.03-1.el9`` and from SUSE's ``580.159.03_k6.4.0_150600.21-1.1``."""
    return upstream(version).partition("_")[0]


def resolve(
    names: Sequence[Name], states: Mapping[str, PackageState], choice: Choice, route: Route, wish: Wish
) -> PackageSelection:
    """The newest driver of the branch that is offered for all packages which must have its version."""
    offers = {package.name: _offers(states[package.name], route, package.exact) for package in names}
    left_out = [package.name for package in names if not package.must and not offers[package.name]]
    missing = [package.name for package in names if package.must and not offers[package.name]]
    notes = [f"{name} is left out: no repository offers it" for name in left_out]
    if missing:
        return PackageSelection(refusals=(_missing(missing, choice, route),), notes=tuple(notes))
    desired = [package for package in names if offers[package.name]]
    exact = {package.name: offers[package.name] for package in desired if package.exact}
    jump = _transitional(exact, choice)
    if jump is not None:
        return PackageSelection(refusals=(jump,), notes=tuple(notes))
    shared = _shared([offers for name, offers in exact.items()], choice, wish)
    if not shared:
        optional = {package.name for package in desired if package.exact and not package.must}
        needed = {name: offers for name, offers in exact.items() if name not in optional}
        shared = _shared(list(needed.values()), choice, wish)
        if not shared or not optional:
            return PackageSelection(refusals=(_nothing_shared(needed, choice, wish),), notes=tuple(notes))
        lagging = [name for name in optional if shared not in map(_own, exact[name])]
        notes += [f"{name} is left out: it isn't available in {shared}" for name in sorted(lagging)]
        desired = [package for package in desired if package.name not in lagging]
    packages = tuple(
        _package(package, states[package.name], offers[package.name], shared) for package in desired
    )
    refusals = (*_hold_refusals(packages, states), *_disagreement(desired, states, route))
    return PackageSelection(shared, packages, refusals, tuple(notes))


def _offers(state: PackageState, route: Route, exact: bool) -> tuple[Available, ...]:
    """The offers of a package from the plan's source; a version that is only installed counts too."""
    if not exact or route.name == SUSE:
        return state.available
    desired = _OTHERS if route.name in (UBUNTU, DEBIAN) else _NVIDIA
    return tuple(
        offer
        for offer in state.available
        if not offer.origins or any(_vendor(origin, route) == desired for origin in offer.origins)
    )


def _vendor(origin: str, route: Route) -> str:
    is_nvidia = (
        REPOSITORY in origin
        or origin.startswith("cuda-")
        or origin in route.ids
        or (route.base and origin.startswith(route.base))
    )
    return _NVIDIA if is_nvidia else _OTHERS


def _own(offer: Available) -> str:
    return driver_version(offer.version)


def _shared(offers: Sequence[tuple[Available, ...]], choice: Choice, wish: Wish) -> str:
    """The newest driver version that all have, of the branch or the requested one; empty if none."""
    sets = [{_own(offer) for offer in package_offers} for package_offers in offers]
    common = set.intersection(*sets) if sets else set()
    fit = [
        version for version in common if branch(version) == choice.branch and wish.version in ("", version)
    ]
    return max(fit, key=version_numbers, default="")


def _transitional(exact: Mapping[str, tuple[Available, ...]], choice: Choice) -> Refusal | None:
    """A package named after one branch that installs another: Ubuntu's transitional packages."""
    for name, offers in exact.items():
        branches = {branch(_own(offer)) for offer in offers}
        if str(choice.branch) in re.split(r"[^0-9]+", name) and branches and choice.branch not in branches:
            newest = max(offers, key=lambda offer: version_numbers(_own(offer)))
            number = branch(_own(newest))
            return Refusal(
                "transitional-package",
                f"{name} is transitional: it installs {_own(newest)}, of branch {number}",
                f"--branch {number}, or another one that is still kept",
            )
    return None


def _missing(names: Sequence[str], choice: Choice, route: Route) -> Refusal:
    where = f"NVIDIA's repository {route.directory} lacks" if route.directory else "the repositories lack"
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
        f"branch {choice.branch} isn't available here: {where} {', '.join(names)}",
        hints[route.name],
    )


def _nothing_shared(exact: Mapping[str, tuple[Available, ...]], choice: Choice, wish: Wish) -> Refusal:
    newest_texts = ", ".join(f"{name} {_newest(offers, choice)}" for name, offers in exact.items())
    what = f"version {wish.version}" if wish.version else f"one version of branch {choice.branch}"
    return Refusal(
        "no-common-version",
        f"{what} isn't offered for all packages: {newest_texts}",
        "name a version that all have with --version, or wait until the repository has them",
    )


def _newest(offers: Sequence[Available], choice: Choice) -> str:
    fit = [_own(offer) for offer in offers if branch(_own(offer)) == choice.branch]
    return max(fit, key=version_numbers, default="not at all")


def _package(package: Name, state: PackageState, offers: Sequence[Available], version: str) -> DriverPackage:
    selected = offers[0]
    if package.exact:
        selected = next(offer for offer in offers if _own(offer) == version)
    elif state.candidate:
        selected = state.offered(state.candidate) or selected
    return DriverPackage(
        package.name, selected.version, state.installed, next(iter(selected.origins), ""), package.exact
    )


def _hold_refusals(
    packages: Sequence[DriverPackage], states: Mapping[str, PackageState]
) -> Iterator[Refusal]:
    names = [
        package.name
        for package in packages
        if states[package.name].held and package.installed and package.installed != package.version
    ]
    if names:
        here = next(package.installed for package in packages if package.name == names[0])
        yield Refusal(
            "held",
            f"a package hold keeps {', '.join(names)} at {driver_version(here)}",
            f"keep that one: --version {driver_version(here)}; or remove the hold yourself",
        )


def _disagreement(
    names: Sequence[Name], states: Mapping[str, PackageState], route: Route
) -> Iterator[Refusal]:
    """Two repositories with the same packages in different versions: upgrades alternate between them."""
    if route.said or route.name == SUSE:
        return
    for package in names:
        newest: dict[str, str] = {}
        for offer in states[package.name].available:
            for origin in offer.origins:
                newest.setdefault(_vendor(origin, route), offer.version)
        if package.exact and len(newest) > 1 and len(set(newest.values())) > 1:
            versions_text = " and ".join(
                f"{version} ({vendor})" for vendor, version in sorted(newest.items())
            )
            yield Refusal(
                "two-repositories",
                f"two repositories offer {package.name}: {versions_text}",
                "say which: --repository distribution, or --repository nvidia; --hold keeps it there",
            )
            return
