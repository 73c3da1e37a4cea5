"""What the kernel's log says, as evidence beside something else that was seen."""

from __future__ import annotations

from gpunode.errors import GpunodeError
from gpunode.facts.kernel_log import SOURCE, matching
from gpunode.facts.node import Node
from gpunode.result import Evidence


def logged(node: Node, pattern: str) -> tuple[Evidence, ...]:
    """Lines of this boot in which the pattern is found, oldest first; () for a user who may not read them."""
    try:
        lines = node.kernel_log
    except GpunodeError:
        return ()
    return tuple(
        Evidence(SOURCE, f"[{line.seconds:.6f}] {line.text}", None) for line, _ in matching(lines, pattern)
    )
