"""Which cgroup driver the kubelet goes by: its own setting, or what its engine tells it."""

from __future__ import annotations

from gpunode.facts import gates
from gpunode.facts.node import Node


def kubelets_own(node: Node, engine: str, release: tuple[int, ...]) -> str | None:
    """The driver that its configuration names; None if it names none, or if the engine's word counts.

    A kubelet that asks ignores its own setting where the engine is of a release that tells. The kubelet's
    release is only asked for where the engine tells; one that doesn't say is taken for one that asks.
    """
    kubelet = node.kubelet
    if kubelet is None or kubelet.cgroup_driver is None:
        return None
    if not gates.can(engine, "cgroup-driver-told", release):
        return kubelet.cgroup_driver
    asks = gates.can("kubelet", "cgroup-driver-asked", node.kubelet_version)
    return kubelet.cgroup_driver if asks is False else None
