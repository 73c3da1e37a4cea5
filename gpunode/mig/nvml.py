"""MIG through an open NVML: typed calls that read and change instances, and the layouts of all GPUs.

Reading instances needs root or read access to the capability mig/monitor, changing them root or mig/config;
setting the mode needs root. Without these rights NVML returns NO_PERMISSION.

As a child process it serves `session.MigSession`. Its first line is ``{"ready": true}``, or ``{"error":
{"code": 9, "message": "..."}}`` if NVML does not open. Requests are ``{"do": "layouts"}``, ``{"do":
"set-mode", "uuid": U, "on": true}``, ``{"do": "create-gpu-instance", "uuid": U, "profile": ID, "at": [START,
SIZE]}`` (without `at` the driver chooses), and the others in `_ACTIONS`. Responses are ``{"done": {...}}`` or
``{"error": {"code": ..., "message": ..., "what": "GPU 0, GPU instance 3"}}``. It exits at the end of its
input.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from gpunode.gpu.child import Parent
from gpunode.gpu.model import profile_name
from gpunode.gpu.nvml import (
    FUNCTION_NOT_FOUND,
    GPU_INSTANCE_PROFILES,
    INVALID_ARGUMENT,
    NO_PERMISSION,
    NOT_FOUND,
    NOT_SUPPORTED,
    Handle,
    Nvml,
    NvmlError,
    instance_id,
    sysfs_address,
)
from gpunode.mig.model import (
    ComputeInstance,
    ComputeProfile,
    GpuInstance,
    GpuLayout,
    Layouts,
    Placement,
    Profile,
    inferred_compute,
)
from gpunode.output.typed import plain

_COMPUTE_INSTANCE_PROFILES = 9  # NVML_COMPUTE_INSTANCE_PROFILE_COUNT
_SHARED_ENGINES = 0  # NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
_GPU_INSTANCE_INFO = "nvmlGpuInstanceGetInfo"
_COMPUTE_INSTANCE_INFO = "nvmlComputeInstanceGetInfo_v2"
_MOST_PLACES = 16  # 8 slots are the most of any GPU
_ABSENT = (NOT_SUPPORTED, INVALID_ARGUMENT)
_T = TypeVar("_T")
_Default = TypeVar("_Default")


class InstanceInfo(NamedTuple):
    """An instance: NVML's handle, its id, its profile's id and its placement."""

    handle: Handle
    id: int
    profile_id: int
    placement: Placement


# Calls on an open NVML; each raises `NvmlError`.


def _modes(nvml: Nvml, gpu: Handle) -> tuple[bool, bool]:
    """Whether MIG is on, and whether it will be after the next reset. NOT_SUPPORTED without MIG."""
    current, pending = nvml.call("nvmlDeviceGetMigMode", gpu)
    return bool(current), bool(pending)


def _profiles(nvml: Nvml, gpu: Handle, memory: int) -> tuple[Profile, ...]:
    """The GPU instances that this GPU offers, by NVML's numbering; `memory` is the GPU's in bytes."""
    result = []
    for index in range(GPU_INSTANCE_PROFILES):
        info = _unless_absent(nvml, "nvmlDeviceGetGpuInstanceProfileInfo", gpu, index)
        if info is not None:
            slices, memory_mib = int(info.sliceCount), int(info.memorySizeMB)
            computed = profile_name(slices, slices, memory_mib, memory or 1, index)
            name = _name(info) or computed
            result.append(
                Profile(
                    index,
                    int(info.id),
                    name,
                    slices,
                    memory_mib,
                    int(info.instanceCount),
                    int(info.multiprocessorCount),
                    aliases=() if name == computed or not memory else (computed,),
                    compute=inferred_compute(slices),
                )
            )
    return tuple(result)


def _compute_profiles(nvml: Nvml, gpu_instance: Handle) -> dict[int, ComputeProfile]:
    """The compute instances that a GPU instance supports, by the driver's id and without placements."""
    profiles = {}
    for index in range(_COMPUTE_INSTANCE_PROFILES):
        call = "nvmlGpuInstanceGetComputeInstanceProfileInfo"
        info = _unless_absent(nvml, call, gpu_instance, index, _SHARED_ENGINES)
        if info is not None:
            profiles[int(info.id)] = ComputeProfile(int(info.sliceCount), int(info.instanceCount))
    return profiles


