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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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
_MOST_PLACES = 16  # 8 slots are the most of any GPU
_ABSENT = (NOT_SUPPORTED, INVALID_ARGUMENT)


@dataclass(frozen=True)
class ProfileInfo:
    """A profile as NVML describes it; `name` is "" if the driver is too old to report it.

    `sms` and `memory_mib` are a GPU instance profile's.
    """

    index: int
    id: int
    slices: int
    count: int
    name: str = ""
    memory_mib: int = 0
    sms: int = 0


@dataclass(frozen=True)
class InstanceInfo:
    """An instance: NVML's handle, its id, its profile's id and its placement."""

    handle: Handle
    id: int
    profile_id: int
    placement: Placement


class MigCalls:
    """The calls on an open NVML; each raises `NvmlError`."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml

    # --- modes -----------------------------------------------------------------------------------------

    def modes(self, gpu: Handle) -> tuple[bool, bool]:
        """Whether MIG is on, and whether it will be after the next reset. NOT_SUPPORTED without MIG."""
        current, pending = self._nvml.call("nvmlDeviceGetMigMode", gpu)
        return bool(current), bool(pending)

    # --- profiles --------------------------------------------------------------------------------------

    def profiles(self, gpu: Handle) -> tuple[ProfileInfo, ...]:
        """The GPU instances that this GPU offers, by NVML's numbering."""
        result = []
        for index in range(GPU_INSTANCE_PROFILES):
            info = self._unless_absent("nvmlDeviceGetGpuInstanceProfileInfo", gpu, index)
            if info is not None:
                result.append(
                    ProfileInfo(
                        index,
                        int(info.id),
                        int(info.sliceCount),
                        int(info.instanceCount),
                        _name(info),
                        int(info.memorySizeMB),
                        int(info.multiprocessorCount),
                    )
                )
        return tuple(result)

    def compute_profiles(self, gpu_instance: Handle) -> tuple[ProfileInfo, ...]:
        """The compute instances that a GPU instance supports."""
        call = "nvmlGpuInstanceGetComputeInstanceProfileInfo"
        profiles = []
        for index in range(_COMPUTE_INSTANCE_PROFILES):
            info = self._unless_absent(call, gpu_instance, index, _SHARED_ENGINES)
            if info is not None:
                count = int(info.instanceCount)
                profiles.append(ProfileInfo(index, int(info.id), int(info.sliceCount), count, _name(info)))
        return tuple(profiles)

    def _unless_absent(self, call: str, *arguments: Any) -> Any:
        """The profile's structure, or its older version from older drivers; None if it isn't offered."""
        try:
            return self._nvml.call(call, *arguments)
        except NvmlError as error:
            if error.code in _ABSENT:
                return None
            if error.code != FUNCTION_NOT_FOUND:
                raise
        try:
            return self._nvml.call(call, *arguments, 1)
        except NvmlError as error:
            if error.code in _ABSENT:
                return None
            raise

    def placements(self, gpu: Handle, profile_id: int) -> tuple[Placement, ...]:
        """The possible placements of a GPU instance, free or not; none if the driver doesn't report them."""
        call = "nvmlDeviceGetGpuInstancePossiblePlacements"
        try:
            return self._places(call, "c_nvmlGpuInstancePlacement_t", gpu, profile_id)
        except NvmlError as error:
            if error.code in _ABSENT:  # an error in one profile must not hide the GPU
                return ()
            raise

    def compute_placements(self, gpu_instance: Handle, profile_id: int) -> tuple[Placement, ...]:
        """The possible placements of a compute instance in its GPU instance; none from drivers before 525."""
        call = "nvmlGpuInstanceGetComputeInstancePossiblePlacements"
        try:
            return self._places(call, "c_nvmlComputeInstancePlacement_t", gpu_instance, profile_id)
        except NvmlError as error:
            if error.code in (FUNCTION_NOT_FOUND, *_ABSENT):
                return ()
            raise

    def _places(self, call: str, structure: str, of: Handle, profile_id: int) -> tuple[Placement, ...]:
        places, count = self._nvml.structure(structure, _MOST_PLACES), ctypes.c_uint(_MOST_PLACES)
        self._nvml.call(call, of, profile_id, places, ctypes.byref(count))
        placements = {
            Placement(int(place.start), int(place.size)) for place in places[: min(count.value, _MOST_PLACES)]
        }
        return tuple(sorted(placements, key=lambda place: (place.start, place.size)))

    def free(self, gpu: Handle, profile_id: int) -> int | None:
        """How many more GPU instances of a profile fit now; None if MIG is off or it isn't reported."""
        try:
            return int(self._nvml.call("nvmlDeviceGetGpuInstanceRemainingCapacity", gpu, profile_id))
        except NvmlError as error:
            if error.code in (FUNCTION_NOT_FOUND, *_ABSENT):
                return None
            raise

    # --- instances -------------------------------------------------------------------------------------

    def gpu_instances(self, gpu: Handle, profile: ProfileInfo) -> tuple[InstanceInfo, ...]:
        """The GPU instances with that profile."""
        handles = self._listed(
            "nvmlDeviceGetGpuInstances", "c_nvmlGpuInstance_t", gpu, profile.id, profile.count
        )
        return tuple(self.gpu_instance_info(handle) for handle in handles)

    def gpu_instance(self, gpu: Handle, gi: int) -> Handle:
        """The GPU instance with that id; NOT_FOUND if it doesn't exist."""
        return self._nvml.part("nvmlDeviceGetGpuInstanceById", gpu, gi)

    def gpu_instance_info(self, gpu_instance: Handle) -> InstanceInfo:
        return _info(gpu_instance, self._nvml.call("nvmlGpuInstanceGetInfo", gpu_instance))

    def compute_instances(self, gpu_instance: Handle, profile: ProfileInfo) -> tuple[InstanceInfo, ...]:
        """The compute instances with that profile on a GPU instance."""
        call = "nvmlGpuInstanceGetComputeInstances"
        handles = self._listed(call, "c_nvmlComputeInstance_t", gpu_instance, profile.id, profile.count)
        return tuple(self.compute_instance_info(handle) for handle in handles)

    def compute_instance(self, gpu_instance: Handle, ci: int) -> Handle:
        """The compute instance with that id; NOT_FOUND if it doesn't exist."""
        return self._nvml.part("nvmlGpuInstanceGetComputeInstanceById", gpu_instance, ci)

    def compute_instance_info(self, compute_instance: Handle) -> InstanceInfo:
        return _info(compute_instance, self._nvml.call("nvmlComputeInstanceGetInfo_v2", compute_instance))

    def _listed(
        self, call: str, structure: str, of: Handle, profile_id: int, most: int
    ) -> tuple[Handle, ...]:
        room = max(most, _MOST_PLACES)
        handles, count = self._nvml.structure(structure, room), ctypes.c_uint(room)
        try:
            self._nvml.call(call, of, profile_id, handles, ctypes.byref(count))
        except NvmlError as error:
            if error.code in _ABSENT:  # MIG is off, or has just been switched off
                return ()
            raise
        return tuple(Handle(handle, of.gpu) for handle in handles[: min(count.value, room)])

    # --- changes ---------------------------------------------------------------------------------------

    def create_gpu_instance(self, gpu: Handle, profile_id: int, at: Placement | None) -> Handle:
        """Create a GPU instance at the placement `at`, or where the driver chooses;
        INSUFFICIENT_RESOURCES."""
        if at is None:
            return self._nvml.part("nvmlDeviceCreateGpuInstance", gpu, profile_id)
        place = self._place("c_nvmlGpuInstancePlacement_t", at)
        call = "nvmlDeviceCreateGpuInstanceWithPlacement"
        return self._nvml.part(call, gpu, profile_id, place)

    def create_compute_instance(self, gpu_instance: Handle, profile_id: int, at: Placement | None) -> Handle:
        """Create a compute instance at the placement `at` if the driver supports it, else where it
        chooses."""
        if at is not None:
            place = self._place("c_nvmlComputeInstancePlacement_t", at)
            call = "nvmlGpuInstanceCreateComputeInstanceWithPlacement"
            try:
                return self._nvml.part(call, gpu_instance, profile_id, place)
            except NvmlError as error:
                if error.code != FUNCTION_NOT_FOUND:
                    raise
        return self._nvml.part("nvmlGpuInstanceCreateComputeInstance", gpu_instance, profile_id)

    def _place(self, structure: str, at: Placement) -> Any:
        place = self._nvml.structure(structure)
        place.start, place.size = at.start, at.size
        return ctypes.byref(place)

    def destroy_gpu_instance(self, gpu_instance: Handle) -> None:
        """IN_USE while it has a compute instance or a process uses it."""
        self._nvml.call("nvmlGpuInstanceDestroy", gpu_instance)

    def destroy_compute_instance(self, compute_instance: Handle) -> None:
        """IN_USE while a process uses it."""
        self._nvml.call("nvmlComputeInstanceDestroy", compute_instance)


