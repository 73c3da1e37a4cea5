"""What an Allocate asks for: which requests can be met at all. Pure, and the same for every vendor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpunode.plugin.model import SHARE_MARK, AllocationError, Device, Problem, Resource, Snapshot

_SHOWN = 8
_SHOWN_CHARACTERS = 80


def requested(snapshot: Snapshot, ids: Sequence[str], mends: Mapping[str, str]) -> list[Device]:
    """The devices with these ids. `AllocationError` names one that isn't there, with some that are, or one
    that is unhealthy, with the reason; `mends` has for each `Problem.mend` what to say, ``{0}`` is the GPU's
    index."""
    if not ids:
        raise AllocationError("the request names no device")
    devices = []
    shares = 0
    for device_id in ids:
        device = snapshot.find(device_id)
        if device is None:
            raise _unknown(snapshot, device_id)
        if device.problem:
            raise _unhealthy(device, device.problem, mends)
        shares += SHARE_MARK in device_id
        devices.append(device)
    if shares and len(ids) > 1 and snapshot.resource.single_share:
        raise _too_many_shares(snapshot.resource, len(ids))
    return devices


def _unhealthy(device: Device, problem: Problem, mends: Mapping[str, str]) -> AllocationError:
    mend = mends.get(problem.mend, "").format(device.unit.index.partition(":")[0])
    return AllocationError(
        f"device {device.id} is unhealthy: {problem.reason}{mend}",
        hint="gpunode plugin status",
        code="unhealthy",
    )


def _unknown(snapshot: Snapshot, device_id: str) -> AllocationError:
    known = [device.id for device in snapshot.devices[:_SHOWN]]
    more = len(snapshot.devices) - len(known)
    told = ", ".join(known) + (f" and {more} more" if more else "")
    shown = device_id if len(device_id) <= _SHOWN_CHARACTERS else f"{device_id[:_SHOWN_CHARACTERS]}..."
    return AllocationError(
        f"invalid request: unknown device {shown!r}; {snapshot.resource.name} has {told or 'none'}",
        code="not-found",
    )


def _too_many_shares(resource: Resource, count: int) -> AllocationError:
    section = "mps" if resource.sharing == "mps" else "timeSlicing"
    return AllocationError(
        f"maximum request size for shared resources is 1; found {count}: ask for one {resource.name}, or set "
        f"failRequestsGreaterThanOne to false in sharing.{section} (two shares may be of the same GPU)"
    )
