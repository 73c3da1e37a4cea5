"""Whether a GPU is what a configuration says, by mig-parted's measure: the mode and the count of devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from gpunode.mig.layout import GpuLayout
from gpunode.mig.placement import meaning, summary
from gpunode.mig.wishes import Wish


def difference(wish: Wish, *, mode_only: bool = False) -> str:
    """What differs, in words; empty if nothing does. Where the instances lie makes no difference, and a GPU
    instance without a compute instance is no device."""
    gpu = wish.gpu
    if gpu.current != wish.enabled:
        wanted, now = ("on", "off") if wish.enabled else ("off", "on")
        waits = ", the change waits for a reset" if gpu.pending == wish.enabled else ""
        return f"GPU {gpu.index}: MIG is {now}, wanted is {wanted}{waits}"
    if mode_only or not wish.enabled:
        return ""
    have = Counter((gi.profile, ci.slices) for gi in gpu.instances for ci in gi.compute)
    want: Counter[tuple[int, int]] = Counter()
    for name, count in wish.profiles.items():
        found = meaning(gpu, name)
        if found is None:
            return f"GPU {gpu.index}: it has no profile {name}"
        want[found[0].index, found[1]] += count
    if have == want:
        return ""
    return f"GPU {gpu.index}: it has {_told(gpu.devices())}, wanted is {_told(wish.profiles)}"


def _told(devices: Mapping[str, int]) -> str:
    return summary(devices) or "no MIG device"


def empty_instances(gpu: GpuLayout) -> tuple[int, ...]:
    """Ids of GPU instances that hold nothing: they take room, and mig-parted doesn't see them."""
    return tuple(one.id for one in gpu.instances if not one.compute)
