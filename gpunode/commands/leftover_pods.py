"""Test pods that a killed run of `gpunode verify --on kubernetes` left on this node."""

from __future__ import annotations

from datetime import datetime

from gpunode.host import Host
from gpunode.kubernetes.api import Cluster, ClusterError, Json
from gpunode.kubernetes.manifests.vector_add import HOSTNAME, RUN, ours
from gpunode.runtime import container_leftovers

_MAKER = "gpunode/maker"


def made_by(host: Host) -> dict[str, str]:
    """The annotation by which a later run on this machine knows whether the maker of a pod still runs."""
    return {_MAKER: f"{_machine(host)}.{container_leftovers.maker(host)}"}


def sweep(host: Host, cluster: Cluster, namespace: str, hostname: str) -> None:
    """Remove pods of ours that are for the node of that name, and of a run that surely is no more."""
    try:
        for pod in cluster.list_pods(namespace, ours()):
            if _is_for(pod, hostname) and (_maker_is_dead(host, pod) or _is_old(host, pod)):
                cluster.delete_pod(namespace, str(pod["metadata"]["name"]))
    except ClusterError:
        return  # it was a courtesy; what really is amiss shows at the next request


def _machine(host: Host) -> str:
    return (host.read_text("/etc/machine-id") or "").strip()


def _is_for(pod: Json, hostname: str) -> bool:
    labels, spec = (pod.get("metadata") or {}).get("labels") or {}, pod.get("spec") or {}
    return RUN in labels and (spec.get("nodeSelector") or {}).get(HOSTNAME) == hostname


def _maker_is_dead(host: Host, pod: Json) -> bool:
    told = str(((pod.get("metadata") or {}).get("annotations") or {}).get(_MAKER) or "")
    machine, _, maker = told.rpartition(".")
    return bool(machine) and machine == _machine(host) and container_leftovers.is_dead(host, maker)


def _is_old(host: Host, pod: Json) -> bool:
    """Long past its own deadline, whatever the two clocks say."""
    try:
        made = datetime.fromisoformat(str(pod["metadata"].get("creationTimestamp"))).timestamp()
        allowed = float((pod.get("spec") or {}).get("activeDeadlineSeconds") or 0)
    except (OverflowError, TypeError, ValueError):
        return False
    return host.now() - made > 2 * allowed + 600
