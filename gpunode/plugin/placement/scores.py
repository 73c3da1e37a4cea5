"""Score of how near two GPUs are, as a number that adds up.

NVLink counts most, through an NVSwitch as much as direct; then what the two have in common on the PCIe side.
NVIDIA's plugin has the same scale, but gives links to switches nothing. NVML's level already tells whether
two GPUs are on the same NUMA node: a bonus for that would make groups win that are worse on NVIDIA's scale.
"""

from __future__ import annotations

from collections.abc import Callable

from gpunode.gpu.model import Pair, Topology
from gpunode.plugin.model import Unit

Nearness = Callable[[Unit, Unit], int]
"""Higher is nearer. Only differences between pairs matter, so that it may be negative."""

PER_LINK = 100
SAME_GPU = 10_000
_FURTHEST = 60
_WITHIN_NODE, _ACROSS = 40, 50


class Links:
    """Looks pairs of units up in a topology."""

    def __init__(self, topology: Topology) -> None:
        self._pairs = {(pair.first, pair.second): pair for pair in topology.pairs}
        self._switch = topology.switch_links

    def score(self, a: Unit, b: Unit) -> int:
        """100 per link, and by NVML's common ancestor from 60 (one board) to 10 (another socket). Where NVML
        reports no ancestor the NUMA nodes decide.
        """
        if a.gpu == b.gpu:
            return SAME_GPU
        pair = self._pairs.get((min(a.gpu, b.gpu), max(a.gpu, b.gpu))) or Pair(a.gpu, b.gpu)
        level = pair.level
        if level is None and a.numa is not None and b.numa is not None:
            level = _WITHIN_NODE if a.numa == b.numa else _ACROSS
        near = 0 if level is None else max(_FURTHEST - level, 0)
        switch = min(self._switch.get(a.gpu, 0), self._switch.get(b.gpu, 0))
        return PER_LINK * (pair.nvlinks + switch) + near


def by_links(topology: Topology) -> Nearness:
    """NVIDIA GPUs."""
    return Links(topology).score
