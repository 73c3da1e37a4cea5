"""What a container gets for the devices that the kubelet chose. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gpunode.errors import GpunodeError
from gpunode.plugin.devices import Snapshot

VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"


class AllocationError(GpunodeError):
    """A request that can't be met, in words for the pod's events. `code`: not-found, invalid, unhealthy."""

    default_code = "invalid"


def environment(table: Snapshot, ids: Sequence[str]) -> dict[str, str]:
    """The variables that make the nvidia runtime inject these GPUs: UUIDs in request order, each once.

    `AllocationError` names a device that isn't there, with those that are, or one that is unhealthy, with the
    reason: a container would not start on it, and would not say why.
    """
    wanted = tuple(dict.fromkeys(ids))
    if not wanted:
        raise AllocationError("the request names no device")
    for device_id in wanted:
        device = table.find(device_id)
        if device is None:
            known = ", ".join(item.id for item in table.devices) or "none"
            raise AllocationError(f"unknown device {device_id!r}; known devices: {known}", code="not-found")
        if not device.healthy:
            raise AllocationError(f"device {device_id} is unhealthy: {device.problem}", code="unhealthy")
    return {VISIBLE_DEVICES: ",".join(wanted)}
