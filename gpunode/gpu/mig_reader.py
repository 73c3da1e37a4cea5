"""How every GPU is cut, from an open NVML. One GPU that can't be read never hides the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpunode.gpu.mig_calls import InstanceInfo, MigCalls, ProfileInfo
from gpunode.gpu.mig_model import (
    ComputeInstance,
    ComputeProfile,
    GpuInstance,
    GpuLayout,
    Layouts,
    Profile,
    inferred_compute,
)
from gpunode.gpu.model import profile_name
from gpunode.gpu.nvml import FUNCTION_NOT_FOUND, NO_PERMISSION, NOT_SUPPORTED, Handle, Nvml, NvmlError

_NOT_TOLD = (NOT_SUPPORTED, FUNCTION_NOT_FOUND)


def read_layouts(nvml: Nvml) -> Layouts:
    """All GPUs, in NVML's order. `NvmlError` only if NVML as a whole fails."""
    gpus = tuple(read_gpu(nvml, index) for index in range(nvml.device_count()))
    return Layouts(nvml.driver_version(), gpus)


def read_gpu(nvml: Nvml, index: int) -> GpuLayout:
    """One GPU; what can't be read of it is in `error`, or in `untold` where only rights are missing."""
    told: dict[str, Any] = {"uuid": "", "index": index, "name": "", "pci": ""}
    try:
        _tell(nvml, nvml.handle(index), told)
    except NvmlError as error:
        told["error"] = str(error)
    return GpuLayout(**told)


def _tell(nvml: Nvml, gpu: Handle, told: dict[str, Any]) -> None:
    calls = MigCalls(nvml)
    told["uuid"] = nvml.uuid(gpu)
    told["pci"], told["device_id"], told["subsystem_id"] = nvml.pci_ids(gpu)
    told["name"] = nvml.name(gpu)
    told["minor"] = _optional(lambda: nvml.minor(gpu), None)
    told["memory_bytes"] = memory = _optional(lambda: nvml.memory_bytes(gpu), 0)
    told["architecture"] = _optional(lambda: int(nvml.call("nvmlDeviceGetArchitecture", gpu)), 0)
    told["virtualization"] = _optional(lambda: int(nvml.call("nvmlDeviceGetVirtualizationMode", gpu)), 0)
    modes = _optional(lambda: calls.modes(gpu), None)
    if modes is None:
        return
    told["capable"] = True
    told["current"], told["pending"] = modes
    try:
        _tell_instances(nvml, calls, gpu, memory, told)
    except NvmlError as error:
        if error.code != NO_PERMISSION:
            raise
        told["untold"] = str(error)


def _tell_instances(nvml: Nvml, calls: MigCalls, gpu: Handle, memory: int, told: dict[str, Any]) -> None:
    offered = calls.profiles(gpu)
    told["profiles"] = tuple(_profile(one, memory) for one in offered)
    found: dict[int, tuple[ProfileInfo, InstanceInfo]] = {}
    if told["current"]:
        for profile in offered:
            found |= {one.id: (profile, one) for one in calls.gpu_instances(gpu, profile)}
    compute = {one.index: calls.compute_profiles(info.handle) for one, info in found.values()}
    profiles = []
    for one in offered:
        places = calls.placements(gpu, one.id)
        examples = [info.handle for profile, info in found.values() if profile.index == one.index]
        known = _compute(calls, examples[0], compute[one.index]) if examples else ()
        free = calls.free(gpu, one.id) if told["current"] else None
        profiles.append(_profile(one, memory, placements=places, free=free, compute=known))
    told["profiles"] = tuple(profiles)
    told["slots"] = max((place.end for one in profiles for place in one.placements), default=0)
    named = {one.index: one for one in profiles}
    uuids = _uuids(nvml, gpu) if found else {}
    told["instances"] = tuple(
        _instance(calls, info, named[profile.index], compute[profile.index], uuids)
        for _, (profile, info) in sorted(found.items())
    )


def _profile(info: ProfileInfo, memory: int, **more: Any) -> Profile:
    computed = profile_name(info.slices, info.slices, info.memory_mib, memory or 1, info.index)
    name = info.name or computed
    return Profile(
        info.index,
        info.id,
        name,
        info.slices,
        info.memory_mib,
        info.count,
        info.sms,
        aliases=() if name == computed or not memory else (computed,),
        **{**more, "compute": more.get("compute") or inferred_compute(info.slices)},
    )


def _compute(calls: MigCalls, gi: Handle, offered: tuple[ProfileInfo, ...]) -> tuple[ComputeProfile, ...]:
    """What a GPU instance of this profile takes, as NVML tells it of one that is there."""
    inferred = {one.slices: one for one in inferred_compute(max((one.slices for one in offered), default=0))}
    found: dict[int, ComputeProfile] = {}
    for one in offered:
        places = calls.compute_placements(gi, one.id)
        if not places and one.slices in inferred:
            places = inferred[one.slices].placements
        found.setdefault(one.slices, ComputeProfile(one.slices, one.count, places))
    return tuple(found.values())


def _instance(
    calls: MigCalls,
    info: InstanceInfo,
    profile: Profile,
    offered: tuple[ProfileInfo, ...],
    uuids: dict[tuple[int, int], str],
) -> GpuInstance:
    compute: dict[int, ComputeInstance] = {}
    for one in offered:
        for ci in calls.compute_instances(info.handle, one):
            if ci.profile_id == one.id:
                uuid = uuids.get((info.id, ci.id), "")
                place = ci.placement if ci.placement.size else None
                compute[ci.id] = ComputeInstance(ci.id, one.slices, place, uuid)
    return GpuInstance(
        info.id,
        profile.index,
        profile.id,
        profile.name,
        profile.slices,
        info.placement,
        tuple(compute[number] for number in sorted(compute)),
        profile.aliases,
    )


def _uuids(nvml: Nvml, gpu: Handle) -> dict[tuple[int, int], str]:
    """The UUID of each MIG device by its instances."""
    return {nvml.mig_instances(device): nvml.uuid(device) for _, device in nvml.mig_handles(gpu)}


def _optional(read: Callable[[], Any], default: Any) -> Any:
    try:
        return read()
    except NvmlError as error:
        if error.code in _NOT_TOLD:
            return default
        raise
