"""Which of the available GPUs a container should get. Pure, deterministic, and never an error.

The kubelet takes the answer as a hint but fails the pod on an error, so an impossible request is answered
as well as it can be. The fewest NUMA nodes win; among those, the tightest fit, which leaves whole nodes to
others; then the lowest index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpunode.plugin.devices import Device, Snapshot

_UNKNOWN = (1, 0)  # where the platform doesn't say: one group, after the known nodes


def preferred(
    table: Snapshot, available: Sequence[str], must_include: Sequence[str], size: int
) -> tuple[str, ...]:
    """At most `size` ids: all of `must_include` first (as many as fit), then some of `available`."""
    known = {device.id: device for device in table.devices}

    def order(device_id: str) -> tuple[int, str]:
        return (known[device_id].index if device_id in known else len(known), device_id)

    fixed = sorted(set(must_include), key=order)[: max(size, 0)]
    free: dict[tuple[int, int], list[str]] = {}
    for device_id in sorted(set(available) - set(must_include), key=order):
        free.setdefault(_node(known.get(device_id)), []).append(device_id)
    near = {_node(known.get(device_id)) for device_id in fixed}
    picked = list(fixed)
    while free and len(picked) < size:
        node = _next_node(free, near, size - len(picked), order)
        near.add(node)
        picked += free.pop(node)[: size - len(picked)]
    return tuple(picked)


def _next_node(
    free: dict[tuple[int, int], list[str]],
    near: set[tuple[int, int]],
    need: int,
    order: Callable[[str], tuple[int, str]],
) -> tuple[int, int]:
    """A node that is in use already, else the fullest fit, else the one with most to give."""
    choices = [node for node in free if node in near] or list(free)
    fitting = [node for node in choices if len(free[node]) >= need]
    if fitting:
        return min(fitting, key=lambda node: (node[0], len(free[node]), order(free[node][0])))
    return min(choices, key=lambda node: (node[0], -len(free[node]), order(free[node][0])))


def _node(device: Device | None) -> tuple[int, int]:
    return _UNKNOWN if device is None or device.numa is None else (0, device.numa)
