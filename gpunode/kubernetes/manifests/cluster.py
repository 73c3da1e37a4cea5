"""Objects that stand beside the plugin: RuntimeClass, Namespace, the labels and taint of a GPU node."""

from __future__ import annotations

from gpunode.kubernetes.manifests.common import Json, made

DOMAINS = {"nvidia": "nvidia.com", "amd": "amd.com"}
PCI_VENDORS = {"nvidia": "10de", "amd": "1002"}
TAINT_VALUE = "present"  # the one that NFD's worker in NVIDIA's chart tolerates, too


def runtime_class(name: str) -> Json:
    """A RuntimeClass that bears its handler's name (node.k8s.io/v1)."""
    return {
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": name},
        "handler": name,
    }


def namespace(name: str, level: str = "privileged") -> Json:
    """A namespace of this level of the Pod Security Standards. The plugin, which mounts directories of the
    node, needs ``privileged``."""
    found = made("v1", "Namespace", name, "device-plugin")
    found["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] = level
    return found


def resource(vendor: str) -> str:
    """What whole GPUs are advertised as."""
    return f"{DOMAINS[vendor]}/gpu"


def present(vendor: str) -> str:
    """The label that says without NFD that a node has GPUs; NVIDIA's plugin goes by it as well."""
    return f"{DOMAINS[vendor]}/gpu.present"


def gpu_node(name: str, vendor: str, *, taint: bool) -> Json:
    """A Node with what marks it as one with GPUs, to be applied to a node that is there.

    A node's taints are one value to the API server: who applies this replaces those that it had.
    """
    node: Json = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {present(vendor): "true"}},
    }
    if taint:
        one = {"key": resource(vendor), "value": TAINT_VALUE, "effect": "NoSchedule"}
        node["spec"] = {"taints": [one]}
    return node