def _unless_absent(nvml: Nvml, call: str, *arguments: Any) -> Any:
    """The profile's structure, or its older version from older drivers; None if it isn't offered."""
    try:
        return nvml.call(call, *arguments)
    except NvmlError as error:
        if error.code in _ABSENT:
            return None
        if error.code != FUNCTION_NOT_FOUND:
            raise
    return _unless(_ABSENT, lambda: nvml.call(call, *arguments, 1), None)


def _unless(codes: Collection[int], read: Callable[[], _T], default: _Default) -> _T | _Default:
    """What `read` returns, or `default` for an error with one of these codes."""
    try:
        return read()
    except NvmlError as error:
        if error.code in codes:
            return default
        raise


def _places(nvml: Nvml, call: str, structure: str, of: Handle, profile_id: int) -> tuple[Placement, ...]:
    """The possible placements of a profile's instances, free or not."""
    places, count = nvml.structure(structure, _MOST_PLACES), ctypes.c_uint(_MOST_PLACES)
    nvml.call(call, of, profile_id, places, ctypes.byref(count))
    placements = {
        Placement(int(place.start), int(place.size)) for place in places[: min(count.value, _MOST_PLACES)]
    }
    return tuple(sorted(placements, key=lambda place: (place.start, place.size)))


def _free(nvml: Nvml, gpu: Handle, profile_id: int) -> int | None:
    """How many more GPU instances of a profile fit now; None if MIG is off or it isn't reported."""
    call = "nvmlDeviceGetGpuInstanceRemainingCapacity"
    return _unless((FUNCTION_NOT_FOUND, *_ABSENT), lambda: int(nvml.call(call, gpu, profile_id)), None)


def _info(nvml: Nvml, call: str, instance: Handle) -> InstanceInfo:
    info = nvml.call(call, instance)
    place = Placement(int(info.placement.start), int(info.placement.size))
    return InstanceInfo(instance, int(info.id), int(info.profileId), place)


def _listed(
    nvml: Nvml, call: str, structure: str, of: Handle, profile_id: int, most: int
) -> tuple[Handle, ...]:
    """The instances with that profile on a GPU, or on a GPU instance."""
    room = max(most, _MOST_PLACES)
    handles, count = nvml.structure(structure, room), ctypes.c_uint(room)
    try:
        nvml.call(call, of, profile_id, handles, ctypes.byref(count))
    except NvmlError as error:
        if error.code in _ABSENT:  # MIG is off, or has just been switched off
            return ()
        raise
    return tuple(Handle(handle, of.gpu) for handle in handles[: min(count.value, room)])


def _name(info: Any) -> str:
    """``1g.10gb+me`` from NVML's ``MIG 1g.10gb+me``; "" from a structure without a name."""
    try:
        name = str(getattr(info, "name", ""))
    except UnicodeDecodeError:
        return ""
    return name.strip().removeprefix("MIG ").strip()


# The layouts of all GPUs. A GPU that cannot be read never hides the others.

_NOT_TOLD = (NOT_SUPPORTED, FUNCTION_NOT_FOUND)
_NO_PROCESSES = (NOT_SUPPORTED, NOT_FOUND, FUNCTION_NOT_FOUND)


def read_layouts(nvml: Nvml) -> Layouts:
    """All GPUs, in NVML's order. `NvmlError` only if NVML as a whole fails."""
    gpus = tuple(read_gpu(nvml, index) for index in range(nvml.device_count()))
    return Layouts(nvml.driver_version(), gpus)