def _info(handle: Handle, info: Any) -> InstanceInfo:
    place = Placement(int(info.placement.start), int(info.placement.size))
    return InstanceInfo(handle, int(info.id), int(info.profileId), place)


def _name(info: Any) -> str:
    """``1g.10gb+me`` from NVML's ``MIG 1g.10gb+me``; "" from a structure without a name."""
    try:
        name = str(getattr(info, "name", ""))
    except UnicodeDecodeError:
        return ""
    return name.strip().removeprefix("MIG ").strip()


# The layouts of all GPUs. A GPU that cannot be read never hides the others.

_NOT_TOLD = (NOT_SUPPORTED, FUNCTION_NOT_FOUND)


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
    calls = MigCalls(nvml)
    values["uuid"] = nvml.uuid(gpu)
    values["pci"], values["device_id"], values["subsystem_id"] = nvml.pci_ids(gpu)
    values["name"] = nvml.name(gpu)
    values["minor"] = _optional(lambda: nvml.minor(gpu), None)
    values["memory_bytes"] = memory = _optional(lambda: nvml.memory_bytes(gpu), 0)
    values["architecture"] = _optional(lambda: int(nvml.call("nvmlDeviceGetArchitecture", gpu)), 0)
    values["virtualization"] = _optional(lambda: int(nvml.call("nvmlDeviceGetVirtualizationMode", gpu)), 0)
    modes = _optional(lambda: calls.modes(gpu), None)
    if modes is None:
        return
    values["capable"] = True
    values["current"], values["pending"] = modes
    try:
        _read_instances(nvml, calls, gpu, memory, values)
    except NvmlError as error:
        if error.code != NO_PERMISSION:
            raise
        values["untold"] = str(error)


