"""Where the driver comes from, and what its packages are called there."""

from __future__ import annotations

from typing import Any

from gpunode.dataclass import dataclass
from gpunode.facts.driver import flavour as kernel_flavour
from gpunode.facts.driver_targets import REPOSITORY
from gpunode.packages.driver_choice import Choice, known_as_of
from gpunode.packages.driver_model import DISTRIBUTION, NVIDIA, OPEN, Decision, Refusal, Situation, Wish
from gpunode.tables import table

PACKAGES = "driver_packages"
REPOSITORIES = "driver_repositories"
UBUNTU, DEBIAN, SUSE = "ubuntu", "debian", "suse"
CUDA_UBUNTU, CUDA_DEBIAN, CUDA_RPM = "cuda-ubuntu", "cuda-debian", "cuda-rpm"
PREBUILT, DKMS, PLAIN = "prebuilt", "dkms", ""
_ARCHIVE_RELEASE = "-0ubuntu0."  # NVIDIA's packages for Ubuntu are 580.95.05-0ubuntu1
_FOREIGN = {"akmod-nvidia": "RPM Fusion", "xorg-x11-drv-nvidia": "RPM Fusion", "kmod-nvidia": "ELRepo"}


@dataclass(frozen=True)
class Route:
    """`name` as the table of packages has it, empty if there is none. `directory` is NVIDIA's for this
    distribution, empty where nothing comes from there; `base` the address of that repository; `add` whether
    it must be added first; `modular` whether branches are streams of a dnf module; `ids` what the repository
    is called here; `key` what a mirror is signed with, empty for NVIDIA's own. `said` is true where the
    user chose."""

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
        """How the module may come, the better way first."""
        if self.name == UBUNTU:
            return (PREBUILT, DKMS)
        return (PLAIN,) if self.name == SUSE else (DKMS,)


@dataclass(frozen=True)
class Name:
    """A package by name: whether it must have the driver's version, and whether the plan can do without."""

    name: str
    exact: bool
    must: bool


def choose_route(situation: Situation, wish: Wish, choice: Choice) -> Route:
    """By the distribution, what is installed and what was asked for."""
    system = situation.distribution
    own = {"ubuntu": UBUNTU, "debian": DEBIAN}.get(system.id, SUSE if system.family == "suse" else "")
    foreign = next((who for name, who in _FOREIGN.items() if name in situation.packages.installed), "")
    if foreign and wish.repository != NVIDIA:
        message = f"the driver here comes from {foreign}"
        return Route(
            "",
            refusals=(
                Refusal("other-source", message, f"upgrade it from there, or remove {foreign}'s first"),
            ),
        )
    if system.family not in ("debian", "rhel", "suse"):
        return Route("", refusals=(_unknown(situation, choice),))
    if wish.repository == DISTRIBUTION:
        return _from_distribution(situation, own)
    if not wish.repository and own in (UBUNTU, DEBIAN):
        here, why, source = _prefers_own(situation, own)
        if here:
            return Route(own, decisions=(Decision("from", _WHERE[own], why, source),))
    return _from_nvidia(situation, wish, choice, own)


_NVIDIAS = "NVIDIA's repository"
_WHERE = {
    UBUNTU: "Ubuntu's archive",
    DEBIAN: "Debian's archive (non-free)",
    SUSE: "SUSE's signed module, libraries from NVIDIA's repository",
}


def _prefers_own(situation: Situation, own: str) -> tuple[bool, str, str]:
    """Whether the distribution's own packages are the better ones here, and why."""
    driver = [one for one in situation.packages.containing("nvidia") if "container" not in one.name]
    if own == DEBIAN:
        there = [one for one in driver if one.name in ("nvidia-kernel-dkms", "nvidia-open-kernel-dkms")]
        mine = [one for one in there if "~deb" in one.version or not situation.nvidia_repository]
        return bool(mine) or situation.debian_own, "the driver here is Debian's own", "package database"
    if any(_ARCHIVE_RELEASE in one.version for one in driver):
        return True, "the driver here is from it", "package database"
    if situation.nvidia_repository:
        return False, "", ""
    if situation.nvlink5 and situation.switches:
        return False, "", ""  # nvlsm is in NVIDIA's alone
    why = "its modules are built and signed for each kernel, so that Secure Boot and upgrades are no matter"
    return True, why, known_as_of(PACKAGES)