def read_gpu(nvml: Nvml, index: int) -> GpuLayout:
    """Read one GPU; `error` has what can't be read, `untold` is set where only the permission is missing."""
    values: dict[str, Any] = {"uuid": "", "index": index, "name": "", "pci": ""}
    try:
        _read_into(nvml, nvml.handle(index), values)
    except NvmlError as error:
        values["error"] = str(error)
    return GpuLayout(**values)


def _read_into(nvml: Nvml, gpu: Handle, values: dict[str, Any]) -> None:
    values["uuid"] = nvml.uuid(gpu)
    pci = nvml.call("nvmlDeviceGetPciInfo", gpu)
    values["pci"] = sysfs_address(pci.busId)
    values["device_id"], values["subsystem_id"] = int(pci.pciDeviceId), int(pci.pciSubSystemId)
    values["name"] = nvml.name(gpu)
    values["minor"] = _unless(_NOT_TOLD, lambda: nvml.minor(gpu), None)
    values["memory_bytes"] = memory = _unless(_NOT_TOLD, lambda: nvml.memory_bytes(gpu), 0)
    values["architecture"] = int(_unless(_NOT_TOLD, partial(nvml.call, "nvmlDeviceGetArchitecture", gpu), 0))
    virtualization = partial(nvml.call, "nvmlDeviceGetVirtualizationMode", gpu)
    values["virtualization"] = int(_unless(_NOT_TOLD, virtualization, 0))
    modes = _unless(_NOT_TOLD, lambda: _modes(nvml, gpu), None)
    if modes is None:
        return
    values["capable"] = True
    values["current"], values["pending"] = modes
    try:
        _read_instances(nvml, gpu, memory, values)
    except NvmlError as error:
        if error.code != NO_PERMISSION:
            raise
        values["untold"] = str(error)


def _read_instances(nvml: Nvml, gpu: Handle, memory: int, values: dict[str, Any]) -> None:
    values["profiles"] = offered = _profiles(nvml, gpu, memory)
    result: dict[int, tuple[Profile, InstanceInfo]] = {}
    if values["current"]:
        call = "nvmlDeviceGetGpuInstances"
        for profile in offered:
            for gi in _listed(nvml, call, "c_nvmlGpuInstance_t", gpu, profile.id, profile.max_count):
                info = _info(nvml, _GPU_INSTANCE_INFO, gi)
                result[info.id] = profile, info
    examples = {profile.index: info.handle for profile, info in result.values()}
    compute = {index: _compute_profiles(nvml, handle) for index, handle in examples.items()}
    profiles = {}
    for offer in offered:
        call = "nvmlDeviceGetGpuInstancePossiblePlacements"
        read = partial(_places, nvml, call, "c_nvmlGpuInstancePlacement_t", gpu, offer.id)
        places = _unless(_ABSENT, read, ())  # an error in one profile must not hide the GPU
        example = examples.get(offer.index)
        known = _compute(nvml, example, compute[offer.index]) if example is not None else ()
        free = _free(nvml, gpu, offer.id) if values["current"] else None
        profiles[offer.index] = replace(offer, placements=places, free=free, compute=known or offer.compute)
    values["profiles"] = tuple(profiles.values())
    ends = (place.end for profile in profiles.values() for place in profile.placements)
    values["slots"] = max(ends, default=0)
    # the UUID of each MIG device by its instances
    uuids = {nvml.mig_instances(mig): nvml.uuid(mig) for _, mig in nvml.mig_handles(gpu)} if result else {}
    values["instances"] = tuple(
        _instance(nvml, info, profiles[profile.index], compute[profile.index], uuids)
        for _, (profile, info) in sorted(result.items())
    )


