"""What mends containerd itself."""

from __future__ import annotations

from gpunode.checks.fixes import per_family
from gpunode.facts.node import Node
from gpunode.result import Fix

UPGRADE = per_family(
    "apt update && apt install --only-upgrade containerd.io containerd",
    "dnf upgrade containerd.io",
    "zypper update containerd",
    "follow https://containerd.io/docs/getting-started/",
    "restart",
)
# a Kubernetes distribution's containerd comes with the distribution, so that its user does without NRI
WITHOUT_NRI = Fix(
    "kubectl patch clusterpolicies.nvidia.com/cluster-policy --type merge "
    """--patch '{"spec": {"cdi": {"nriPluginEnabled": false}}}'"""
)


def newer(node: Node) -> Fix:
    """A release that knows NRI well enough, or the operator's way around it."""
    managed = node.containerd is not None and bool(node.containerd.manager)
    return WITHOUT_NRI if managed else UPGRADE.for_family(node.distribution.family)
