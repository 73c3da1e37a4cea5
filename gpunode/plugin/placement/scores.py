"""How near two GPUs are, as a number that adds up, and as the word that nvidia-smi has for it.

NVLink counts most, through an NVSwitch as much as direct; then what the two have in common on the PCIe side.
NVIDIA's plugin has the same scale, but gives links to switches nothing. NVML's level already tells whether
two GPUs are on the same NUMA node: a bonus for that would make groups win that are worse on NVIDIA's scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpunode.gpu.model import Pair, Topology
from gpunode.plugin.model import Unit

Nearness = Callable[[Unit, Unit], int]
"""Higher is nearer. Only differences between pairs matter, so that it may be negative."""

PER_LINK = 100
SAME_GPU = 10_000
_FURTHEST = 60
_WORDS = {
    0: "INT",
    10: "PIX",
    20: "PXB",
    30: "PHB",
    40: "NODE",
    50: "SYS",
}  # NVML's levels, nvidia-smi's words
_WITHIN_NODE, _ACROSS = 40, 50


@dataclass(frozen=True)
class Near:
    """Two GPUs: NVML's `level` (None if neither NVML nor NUMA tell), NVLinks from one to the other `direct`
    and through `switch`, and whether they are partitions of one GPU.
    """

    level: int | None
    direct: int
    switch: int
    same_gpu: bool = False

    @property
    def score(self) -> int:
        """Per link 100, by ancestor from 60 (one board) to 10 (another socket)."""
        if self.same_gpu:
            return SAME_GPU
        near = 0 if self.level is None else max(_FURTHEST - self.level, 0)
        return PER_LINK * (self.direct + self.switch) + near

    @property
    def word(self) -> str:
        """NV12, PIX, PXB, PHB, NODE, SYS as in ``nvidia-smi topo -m``."""
        links = self.direct + self.switch
        return f"NV{links}" if links else _WORDS.get(-1 if self.level is None else self.level, "?")


class Links:
    """Looks pairs of units up in a topology."""

    def __init__(self, topology: Topology) -> None:
        self._pairs = {(pair.first, pair.second): pair for pair in topology.pairs}
        self._switch = topology.switch_links

    def near(self, a: Unit, b: Unit) -> Near:
        """How near they are; where NVML's ancestor is missing the NUMA nodes stand in for it."""
        pair = self._pairs.get((min(a.gpu, b.gpu), max(a.gpu, b.gpu))) or Pair(a.gpu, b.gpu)
        if a.gpu == b.gpu:
            return Near(0, 0, 0, same_gpu=True)
        level = pair.level
        if level is None and a.numa is not None and b.numa is not None:
            level = _WITHIN_NODE if a.numa == b.numa else _ACROSS
        switch = min(self._switch.get(a.gpu, 0), self._switch.get(b.gpu, 0))
        return Near(level, pair.nvlinks, switch)

    def score(self, a: Unit, b: Unit) -> int:
        return self.near(a, b).score


def by_links(topology: Topology) -> Nearness:
    """NVIDIA GPUs."""
    return Links(topology).score
