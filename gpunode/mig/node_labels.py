"""The two labels by which a cluster follows a node's MIG layout, kept as the GPU operator's mig-manager does.

``nvidia.com/mig.config`` is the configuration's name, ``nvidia.com/mig.config.state`` how far it is: pending,
then success or failed. Whoever wants another layout may set the first one; what can't be had is failed then.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpunode.errors import UsageError
from gpunode.host import Host
from gpunode.kubernetes import changes
from gpunode.kubernetes.access import ACCOUNT, Access, connect, node_name
from gpunode.kubernetes.api import Json, Patch
from gpunode.kubernetes.changes import label_patch, strings
from gpunode.output.result import Progress

if TYPE_CHECKING:
    from gpunode.kubernetes.client import Cluster

CONFIG = "nvidia.com/mig.config"
STATE = "nvidia.com/mig.config.state"
PENDING, SUCCESS, FAILED = "pending", "success", "failed"
_VALUE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", re.ASCII)


@dataclass(frozen=True)
class NodeLabels:
    """The labels of one Node object. With `follows` the configuration is for others to name, at any time:
    only the state is set, and only while it is of the configuration that is asked for."""

    cluster: Cluster
    node: str
    follows: bool = False

    def seen(self) -> tuple[str, str]:
        """The Node's configuration and its state, empty where it has none. Asked once; `ClusterError`."""
        labels = strings(self.cluster.get("Node", self.node), ("metadata", "labels"))
        return labels.get(CONFIG, ""), labels.get(STATE, "")

    def asked(self, host: Host, progress: Progress) -> str:
        """The configuration that the Node's label names; empty if it names none. `ClusterError`."""
        node = changes.patiently(host, progress, lambda: self.cluster.get("Node", self.node))
        return strings(node, ("metadata", "labels")).get(CONFIG, "")

    def tell(self, host: Host, progress: Progress, label: str, state: str) -> None:
        """Set both labels in one patch, or nothing; `ClusterError`. Tried again where that is safe."""
        wanted: dict[str, str | None] = {STATE: state} if self.follows else {CONFIG: label, STATE: state}

        def planned(node: Json) -> Patch:
            other = strings(node, ("metadata", "labels")).get(CONFIG, "") != label
            return () if self.follows and other else label_patch(node, wanted)

        with progress.step(f"label {self.node}: {STATE}={state}"):
            changes.change(
                host,
                progress,
                lambda: self.cluster.get("Node", self.node),
                planned,
                lambda patch: self.cluster.patch("Node", self.node, patch),
            )


def connected(host: Host, access: Access, node: str, *, follows: bool = False) -> NodeLabels:
    """Nothing is asked yet. What `access.connect` raises; `UsageError` for what is no node's name."""
    cluster = connect(host, access)
    return NodeLabels(cluster, node_name(host, node, cluster.node)[0], follows)


def check(label: str) -> None:
    """`UsageError` if a configuration's name can't be a label's value."""
    if not _VALUE.fullmatch(label):
        raise UsageError(
            f"{label!r} can't be the value of {CONFIG}",
            hint="rename the configuration: letters, digits, '-', '_' and '.', at most 63",
        )


def in_pod(host: Host) -> bool:
    """Whether we run in a pod with an account at its API server."""
    return bool(host.environ.get("KUBERNETES_SERVICE_HOST")) and host.exists(f"{ACCOUNT}/token")
