"""What the checks of this room have in common: which GPUs were told of, and how evidence names them."""

from __future__ import annotations

from collections.abc import Callable

from gpunode.checks.health import remedies
from gpunode.checks.model import Verdict, seen, skip
from gpunode.facts.node import Node
from gpunode.gpu.condition import Condition
from gpunode.gpu.model import Gpu
from gpunode.result import Evidence, Fix

SILENT = "NVML doesn't tell how the GPUs are"


def said(gpu: Condition | Gpu, value: object) -> Evidence:
    return seen(f"NVML, GPU {gpu.index} ({gpu.pci})" if gpu.pci else f"NVML, GPU {gpu.index}", value)


def those(node: Node, holds: Callable[[Condition], bool]) -> tuple[Condition, ...]:
    return tuple(gpu for gpu in node.conditions if holds(gpu))


def untold(node: Node, tells: Callable[[Condition], bool]) -> Verdict | None:
    """A skip where no GPU says anything of the matter."""
    if not node.conditions:
        return skip(SILENT)
    return None if any(tells(gpu) for gpu in node.conditions) else skip("neither GPU nor driver tells")


def how_many(gpus: tuple[Condition, ...], node: Node) -> str:
    return f"{len(gpus)} of {len(node.conditions)} GPUs"


def reset(node: Node, gpus: tuple[Condition, ...]) -> Fix:
    inventory = node.nvml.inventory
    capability = inventory.gpus[0].compute_capability if inventory and inventory.gpus else ""
    return remedies.reset(gpus, capability)
