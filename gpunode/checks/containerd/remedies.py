"""What mends containerd itself."""

from __future__ import annotations

from gpunode.checks.fixes import per_family, upgrade
from gpunode.facts.node import Node
from gpunode.result import Fix

UPGRADE = per_family(
    "apt update && apt install --only-upgrade containerd.io",
    "dnf upgrade containerd.io",
    "zypper update containerd",
    "follow https://containerd.io/docs/getting-started/",
    "restart",
)
_PACKAGES = ("containerd.io", "containerd")
# a Kubernetes distribution's containerd comes with the distribution, so that its user does without NRI
WITHOUT_NRI = Fix(
    "kubectl patch clusterpolicies.nvidia.com/cluster-policy --type merge "
    """--patch '{"spec": {"cdi": {"nriPluginEnabled": false}}}'"""
)


def newer(node: Node) -> Fix:
    """A release that knows NRI well enough, or the operator's way around it."""
    if node.containerd is not None and node.containerd.manager:
        return WITHOUT_NRI
    family = node.distribution.family
    names = [name for name in _PACKAGES if name in node.packages.installed]
    return upgrade(family, names, "restart") or UPGRADE.for_family(family)