def _compute(nvml: Nvml, gi: Handle, offered: Mapping[int, ComputeProfile]) -> tuple[ComputeProfile, ...]:
    """The compute instances of this profile, as NVML reports them of an existing GPU instance."""
    most = max((offer.slices for offer in offered.values()), default=0)
    inferred = {entry.slices: entry.placements for entry in inferred_compute(most)}
    result: dict[int, ComputeProfile] = {}
    for profile_id, offer in offered.items():
        call = "nvmlGpuInstanceGetComputeInstancePossiblePlacements"
        read = partial(_places, nvml, call, "c_nvmlComputeInstancePlacement_t", gi, profile_id)
        places = _unless((FUNCTION_NOT_FOUND, *_ABSENT), read, ())  # drivers before 525 report none
        places = places or inferred.get(offer.slices, ())
        result.setdefault(offer.slices, offer._replace(placements=places))
    return tuple(result.values())


def _instance(
    nvml: Nvml,
    info: InstanceInfo,
    profile: Profile,
    offered: Mapping[int, ComputeProfile],
    uuids: Mapping[tuple[int, int], str],
) -> GpuInstance:
    compute: dict[int, ComputeInstance] = {}
    for profile_id, offer in offered.items():
        call, kind = "nvmlGpuInstanceGetComputeInstances", "c_nvmlComputeInstance_t"
        for handle in _listed(nvml, call, kind, info.handle, profile_id, offer.max_count):
            ci = _info(nvml, _COMPUTE_INSTANCE_INFO, handle)
            if ci.profile_id == profile_id:
                uuid = uuids.get((info.id, ci.id), "")
                place = ci.placement if ci.placement.size else None
                compute[ci.id] = ComputeInstance(ci.id, offer.slices, place, uuid)
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


# The child process: one response per request.

Question = Mapping[str, Any]


def main() -> int:
    """Return 0 after any error of NVML; another exit code means a crash."""
    parent = Parent()
    try:
        with Nvml.for_parent(parent) as nvml:
            parent.send(ready=True)
            for line in sys.stdin:
                parent.send(**_reply(nvml, json.loads(line)))
    except NvmlError as error:
        parent.send(error=error.document)
    return 0


def _reply(nvml: Nvml, question: Question) -> dict[str, Any]:
    try:
        return {"done": _ACTIONS[question["do"]](nvml, question)}
    except NvmlError as error:
        return {"error": {**error.document, "what": _subject(nvml, question)}}


def _subject(nvml: Nvml, question: Question) -> str:
    """The GPU and instance of a request, for messages."""
    uuid = question.get("uuid", "")
    try:
        words = [f"GPU {_gpu(nvml, question).gpu}"] if uuid else []
    except NvmlError:
        words = [f"GPU {uuid}"]
    words += [f"GPU instance {question['gi']}"] if "gi" in question else []
    words += [f"compute instance {question['ci']}"] if "ci" in question else []
    return ", ".join(words)


def _gpu(nvml: Nvml, question: Question) -> Handle:
    """The GPU's handle, read for each request, because a change of the mode may invalidate handles.

    `Nvml.handle_by_uuid` would query every GPU without naming the one that hangs.
    """
    for index in range(nvml.device_count()):
        try:
            gpu = nvml.handle(index)
            if nvml.uuid(gpu) == question["uuid"]:
                return gpu
        except NvmlError:
            continue  # another GPU's failure doesn't matter here
    raise NvmlError(NOT_FOUND)


def _gpu_instance(nvml: Nvml, question: Question) -> Handle:
    """The GPU instance of a request; NOT_FOUND if it doesn't exist."""
    return nvml.part("nvmlDeviceGetGpuInstanceById", _gpu(nvml, question), question["gi"])


def _at(nvml: Nvml, structure: str, question: Question) -> Any:
    """NVML's structure for the placement of a request; None if the driver shall choose it."""
    if "at" not in question:
        return None
    place = nvml.structure(structure)
    place.start, place.size = question["at"]
    return ctypes.byref(place)


def _layouts(nvml: Nvml, _question: Question) -> Any:
    return plain(read_layouts(nvml))


