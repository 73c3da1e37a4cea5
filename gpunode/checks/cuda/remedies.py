"""What mends a disagreement between a CUDA release and this node."""

from __future__ import annotations

from collections.abc import Callable

from gpunode.checks import fixes
from gpunode.checks.driver import packages, targets
from gpunode.facts import gpu_support
from gpunode.facts.cuda_releases import last_for, makes_code_for, newest_of, release
from gpunode.facts.cuda_wanted import inventory
from gpunode.facts.node import Node
from gpunode.facts.traits import TRAITS
from gpunode.result import Fix


def other_release(release: str) -> Fix:
    """Which CUDA the program should be built with; the doctor is asked again about that one."""
    return Fix(f"gpunode doctor --cuda {release}", False)


def other_image(release: str) -> Fix:
    """No driver that runs the image drives these GPUs, so the image has to be another one."""
    return Fix(f"use an image of CUDA {release} or older", False)


OTHER_RELEASE = fixes.everywhere("gpunode doctor --cuda 12.9", needs_root=False)


def newer_driver(
    node: Node, wanted: tuple[int, int] | None = None, other: Callable[[str], Fix] = other_release
) -> Fix:
    """A driver of a newer branch than the one that is here; where none drives these GPUs or runs the wanted
    CUDA, what `other` says of the last release of CUDA that they can have."""
    known = inventory(node)
    for gpu in known.gpus if known and wanted else ():
        if wanted and makes_code_for(wanted, gpu.compute_capability) == "dropped":
            return other(last_for(gpu.compute_capability))
    if TRAITS["operator-driver"].holds(node):
        return Fix("kubectl edit clusterpolicies.nvidia.com", False, "drain")
    branch = _branch_above(node, wanted)
    offered = newest_of(node.driver_version)
    if not branch and offered:
        return other(f"{offered[0]}.{offered[1]}")
    return packages.install_driver(node, branch)


def _branch_above(node: Node, wanted: tuple[int, int] | None) -> int:
    """The branch to change to; 0 if no newer one drives these GPUs."""
    known = release(wanted) if wanted else None
    above = gpu_support.branch(node.driver_version) + 1
    least = max(above, gpu_support.branch(known.minimum) if known else 0)
    last = targets.last_branch(node)
    fitting = (one for one in (targets.LONG_TERM, *sorted(gpu_support.kept())) if one >= least)
    return next((one for one in fitting if not last or one <= last), 0)
