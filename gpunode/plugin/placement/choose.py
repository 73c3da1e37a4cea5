"""Which of the available devices a container should get. Pure, deterministic, and never an error.

The kubelet takes the answer as a hint but fails the pod on an error, so an impossible request is answered as
well as it can be. Whole GPUs go by their links (`aligned`), shares and partitions are spread or packed
(`shares`). The order in which the kubelet names devices, which is random, doesn't matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpunode.gpu.model import Topology
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.model import SHARE_MARK, Device, Resource, Snapshot
from gpunode.plugin.placement.aligned import machine_of
from gpunode.plugin.placement.scores import Nearness, by_links
from gpunode.plugin.placement.shares import choose_shares
from gpunode.plugin.placement.together import choose_together


def prefer(
    settings: Settings,
    snapshot: Snapshot,
    topology: Topology,
    available: Sequence[str],
    must_include: Sequence[str],
    size: int,
    nearness: Callable[[Topology], Nearness] = by_links,
    together: bool = False,
) -> tuple[str, ...]:
    """At most `size` ids: all of `must_include` first (as many as fit), then some of `available`.

    Of `available`, unknown ids and unhealthy devices are passed over; an unknown id that must be included is
    given back. `nearness` is another vendor's view of the links; pass the same function every time, as what
    is worked out for a machine is kept by it. With `together` partitions come from as few GPUs as will do,
    whatever the policy.
    """
    known = snapshot.by_id
    must = set(must_include)
    fixed = sorted((known[one] for one in must if one in known), key=_order)
    strange = sorted(one for one in must if one not in known)
    told = tuple([device.id for device in fixed] + strange)[: max(size, 0)]
    need = size - len(told)
    if need <= 0:
        return told
    free = [
        device
        for one in set(available)
        if one not in must and (device := known.get(one)) is not None and device.problem is None
    ]
    if need >= len(free):
        chosen = sorted(free, key=_order)
    elif together and divisible(snapshot.resource) and not shared(snapshot.resource):
        chosen = choose_together(free, fixed, need, nearness(topology), _order)
    elif divisible(snapshot.resource):
        packed = settings.shared_devices_allocation_policy == "packed"
        chosen = choose_shares(snapshot.resource, free, fixed, need, packed)
    else:
        machine = machine_of(snapshot.resource, topology, nearness)
        places = machine.positions
        found = machine.choose(
            [places[device.unit.id] for device in (*fixed, *free)],
            [places[device.unit.id] for device in fixed],
            len(fixed) + need,
        )
        here = {machine.units[position].id for position in found.group}
        chosen = sorted((device for device in free if device.unit.id in here), key=_order)
    return told + tuple(device.id for device in chosen)


def divisible(resource: Resource) -> bool:
    """Whether shares or partitions are among its devices: those aren't aligned."""
    return shared(resource) or any(device.unit.partition for device in resource.devices)


def shared(resource: Resource) -> bool:
    """Whether shares are among its devices."""
    return resource.shares > 1 or any(SHARE_MARK in device.id for device in resource.devices)


def _order(device: Device) -> tuple[tuple[int, ...], str, int, str]:
    unit, number = device.unit, device.id.rpartition(SHARE_MARK)[2]
    return (unit.order, unit.id, int(number) if number.isdecimal() else 0, device.id)
