"""Which cgroup driver the kubelet goes by: its own setting, or what its engine tells it."""

from __future__ import annotations

from gpunode.facts import gates
from gpunode.facts.node import Node


def kubelets_own(node: Node, engine: str, release: tuple[int, ...], used: str) -> str | None:
    """The driver that its configuration names; None if it names none, or if the engine's word counts.

    `used` is the engine's. Where the two differ, it matters whether this kubelet asks its engine and ignores
    its own setting: then its program is asked for its release. One that doesn't say counts as asking.
    """
    kubelet = node.kubelet
    if kubelet is None or kubelet.cgroup_driver in (None, used):
        return kubelet.cgroup_driver if kubelet else None
    if not gates.can(engine, "cgroup-driver-told", release):
        return kubelet.cgroup_driver
    asks = gates.can("kubelet", "cgroup-driver-asked", node.kubelet_version)
    return kubelet.cgroup_driver if asks is False else None
