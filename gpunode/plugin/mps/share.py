"""What a container of an MPS-shared resource gets beside its GPUs. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from gpunode.plugin.model import AllocationError, Mount, Resource, Snapshot, Unit
from gpunode.plugin.mps.layout import MPS, directory_of, memory_share, per_gpu, root_of, thread_share
from gpunode.plugin.settings import Settings

PIPE = "CUDA_MPS_PIPE_DIRECTORY"
THREADS = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
MEMORY = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
VISIBLE = "CUDA_VISIBLE_DEVICES"
_OLD_CLIENTS, _CLIENTS, _NEW_CLIENTS = 16, 48, 60


def limit(compute_capability: str, cuda_version: str = "") -> int:
    """How many clients one GPU can have.

    nvidia-cuda-mps-control(1): 16 up to compute capability 6.x, 48 from 7.0 on; NVIDIA's MPS documentation of
    release 590: 60, since CUDA 13.1. `cuda_version` is the driver's. A capability that isn't known counts as
    a present one.
    """
    capability = _numbers(compute_capability)
    if capability and capability < (7, 0):
        return _OLD_CLIENTS
    return _NEW_CLIENTS if _numbers(cuda_version) >= (13, 1) else _CLIENTS


def container_parts(
    settings: Settings, snapshot: Snapshot, ids: Sequence[str]
) -> tuple[Mapping[str, str], tuple[Mount, ...]]:
    """Environment and mounts for these devices; empty for a resource that isn't shared with MPS.

    The limits grow with the shares: k of N shares of a GPU may use k/N of its memory, and of its threads. A
    variable holds one percentage for all GPUs of a container, so the smallest counts.
    """
    resource = snapshot.resource
    if resource.sharing != MPS or not ids:
        return {}, ()
    held = _held(snapshot, ids)
    if not held:
        return {}, ()  # whole GPUs that no entry of the configuration shares
    shares = resource.share_counts
    units = [unit for unit in resource.units if unit.id in held]
    directories = {directory_of(settings, resource, unit) for unit in units}
    if len(directories) > 1:
        raise AllocationError("these shares belong to different MPS daemons; ask for one share only")
    mib = {unit.id: memory_share(unit, shares[unit.id], held[unit.id]) for unit in units}
    pipe = f"/mps/{resource.name}/pipe"
    env = {
        PIPE: pipe,
        THREADS: str(min(thread_share(shares[unit.id], held[unit.id]) for unit in units)),
        **_memory(settings, resource, mib),
        **_visible(settings, resource, units),
    }
    return env, (
        Mount(f"{directories.pop()}/pipe", pipe),
        Mount(f"{root_of(settings)}/shm", "/dev/shm"),  # noqa: S108 - where CUDA looks for it
    )


def _held(snapshot: Snapshot, ids: Sequence[str]) -> Counter[str]:
    """How many shares of each shared unit these ids are; empty if there are only whole units."""
    held: Counter[str] = Counter()
    whole = ""
    for device_id in dict.fromkeys(ids):
        device = snapshot.find(device_id)
        if device is None:
            raise AllocationError(f"unknown device {device_id!r}", code="not-found")
        if device.id == device.unit.id:
            whole = device.id
        else:
            held[device.unit.id] += 1
    if whole and held:
        raise AllocationError(
            f"{whole} is a whole GPU: a client of MPS could not see it; ask for shares or for whole GPUs"
        )
    return held


def _memory(settings: Settings, resource: Resource, mib: Mapping[str, int]) -> dict[str, str]:
    """One limit for each GPU whose size is known.

    Numbers count what the daemon sees; with more than one GPU there, or with somebody else's daemon, the
    UUID is the name without two meanings, and the variable takes it.
    """
    alone = settings.mps and (len(resource.share_counts) == 1 or per_gpu(settings, resource))
    told = [f"{0 if alone else unit}={size}M" for unit, size in mib.items() if size]
    return {MEMORY: ",".join(told)} if told else {}


def _visible(settings: Settings, resource: Resource, units: Sequence[Unit]) -> dict[str, str]:
    """A client sees whatever the daemon sees, also GPUs that its container wasn't given.

    So where a daemon has several the container names its own, by UUID: the daemon counts them anew.
    """
    if per_gpu(settings, resource) or (settings.mps and len(resource.share_counts) == 1):
        return {}
    return {VISIBLE: ",".join(unit.id for unit in units)}


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())
