"""Resources shared with MPS, without a node."""

from __future__ import annotations

from collections.abc import Mapping

from gpunode.plugin.model import KubeletDevice, Resource, ResourcePlan, Snapshot, Unit

GIB = 1 << 30
NAME = "nvidia.com/gpu"


def uuid(index: int) -> str:
    return f"GPU-{index:08x}-1111-4222-8333-444444444444"


def unit(index: int, gib: int = 80) -> Unit:
    return Unit(
        uuid(index), uuid(index), str(index), memory_bytes=gib * GIB, compute_capability="9.0", minor=index
    )


def resource(
    shares: Mapping[int, int], *, single: bool = True, gib: int = 80, name: str = NAME, sharing: str = "mps"
) -> Resource:
    """GPUs by index with their number of shares; 0 for one that isn't shared."""
    devices: list[KubeletDevice] = []
    for index, count in shares.items():
        made = unit(index, gib)
        devices += [KubeletDevice(f"{made.id}::{n}", made) for n in range(count)] or [
            KubeletDevice(made.id, made)
        ]
    return Resource(name, tuple(devices), sharing, max(shares.values()), single)


def snapshot(shares: Mapping[int, int], **more) -> Snapshot:
    return Snapshot(1, resource(shares, **more))


def plan(*resources: Resource) -> ResourcePlan:
    return ResourcePlan(resources)
