"""What closes a driver's hole on this very node: whoever brought the release brings the next one."""

from __future__ import annotations

from gpunode.checks.driver import packages
from gpunode.facts.driver import version_numbers
from gpunode.facts.node import Node
from gpunode.facts.traits import TRAITS
from gpunode.result import Fix

_OPERATOR_GUIDE = "https://docs.nvidia.com/datacenter/cloud-native/gpu-operator/latest/upgrade.html"
# the packages that pull in the rest of a driver, by the beginning of their names
_DRIVERS = (
    *("nvidia-driver", "nvidia-open", "cuda-drivers", "nvidia-headless", "nvidia-compute-utils-G0"),
    *("nvidia-kernel-dkms", "nvidia-kernel-open-dkms"),
)
_UPGRADES = {
    "debian": "apt update && apt install --only-upgrade {} && reboot",
    "rhel": "dnf upgrade {} && reboot",
    "suse": "zypper update {} && reboot",
}


def driver_upgrade(node: Node, wanted: str) -> Fix | None:
    """To release `wanted` or later, in the branch that is here, else the one that this distribution brings;
    None: the usual remedy holds."""
    if TRAITS["operator-driver"].holds(node):
        return Fix(f"follow {_OPERATOR_GUIDE}", needs_root=False)
    if version_numbers(node.next_version) >= version_numbers(wanted):
        return Fix("reboot", True, "reboot")
    names = [package.name for package in node.packages.starting(*_DRIVERS)]
    command = _UPGRADES.get(node.distribution.family, "")
    if not names or not command or len(names) > 8:
        return packages.install_driver(node)
    return Fix(command.format(" ".join(names)), True, "reboot")
