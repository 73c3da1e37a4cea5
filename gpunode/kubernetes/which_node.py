"""Which Node object this machine is, where the cluster has none of the name that was thought of.

A node's name needn't be its host's (kubelet's --hostname-override, cloud providers); what the kubelet reports
of the machine is the same everywhere: machine-id and the firmware's UUID (Kubernetes, NodeSystemInfo).
"""

from __future__ import annotations

import shlex

from gpunode.errors import GpunodeError
from gpunode.host import Host
from gpunode.kubernetes.api import Cluster, ClusterError, Json

_MOST = 2000  # nodes that are looked at for a hint
_FILES = {
    "machineID": ("/etc/machine-id", "/var/lib/dbus/machine-id"),
    "systemUUID": ("/sys/class/dmi/id/product_uuid",),
}


def hint(host: Host, cluster: Cluster, source: str) -> str:
    """What to do about a node that isn't there, whose name is from `source`.

    No more than a hint: machines that were cloned share these numbers.
    """
    own = _own(host)
    try:
        nodes = cluster.list_nodes(_MOST) if own else ()
    except ClusterError:
        nodes = ()  # this account may not list them; it was a courtesy
    found = [shlex.quote(one["metadata"]["name"]) for one in nodes if _is(one, own)]
    if len(found) == 1:
        return f"the name is from {source}; this machine is the node {found[0]}: add --node {found[0]}"
    return f"the name is from {source}; see: kubectl get nodes, then add --node NAME"


def is_this_machine(host: Host, node: Json) -> bool:
    """Whether the kubelet of this Node object reports this machine's numbers."""
    return _is(node, _own(host))


def _own(host: Host) -> dict[str, str]:
    found = {}
    for key, paths in _FILES.items():
        for path in paths:
            try:
                text = (host.read_text(path) or "").strip().lower()
            except GpunodeError:
                continue  # the firmware's is for root alone
            if text:
                found[key] = text
                break
    return found


def _is(node: Json, own: dict[str, str]) -> bool:
    status = node.get("status")
    told = status.get("nodeInfo") if isinstance(status, dict) else None
    if not isinstance(told, dict):
        return False
    return any(str(told.get(key) or "").lower() == value for key, value in own.items())
