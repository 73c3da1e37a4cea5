"""Which of the available devices a container should get. Pure, deterministic, and never an error."""

from __future__ import annotations

from collections.abc import Sequence

from gpunode.gpu.model import Topology
from gpunode.plugin.model import Snapshot
from gpunode.plugin.settings import Settings


def prefer(
    settings: Settings,
    snapshot: Snapshot,
    topology: Topology,
    available: Sequence[str],
    must_include: Sequence[str],
    size: int,
) -> tuple[str, ...]:
    """At most `size` ids: all of `must_include` first (as many as fit), then some of `available`."""
    order = {device.id: number for number, device in enumerate(snapshot.devices)}
    fixed = list(dict.fromkeys(must_include))[: max(size, 0)]
    free = sorted(set(available) - set(fixed), key=lambda item: (order.get(item, len(order)), item))
    return tuple(fixed + free[: size - len(fixed)])
