"""NVML's calls about MIG, typed: profiles and instances as NVML has them, handles as it gave them.

What reads instances needs root or read access to the capability mig/monitor, what changes them root or
mig/config; setting the mode needs root. NO_PERMISSION without.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from gpunode.gpu.mig_model import Placement
from gpunode.gpu.nvml import FUNCTION_NOT_FOUND, INVALID_ARGUMENT, NOT_SUPPORTED, Handle, Nvml, NvmlError

_GPU_INSTANCE_PROFILES = 18  # NVML_GPU_INSTANCE_PROFILE_COUNT
_COMPUTE_INSTANCE_PROFILES = 9  # NVML_COMPUTE_INSTANCE_PROFILE_COUNT
_SHARED_ENGINES = 0  # NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
_MOST_PLACES = 16  # 8 slots are the most that any GPU has
_ABSENT = (NOT_SUPPORTED, INVALID_ARGUMENT)


@dataclass(frozen=True)
class ProfileInfo:
    """What NVML tells of a profile; `name` is "" where the driver is too old to tell it. `sms` and
    `memory_mib` are a GPU instance profile's."""

    index: int
    id: int
    slices: int
    count: int
    name: str = ""
    memory_mib: int = 0
    sms: int = 0


@dataclass(frozen=True)
class InstanceInfo:
    """An instance: NVML's handle, its id, its profile's id and its place."""

    handle: Handle
    id: int
    profile_id: int
    placement: Placement


class MigCalls:
    """The calls on an open NVML; `NvmlError` from each."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml

    # --- modes -----------------------------------------------------------------------------------------

    def modes(self, gpu: Handle) -> tuple[bool, bool]:
        """Whether MIG is on, and whether it will be after the next reset. NOT_SUPPORTED: no MIG at all."""
        current, pending = self._nvml.call("nvmlDeviceGetMigMode", gpu)
        return bool(current), bool(pending)

    def set_mode(self, gpu: Handle, on: bool) -> int:
        """NVML's activation status: 0 if it holds now, else why it waits (IN_USE, RESET_REQUIRED)."""
        return int(self._nvml.call("nvmlDeviceSetMigMode", gpu, int(on)))

    # --- profiles --------------------------------------------------------------------------------------

    def profiles(self, gpu: Handle) -> tuple[ProfileInfo, ...]:
        """The GPU instances that this GPU offers, by NVML's numbering."""
        found = []
        for index in range(_GPU_INSTANCE_PROFILES):
            info = self._unless_absent("nvmlDeviceGetGpuInstanceProfileInfo", gpu, index)
            if info is not None:
                found.append(
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
        return tuple(found)

    def compute_profiles(self, gpu_instance: Handle) -> tuple[ProfileInfo, ...]:
        """The compute instances that a GPU instance takes."""
        call = "nvmlGpuInstanceGetComputeInstanceProfileInfo"
        found = []
        for index in range(_COMPUTE_INSTANCE_PROFILES):
            info = self._unless_absent(call, gpu_instance, index, _SHARED_ENGINES)
            if info is not None:
                count = int(info.instanceCount)
                found.append(ProfileInfo(index, int(info.id), int(info.sliceCount), count, _name(info)))
        return tuple(found)

    def _unless_absent(self, call: str, *arguments: Any) -> Any:
        """The profile's structure, the older one from older drivers; None for a profile not offered."""
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
        """Where a GPU instance may lie, whatever lies there now; none if the driver doesn't tell."""
        call = "nvmlDeviceGetGpuInstancePossiblePlacements"
        try:
            return self._places(call, "c_nvmlGpuInstancePlacement_t", gpu, profile_id)
        except NvmlError as error:
            if error.code in _ABSENT:  # one profile must not hide the GPU
                return ()
            raise

    def compute_placements(self, gpu_instance: Handle, profile_id: int) -> tuple[Placement, ...]:
        """Where a compute instance may lie in its GPU instance; none from drivers before 525."""
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
        found = {Placement(int(one.start), int(one.size)) for one in places[: min(count.value, _MOST_PLACES)]}
        return tuple(sorted(found, key=lambda place: (place.start, place.size)))

    def free(self, gpu: Handle, profile_id: int) -> int | None:
        """How many more GPU instances of a profile fit now; None where MIG is off or nothing is told."""
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
        """The GPU instance with that id; NOT_FOUND without."""
        return self._nvml.part("nvmlDeviceGetGpuInstanceById", gpu, gi)

    def gpu_instance_info(self, gpu_instance: Handle) -> InstanceInfo:
        return _info(gpu_instance, self._nvml.call("nvmlGpuInstanceGetInfo", gpu_instance))

    def compute_instances(self, gpu_instance: Handle, profile: ProfileInfo) -> tuple[InstanceInfo, ...]:
        """The compute instances with that profile on a GPU instance."""
        call = "nvmlGpuInstanceGetComputeInstances"
        handles = self._listed(call, "c_nvmlComputeInstance_t", gpu_instance, profile.id, profile.count)
        return tuple(self.compute_instance_info(handle) for handle in handles)

    def compute_instance(self, gpu_instance: Handle, ci: int) -> Handle:
        """The compute instance with that id; NOT_FOUND without."""
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
        return tuple(Handle(one, of.gpu) for one in handles[: min(count.value, room)])

    # --- changes ---------------------------------------------------------------------------------------

    def create_gpu_instance(self, gpu: Handle, profile_id: int, at: Placement | None) -> Handle:
        """Make a GPU instance, `at` that place or where the driver likes; INSUFFICIENT_RESOURCES."""
        if at is None:
            return self._nvml.part("nvmlDeviceCreateGpuInstance", gpu, profile_id)
        place = self._place("c_nvmlGpuInstancePlacement_t", at)
        call = "nvmlDeviceCreateGpuInstanceWithPlacement"
        return self._nvml.part(call, gpu, profile_id, place)

    def create_compute_instance(self, gpu_instance: Handle, profile_id: int, at: Placement | None) -> Handle:
        """Make a compute instance, `at` that place if the driver can do so, else where it likes."""
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
        """IN_USE while it holds a compute instance or somebody uses it."""
        self._nvml.call("nvmlGpuInstanceDestroy", gpu_instance)

    def destroy_compute_instance(self, compute_instance: Handle) -> None:
        """IN_USE while somebody uses it."""
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