def _read_instances(nvml: Nvml, calls: MigCalls, gpu: Handle, memory: int, values: dict[str, Any]) -> None:
    offered = calls.profiles(gpu)
    values["profiles"] = tuple(_profile(profile, memory) for profile in offered)
    result: dict[int, tuple[ProfileInfo, InstanceInfo]] = {}
    if values["current"]:
        for profile in offered:
            result |= {instance.id: (profile, instance) for instance in calls.gpu_instances(gpu, profile)}
    compute = {entry.index: calls.compute_profiles(info.handle) for entry, info in result.values()}
    profiles = []
    for offer in offered:
        places = calls.placements(gpu, offer.id)
        examples = [info.handle for profile, info in result.values() if profile.index == offer.index]
        known = _compute(calls, examples[0], compute[offer.index]) if examples else ()
        free = calls.free(gpu, offer.id) if values["current"] else None
        profiles.append(_profile(offer, memory, placements=places, free=free, compute=known))
    values["profiles"] = tuple(profiles)
    values["slots"] = max((place.end for profile in profiles for place in profile.placements), default=0)
    by_index = {profile.index: profile for profile in profiles}
    uuids = _uuids(nvml, gpu) if result else {}
    values["instances"] = tuple(
        _instance(calls, info, by_index[profile.index], compute[profile.index], uuids)
        for _, (profile, info) in sorted(result.items())
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
    """The compute instances of this profile, as NVML reports them of an existing GPU instance."""
    inferred = {
        entry.slices: entry
        for entry in inferred_compute(max((profile.slices for profile in offered), default=0))
    }
    result: dict[int, ComputeProfile] = {}
    for profile in offered:
        places = calls.compute_placements(gi, profile.id)
        if not places and profile.slices in inferred:
            places = inferred[profile.slices].placements
        result.setdefault(profile.slices, ComputeProfile(profile.slices, profile.count, places))
    return tuple(result.values())


def _instance(
    calls: MigCalls,
    info: InstanceInfo,
    profile: Profile,
    offered: tuple[ProfileInfo, ...],
    uuids: dict[tuple[int, int], str],
) -> GpuInstance:
    compute: dict[int, ComputeInstance] = {}
    for offer in offered:
        for ci in calls.compute_instances(info.handle, offer):
            if ci.profile_id == offer.id:
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
    return MigCalls(nvml).gpu_instance(_gpu(nvml, question), question["gi"])


def _at(question: Question) -> Placement | None:
    place = question.get("at")
    return Placement(*place) if place else None


def _layouts(nvml: Nvml, _question: Question) -> Any:
    return plain(read_layouts(nvml))


def _set_mode(nvml: Nvml, question: Question) -> Any:
    nvml.call("nvmlDeviceSetMigMode", _gpu(nvml, question), int(question["on"]))
    return {"active": MigCalls(nvml).modes(_gpu(nvml, question))[0] == question["on"]}


def _create_gpu_instance(nvml: Nvml, question: Question) -> Any:
    calls = MigCalls(nvml)
    gi = calls.create_gpu_instance(_gpu(nvml, question), question["profile"], _at(question))
    info = calls.gpu_instance_info(gi)
    return {"id": info.id, "at": [info.placement.start, info.placement.size]}


def _create_compute_instance(nvml: Nvml, question: Question) -> Any:
    calls, gi = MigCalls(nvml), _gpu_instance(nvml, question)
    profiles = [profile.id for profile in calls.compute_profiles(gi) if profile.slices == question["slices"]]
    if not profiles:
        raise NvmlError(NOT_SUPPORTED, f"it takes no compute instance of {question['slices']} slices")
    instance = calls.create_compute_instance(gi, profiles[0], _at(question))
    return {"id": calls.compute_instance_info(instance).id}


def _destroy_gpu_instance(nvml: Nvml, question: Question) -> Any:
    MigCalls(nvml).destroy_gpu_instance(_gpu_instance(nvml, question))
    return {}


def _destroy_compute_instance(nvml: Nvml, question: Question) -> Any:
    calls = MigCalls(nvml)
    calls.destroy_compute_instance(calls.compute_instance(_gpu_instance(nvml, question), question["ci"]))
    return {}


def _processes(nvml: Nvml, question: Question) -> Any:
    """Compute and graphics processes on the GPU or its MIG devices; ids are None for the GPU as a whole."""
    gpu = _gpu(nvml, question)
    result: set[tuple[int, int | None, int | None]] = set()
    mig_devices = nvml.mig_handles(gpu) if nvml.mig_mode(gpu) else ()
    for device in (gpu, *(mig_device for _, mig_device in mig_devices)):
        here = (None, None) if device is gpu else nvml.mig_instances(device)
        for call in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
            for process in _running(nvml, call, device):
                gi, ci = (instance_id(process.gpuInstanceId), instance_id(process.computeInstanceId))
                result.add((int(process.pid), here[0] if gi is None else gi, here[1] if ci is None else ci))
    placed = {pid for pid, gi, _ in result if gi is not None}
    return [
        list(entry) for entry in sorted(result, key=repr) if entry[1] is not None or entry[0] not in placed
    ]


def _running(nvml: Nvml, call: str, device: Handle) -> list[Any]:
    try:
        return list(nvml.call(call, device))
    except NvmlError as error:
        if error.code in (NOT_SUPPORTED, NOT_FOUND, FUNCTION_NOT_FOUND):
            return []
        raise


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
