"""What closes a driver's hole on this very node: whoever brought the release brings the next one."""

from __future__ import annotations

from gpunode.checks.driver import packages
from gpunode.facts.driver import version_numbers
from gpunode.facts.node import Node
from gpunode.facts.traits import TRAITS
from gpunode.result import Fix

_OPERATOR_GUIDE = "https://docs.nvidia.com/datacenter/cloud-native/gpu-operator/latest/upgrade.html"


def driver_upgrade(node: Node, wanted: str) -> Fix:
    """To release `wanted` or later; the plan stays in the branch that is here while it gets fixes."""
    if TRAITS["operator-driver"].holds(node):
        return Fix(f"follow {_OPERATOR_GUIDE}", needs_root=False)
    if version_numbers(node.next_version) >= version_numbers(wanted):
        return Fix("reboot", True, "reboot")
    return packages.install_driver(node)