def _set_mode(nvml: Nvml, question: Question) -> Any:
    nvml.call("nvmlDeviceSetMigMode", _gpu(nvml, question), int(question["on"]))
    return {"active": _modes(nvml, _gpu(nvml, question))[0] == question["on"]}


def _create_gpu_instance(nvml: Nvml, question: Question) -> Any:
    """INSUFFICIENT_RESOURCES if it doesn't fit."""
    gpu, profile = _gpu(nvml, question), question["profile"]
    at = _at(nvml, "c_nvmlGpuInstancePlacement_t", question)
    if at is None:
        gi = nvml.part("nvmlDeviceCreateGpuInstance", gpu, profile)
    else:
        gi = nvml.part("nvmlDeviceCreateGpuInstanceWithPlacement", gpu, profile, at)
    info = _info(nvml, _GPU_INSTANCE_INFO, gi)
    return {"id": info.id, "at": [info.placement.start, info.placement.size]}


def _create_compute_instance(nvml: Nvml, question: Question) -> Any:
    """At the requested placement if the driver supports that, else where it chooses."""
    gi, slices = _gpu_instance(nvml, question), question["slices"]
    offers = _compute_profiles(nvml, gi).items()
    profile = next((profile_id for profile_id, offer in offers if offer.slices == slices), None)
    if profile is None:
        raise NvmlError(NOT_SUPPORTED, f"it takes no compute instance of {slices} slices")
    at = _at(nvml, "c_nvmlComputeInstancePlacement_t", question)
    call = "nvmlGpuInstanceCreateComputeInstance"
    placed = partial(nvml.part, f"{call}WithPlacement", gi, profile, at)
    ci = _unless((FUNCTION_NOT_FOUND,), placed, None) if at is not None else None
    return {"id": _info(nvml, _COMPUTE_INSTANCE_INFO, ci or nvml.part(call, gi, profile)).id}


def _destroy_gpu_instance(nvml: Nvml, question: Question) -> Any:
    """IN_USE while it has a compute instance or a process uses it."""
    nvml.call("nvmlGpuInstanceDestroy", _gpu_instance(nvml, question))
    return {}


def _destroy_compute_instance(nvml: Nvml, question: Question) -> Any:
    """IN_USE while a process uses it; NOT_FOUND if it doesn't exist."""
    gi = _gpu_instance(nvml, question)
    nvml.call(
        "nvmlComputeInstanceDestroy", nvml.part("nvmlGpuInstanceGetComputeInstanceById", gi, question["ci"])
    )
    return {}


def _processes(nvml: Nvml, question: Question) -> Any:
    """Compute and graphics processes on the GPU or its MIG devices; ids are None for the GPU as a whole."""
    gpu = _gpu(nvml, question)
    result: set[tuple[int, int | None, int | None]] = set()
    mig_devices = nvml.mig_handles(gpu) if nvml.mig_mode(gpu) else ()
    for device in (gpu, *(mig_device for _, mig_device in mig_devices)):
        here = (None, None) if device is gpu else nvml.mig_instances(device)
        for call in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
            for process in _unless(_NO_PROCESSES, partial(nvml.call, call, device), ()):
                gi, ci = (instance_id(process.gpuInstanceId), instance_id(process.computeInstanceId))
                result.add((int(process.pid), here[0] if gi is None else gi, here[1] if ci is None else ci))
    placed = {pid for pid, gi, _ in result if gi is not None}
    return [
        list(entry) for entry in sorted(result, key=repr) if entry[1] is not None or entry[0] not in placed
    ]


_ACTIONS: Mapping[str, Callable[[Nvml, Question], Any]] = {
    "layouts": _layouts,
    "set-mode": _set_mode,
    "create-gpu-instance": _create_gpu_instance,
    "create-compute-instance": _create_compute_instance,
    "destroy-gpu-instance": _destroy_gpu_instance,
    "destroy-compute-instance": _destroy_compute_instance,
    "processes": _processes,
}

if __name__ == "__main__":
    sys.exit(main())
