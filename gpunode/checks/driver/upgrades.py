"""Who changes the driver: upgrades that nobody asked for, and two ways to install it at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpunode.checks.driver import packages, remedies, targets
from gpunode.checks.model import Check, Verdict, ok, seen, warn
from gpunode.facts.libraries import CUDA, is_compat
from gpunode.facts.node import Node
from gpunode.facts.packages import Package
from gpunode.facts.traits import OPERATOR_DRIVER
from gpunode.result import Evidence, Fix

if TYPE_CHECKING:
    from gpunode.facts.auto_upgrades import Automatic

_RUN_INSTALLER = "/usr/bin/nvidia-uninstall"
# the packages of the libraries themselves, Ubuntu's with the branch in their names: whatever depends on them
# can't take them along where they are held
_LIBRARIES = (
    "libnvidia-compute",
    "libnvidia-ml1",
    "libcuda1",
    "nvidia-driver-cuda",
    "nvidia-compute-G0",
    "nvidia-compute-utils-G0",
)
_APT_TIMER = "apt-daily-upgrade.timer"
_WIDE = ("nvidia", "*", "developer.download")


def unattended_upgrades_driver(node: Node) -> Verdict:
    upgrades = node.automatic_upgrades
    if upgrades is None:
        return ok("nothing upgrades packages by itself")
    timer = node.units.get(_APT_TIMER) if upgrades.tool == "unattended-upgrades" else None
    if timer is not None and timer.installed and not (timer.runs or timer.at_boot):
        return ok("the timer of unattended-upgrades is off", seen(_APT_TIMER, timer))
    exposed = [one for one in node.packages.starting(*_LIBRARIES) if _exposed(node, upgrades, one)]
    if not exposed:
        return ok(
            f"{upgrades.tool} leaves the driver alone", seen(upgrades.source, upgrades.value, upgrades.line)
        )
    named = ", ".join(f"{one.name} {one.upstream}" for one in exposed[:3])
    return warn(
        f"{upgrades.tool} may replace the driver while it runs",
        seen(upgrades.source, upgrades.value, upgrades.line),
        seen("package database", f"{named}: not held, locked or excluded"),
    )


def _exposed(node: Node, upgrades: Automatic, package: Package) -> bool:
    """Whether this upgrade would take that package along."""
    if package.held or upgrades.leaves(package.name):
        return False
    if node.distribution.family != "debian":
        return True
    wide = any(word in origin.lower() for origin in upgrades.origins for word in _WIDE)
    # Ubuntu has the driver itself, among its security updates; NVIDIA's repository must be named
    own = "-0ubuntu0." in package.version or not targets.has_repository(node)
    return bool(upgrades.origins) and (wide or own)


def driver_two_installs(node: Node) -> Verdict:
    if node.host.is_dir(OPERATOR_DRIVER):
        return _beside_operator(node)
    if node.host.executable(_RUN_INSTALLER):
        packaged = node.packages.starting(*_LIBRARIES)
        if packaged:
            named = ", ".join(f"{one.name} {one.upstream}" for one in packaged[:3])
            return warn(
                "the driver was installed twice: by a .run installer and from packages",
                seen(_RUN_INSTALLER, "left by the .run installer"),
                seen("package database", named),
                fix=_remove(node, packaged),
            )
    copies = tuple(_copies(node))
    if len({one.value for one in copies}) > 1:
        return warn("libraries of two drivers are known to the linker", *copies)
    return ok("the driver is installed once")


def _beside_operator(node: Node) -> Verdict:
    if not node.dkms:
        return ok("the GPU operator's driver is the only one")
    return warn(
        "the GPU operator brings a driver, and this node has one of its own",
        seen(OPERATOR_DRIVER, "the GPU operator's driver"),
        *(seen("/var/lib/dkms", f"source of {version}") for version in node.dkms),
        fix=remedies.NO_OPERATOR_DRIVER.other,
    )


def _copies(node: Node) -> Iterator[Evidence]:
    """Existing files that the linker knows as libcuda.so.1, each with its version."""
    for entry in node.linked_libraries:
        if entry.soname == CUDA and not is_compat(entry.path) and node.host.is_file(entry.path):
            version = re.search(r"\.so\.(\d+\.\d[\d.]*)$", node.host.realpath(entry.path))
            if version:
                yield seen(entry.path, version[1])


def _remove(node: Node, packaged: tuple[Package, ...]) -> Fix | None:
    again = packages.reinstall(node, [one.name for one in packaged])
    return Fix(f"nvidia-uninstall && {again.command}", True, again.disruptive) if again else None


CHECKS = (
    Check(
        id="unattended-upgrades-driver",
        title="Nothing upgrades the driver by itself",
        layer="driver",
        severity="warning",
        looks_at=(
            "unattended-upgrades, dnf-automatic and SUSE's online update, and whether holds, locks, pins or"
            " their own lists keep the driver's libraries from them."
        ),
        why=(
            "Such an upgrade replaces the libraries under the module that runs: from that minute on every "
            "new GPU container fails with Driver/library version mismatch, until the node is rebooted."
        ),
        remedy=remedies.KEEP_DRIVER,
        run=unattended_upgrades_driver,
        blocked_by=("driver-not-installed",),
        unless=("operator-driver", "immutable"),
        refs=("https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/",),
    ),
    Check(
        id="driver-two-installs",
        title="The driver is installed once",
        layer="driver",
        severity="warning",
        looks_at=(
            "nvidia-uninstall of the .run installer beside driver packages, the GPU operator's driver "
            "beside the host's, and copies of libcuda.so.1 of several versions in the linker's cache."
        ),
        why=(
            "Two installations overwrite each other's files: an upgrade of one leaves libraries of the other "
            "behind, and module and libraries part ways."
        ),
        remedy=remedies.REMOVE_RUN_INSTALL,
        run=driver_two_installs,
        blocked_by=(
            *("driver-not-installed", "driver-libs-mixed", "driver-lib-mismatch"),
            "operator-host-driver-conflict",
        ),
        refs=("https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/",),
    ),
)
