"""The pod that proves it: NVIDIA's vector-add sample on one GPU of one node."""

from __future__ import annotations

from gpunode.dataclass import dataclass
from gpunode.kubernetes.manifests.common import COMPONENT, RESTRICTED, Json, filled, labels

CONTAINER = "vector-add"
RUN = "gpunode/run"
"""Label with a value of one run's own: by it a pod is found whose name was never heard."""
HOSTNAME = "kubernetes.io/hostname"
_USER = 65532  # any that isn't root: the device files are open to all


@dataclass(frozen=True)
class VectorAdd:
    """`seconds`: how long the pod may be active. `hostname`: the node's label of that name; empty: any node.

    `resource` stands in the limits alone: Kubernetes makes the request of it.
    """

    image: str
    resource: str = "nvidia.com/gpu"
    namespace: str = ""
    hostname: str = ""
    runtime_class: str = ""
    seconds: int = 300
    run: str = ""


def vector_add(wanted: VectorAdd) -> Json:
    """A Pod that ends by itself and fits a namespace of the level restricted.

    With `run` it is one of many: its name is left to the server. It tolerates the resource's own taint, and
    goes through the scheduler, which a nodeName would pass by.
    """
    named: Json = {"generateName": "gpunode-vector-add-"} if wanted.run else {"name": "gpunode-vector-add"}
    marks = labels("vector-add") | ({RUN: wanted.run} if wanted.run else {})
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": named | filled(namespace=wanted.namespace) | {"labels": marks},
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": wanted.seconds,
            **filled(runtimeClassName=wanted.runtime_class),
            **filled(nodeSelector={HOSTNAME: wanted.hostname} if wanted.hostname else {}),
            "tolerations": [{"key": wanted.resource, "operator": "Exists", "effect": "NoSchedule"}],
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 5,
            "securityContext": {"runAsNonRoot": True, "runAsUser": _USER, "runAsGroup": _USER},
            "containers": [
                {
                    "name": CONTAINER,
                    "image": wanted.image,
                    "resources": {"limits": {wanted.resource: "1"}},
                    "securityContext": RESTRICTED,
                }
            ],
        },
    }


def ours(component: str = "vector-add") -> dict[str, str]:
    """The labels by which such pods are found, whatever run they are of."""
    return {key: value for key, value in labels(component).items() if key != COMPONENT}