def _from_distribution(situation: Situation, own: str) -> Route:
    if own in (UBUNTU, DEBIAN):
        decision = Decision("from", _WHERE[own], "you asked for it", "--repository distribution")
        return Route(own, said=True, decisions=(decision,))
    name = situation.distribution.name or situation.distribution.id
    return Route(
        "",
        refusals=(
            Refusal("no-repository", f"{name} has no driver of its own for computing", "--repository nvidia"),
        ),
    )


def _from_nvidia(situation: Situation, wish: Wish, choice: Choice, own: str) -> Route:
    row = _row(situation)
    if row is None:
        return Route("", refusals=(_unknown(situation, choice),))
    own_mirror = wish.repository not in ("", NVIDIA)
    mirror = wish.repository if own_mirror else f"https://{REPOSITORY}"
    base = f"{mirror.rstrip('/')}/{row['directory']}/{situation.architecture}"
    name = {UBUNTU: CUDA_UBUNTU, DEBIAN: CUDA_DEBIAN, SUSE: SUSE}.get(own, CUDA_RPM)
    add = not situation.has(base if own_mirror else REPOSITORY)
    if add and own_mirror and situation.distribution.family == "debian" and not wish.key:
        return Route("", refusals=(_mirror(base),))
    if wish.repository:
        why, source = "you asked for it", f"--repository {wish.repository}"
    elif situation.nvidia_repository:
        why, source = "it is set up here", "package manager's repositories"
    elif situation.nvlink5 and situation.switches:
        why, source = "nvlsm, which these NVSwitches need, is there alone", known_as_of(PACKAGES)
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


def _mirror(base: str) -> Refusal:
    """NVIDIA's package that sets apt up names NVIDIA's own address, and a key must come from somebody."""
    return Refusal(
        "mirror-not-set-up",
        f"apt doesn't know {base} yet, and its key has to come from you",
        "give the key that the mirror is signed with: --key FILE",
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
    """NVIDIA's commands for Azure Linux, whose package manager gpunode doesn't drive; "" elsewhere, and for
    GPUs that need the proprietary module, which NVIDIA's guide doesn't offer there."""
    row = _row(situation)
    if row is None or situation.distribution.id != "azurelinux" or choice.flavour != OPEN:
        return ""
    install = "tdnf install azurelinux-repos-extended && tdnf install nvidia-open"
    if situation.nvidia_repository:
        return install
    name = f"cuda-{row['directory']}.repo"
    address = f"https://{REPOSITORY}/{row['directory']}/{situation.architecture}/{name}"
    return f"curl -fsSLo /etc/yum.repos.d/{name} {address} && {install}"


def _unknown(situation: Situation, choice: Choice) -> Refusal:
    name = situation.distribution.name or situation.distribution.id or "this distribution"
    if command := install_by_tdnf(situation, choice):
        return Refusal("no-repository", f"gpunode doesn't drive tdnf, the package manager of {name}", command)
    return Refusal(
        "no-repository",
        f"no driver packages are known for {name}",
        "see https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/",
    )


def package_names(situation: Situation, route: Route, choice: Choice, way: str) -> tuple[Name, ...]:
    """The driver's packages on this route, in the table's order; `way` is one of the route's."""
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
    """The kernel's flavour as its packages are called: ``generic``, and ``generic-hwe-22.04`` where the
    package that brings new kernels is that one."""
    kind = kernel_flavour(situation.kernel)
    if situation.distribution.id != "ubuntu":
        return kind
    tracks = [
        one.name.removeprefix("linux-image-")
        for one in situation.packages.starting(f"linux-image-{kind}")
        if one.name.removeprefix("linux-image-").startswith((f"{kind}-hwe-", f"{kind}-lts-"))
    ]
    return tracks[-1] if tracks else kind
