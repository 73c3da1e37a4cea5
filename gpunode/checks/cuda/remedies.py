"""What mends a disagreement between a CUDA release and this node."""

from __future__ import annotations

from gpunode.checks import fixes
from gpunode.checks.driver import packages
from gpunode.checks.fabric.remedies import GUEST_DRIVER
from gpunode.facts.cuda_releases import last_for, makes_code_for
from gpunode.facts.cuda_wanted import inventory
from gpunode.facts.node import Node
from gpunode.facts.system import CONTAINER, WSL2
from gpunode.facts.traits import TRAITS
from gpunode.result import Fix


def other_release(release: str) -> Fix:
    """Which CUDA the program should be built with; the doctor is asked again about that one."""
    return Fix(f"gpunode doctor --cuda {release}", False)


OTHER_RELEASE = fixes.everywhere("gpunode doctor --cuda 12.9", needs_root=False)


def newer_driver(node: Node, wanted: tuple[int, int] | None = None) -> Fix | None:
    """The driver from where this node has its own; where no driver makes a GPU run the wanted CUDA, the last
    release that does. None for the distribution's usual way."""
    known = inventory(node)
    for gpu in known.gpus if known and wanted else ():
        if wanted and makes_code_for(wanted, gpu.compute_capability) == "dropped":
            return other_release(last_for(gpu.compute_capability))
    if TRAITS["operator-driver"].holds(node):
        return Fix("kubectl edit clusterpolicies.nvidia.com", False, "drain")
    if node.kind == WSL2:
        return Fix("follow https://docs.nvidia.com/cuda/wsl-user-guide/", False)
    if node.kind == CONTAINER:
        return fixes.UPGRADE_DRIVER.other
    if TRAITS["vgpu-guest"].holds(node):
        return GUEST_DRIVER.other
    return packages.install_driver(node)
