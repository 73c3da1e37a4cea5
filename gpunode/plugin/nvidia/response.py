"""What a container gets for the devices that the kubelet chose. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gpunode.plugin.model import AllocationError, Answer, Snapshot
from gpunode.plugin.settings import Settings

VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"


def answer(settings: Settings, snapshot: Snapshot, ids: Sequence[str]) -> Answer:
    """The variables that make the nvidia runtime inject these GPUs: UUIDs in request order, each once.

    `AllocationError` names a device that isn't there, with those that are, or one that is unhealthy, with the
    reason: a container would not start on it, and would not say why.
    """
    if not ids:
        raise AllocationError("the request names no device")
    units = []
    for device_id in ids:
        device = snapshot.find(device_id)
        if device is None:
            known = ", ".join(item.id for item in snapshot.devices) or "none"
            raise AllocationError(f"unknown device {device_id!r}; known devices: {known}", code="not-found")
        if device.problem:
            raise AllocationError(
                f"device {device_id} is unhealthy: {device.problem.reason}", code="unhealthy"
            )
        units.append(device.unit.id)
    return Answer(envs={VISIBLE_DEVICES: ",".join(dict.fromkeys(units))})
