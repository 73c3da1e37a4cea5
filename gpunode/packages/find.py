"""Detection of the node's package manager, and alternatives where packages can't be installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpunode.errors import PreconditionError
from gpunode.facts.packages import read_packages
from gpunode.facts.system import TRANSACTIONAL, Distribution, read_distribution
from gpunode.host import Host
from gpunode.packages.apt import Apt
from gpunode.packages.dnf import Dnf
from gpunode.packages.manager import Manager, PackageState
from gpunode.packages.zypper import Zypper

_ADVICE = {
    "flatcar": "Flatcar takes the toolkit as a system extension (systemd-sysext): its nvidia-runtime image",
    "talos": "Talos takes it as a system extension: nvidia-container-toolkit in the image's schematic",
    "bottlerocket": "Bottlerocket has the toolkit in its -nvidia variants: boot one of those",
    "cos": "Container-Optimized OS brings driver and runtime itself: cos-extensions install gpu",
    "nixos": "set hardware.nvidia-container-toolkit.enable = true, then nixos-rebuild switch",
    "ubuntu-core": "Ubuntu Core takes snaps only: run the engine out of a snap that has the toolkit's parts",
    "guix": "declare the toolkit's package in the system configuration, then guix system reconfigure",
}
_PROGRAMS = {"debian": ("apt-get",), "rhel": ("dnf", "dnf5", "yum"), "suse": ("zypper",)}
_OSTREE_ADVICE = (
    "layer it and reboot: put nvidia-container-toolkit.repo into /etc/yum.repos.d, then rpm-ostree install"
    " nvidia-container-toolkit; or build it into the image, then: gpunode configure-runtime"
)


def find_manager(host: Host) -> Manager:
    """The node's own. `PreconditionError` with a hint if it has none that can install."""
    distribution = read_distribution(host)
    if distribution.immutable:
        raise PreconditionError(
            f"{distribution.name or distribution.id} is an image; packages can't be installed into it",
            hint=instead(distribution),
            code="immutable",
        )
    for family in dict.fromkeys((distribution.family, "debian", "rhel", "suse")):
        # a recorded machine has its files, but not every program; a live one may have another family's too
        recorded = not host.live and family == distribution.family
        there = [program for program in _PROGRAMS.get(family, ()) if host.which(program) is not None]
        if there or (recorded and family in _PROGRAMS):
            return _manager(host, family, there)
    host.refuse_unsafe(*(program for programs in _PROGRAMS.values() for program in programs))
    raise PreconditionError(
        f"{distribution.name or 'this system'} has neither apt-get nor dnf nor zypper",
        hint="install the toolkit by this system's own means, then: gpunode configure-runtime",
        code="no-package-manager",
    )


def _manager(host: Host, family: str, there: Sequence[str]) -> Manager:
    if family == "debian":
        return Apt.of(host)
    if family == "suse":
        return Zypper(host)
    program = there[0] if there else "dnf"
    # dnf is either release; where both are installed, locks and history belong to the one that it is
    path = host.which(program)
    is_five = path is not None and host.realpath(path).endswith("/dnf5")
    return Dnf(host, "dnf5" if is_five else program)


def recorded_states(host: Host, names: Sequence[str]) -> Mapping[str, PackageState]:
    """A recorded machine's packages, if its manager's output wasn't recorded."""
    known = read_packages(host).installed
    return {
        name: PackageState(name, known[name].version, held=known[name].held)
        if name in known
        else PackageState(name)
        for name in names
    }


def instead(distribution: Distribution) -> str:
    """Alternatives on a system that is an image, or is declared as a whole."""
    if distribution.id in TRANSACTIONAL:
        return (
            "install it into the next snapshot and reboot: transactional-update pkg install"
            " nvidia-container-toolkit, then: gpunode configure-runtime"
        )
    return _ADVICE.get(distribution.id, _OSTREE_ADVICE)
