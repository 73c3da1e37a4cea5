"""What mends a disagreement between a CUDA release and this node."""

from __future__ import annotations

from gpunode.checks import fixes
from gpunode.facts.node import Node
from gpunode.facts.traits import TRAITS
from gpunode.result import Fix


def other_release(release: str) -> Fix:
    """Which CUDA the program should be built with; the doctor is asked again about that one."""
    return Fix(f"gpunode doctor --cuda {release}", False)


OTHER_RELEASE = fixes.everywhere("gpunode doctor --cuda 12.9", needs_root=False)
SAMPLE = "nvcr.io/nvidia/k8s/cuda-sample:vectoradd-cuda12.5.0"


def newer_driver(node: Node) -> Fix | None:
    """None for the distribution's own way; the GPU operator has its driver in the cluster's hands."""
    if TRAITS["operator-driver"].holds(node):
        return Fix("kubectl edit clusterpolicies.nvidia.com", False, "drain")
    return None
