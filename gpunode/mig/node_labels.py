"""The two labels that show a node's MIG layout to the cluster, set as the GPU operator's mig-manager does.

``nvidia.com/mig.config`` is the configuration's name, ``nvidia.com/mig.config.state`` its progress: pending,
then success or failed. A cluster user requests another layout with the first label; a layout that isn't
possible leads to failed.
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
class NodeMigLabels:
    """The labels of one Node object.

    With `follows` other users set the configuration at any time: only the state is written, and only while
    the label still has the configuration that it belongs to.
    """

    cluster: Cluster
    node: str
    follows: bool = False

    def seen(self) -> tuple[str, str]:
        """The Node's configuration and its state, empty where it has none. One request; `ClusterError`."""
        labels = strings(self.cluster.get("Node", self.node), ("metadata", "labels"))
        return labels.get(CONFIG, ""), labels.get(STATE, "")

    def asked(self, host: Host, progress: Progress) -> str:
        """The configuration in the Node's label; empty if it has none. `ClusterError`."""
        node = changes.patiently(host, progress, lambda: self.cluster.get("Node", self.node))
        return strings(node, ("metadata", "labels")).get(CONFIG, "")

    def tell(self, host: Host, progress: Progress, label: str, state: str) -> None:
        """Set both labels in one patch, or neither; `ClusterError`. Retried where that is safe."""
        desired: dict[str, str | None] = {STATE: state} if self.follows else {CONFIG: label, STATE: state}

        def planned(node: Json) -> Patch:
            other = strings(node, ("metadata", "labels")).get(CONFIG, "") != label
            return () if self.follows and other else label_patch(node, desired)

        with progress.step(f"label {self.node}: {STATE}={state}"):
            changes.change(
                host,
                progress,
                lambda: self.cluster.get("Node", self.node),
                planned,
                lambda patch: self.cluster.patch("Node", self.node, patch),
            )


def connected(host: Host, access: Access, node: str, *, follows: bool = False) -> NodeMigLabels:
    """Connect without sending a request. Raises what `access.connect` does.

    `UsageError` for an invalid node name.
    """
    cluster = connect(host, access)
    return NodeMigLabels(cluster, node_name(host, node, cluster.node)[0], follows)


def check(label: str) -> None:
    """`UsageError` if a configuration's name isn't a valid label value."""
    if not _VALUE.fullmatch(label):
        raise UsageError(
            f"{label!r} can't be the value of {CONFIG}",
            hint="rename the configuration: letters, digits, '-', '_' and '.', at most 63",
        )


def in_pod(host: Host) -> bool:
    """Whether the process runs in a pod with a service account."""
    return bool(host.environ.get("KUBERNETES_SERVICE_HOST")) and host.exists(f"{ACCOUNT}/token")
