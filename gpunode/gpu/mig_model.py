"""How the GPUs of a node are cut: modes, GPU instances and compute instances with their places, and profiles.

The same from NVML, a recording or a test. Two numbers name a profile: its `index`, NVML's constant
(NVML_GPU_INSTANCE_PROFILE_*), and its `id`, the driver's, which `nvidia-smi mig -lgip` shows. Places of GPU
instances count the GPU's memory slots (8 on most, 4 on an A30 or RTX PRO); places of compute instances count
the compute slices of their GPU instance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """`size` slots from `start`."""

    start: int
    size: int

    @property
    def end(self) -> int:
        """The first slot behind it."""
        return self.start + self.size

    def overlaps(self, other: Placement) -> bool:
        """Whether the two share a slot."""
        return self.start < other.end and other.start < self.end

    def __str__(self) -> str:
        return f"{self.start}:{self.size}"


@dataclass(frozen=True)
class ComputeProfile:
    """A compute instance that fits a GPU instance: `slices` of its compute slices, at most `max_count`.

    NVML tells of these only once such a GPU instance exists; before, they are inferred.
    """

    slices: int
    max_count: int
    placements: tuple[Placement, ...] = ()


@dataclass(frozen=True)
class Profile:
    """A GPU instance that a GPU offers.

    `name` is NVML's own, ``1g.10gb+me``; `aliases` are others that mean it, such as the one computed from the
    memory's share. `free` is how many more fit now, None where MIG is off or the driver doesn't tell. No
    `placements` means that the driver didn't tell them.
    """

    index: int
    id: int
    name: str
    slices: int
    memory_mib: int
    max_count: int
    sms: int = 0
    placements: tuple[Placement, ...] = ()
    aliases: tuple[str, ...] = ()
    compute: tuple[ComputeProfile, ...] = ()
    free: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that means this profile; the first is the one to show."""
        return (self.name, *self.aliases)


@dataclass(frozen=True)
class ComputeInstance:
    """A compute instance: with its GPU instance it is the MIG device that has `uuid` (empty if untold).

    `placement` counts the GPU instance's compute slices; None if the driver doesn't tell it.
    """

    id: int
    slices: int
    placement: Placement | None = None
    uuid: str = ""


@dataclass(frozen=True)
class GpuInstance:
    """A GPU instance. `profile` and `profile_id` are the profile's index and id, `slices` its GPU slices."""

    id: int
    profile: int
    profile_id: int
    name: str
    slices: int
    placement: Placement
    compute: tuple[ComputeInstance, ...] = ()
    aliases: tuple[str, ...] = ()

    def device_name(self, compute: ComputeInstance) -> str:
        """The MIG device's profile: ``3g.40gb``, or ``1c.3g.40gb`` for a part of the GPU instance."""
        return device_name(self.name, self.slices, compute.slices)


def device_name(gpu_instance: str, gpu_slices: int, compute_slices: int) -> str:
    """The name of a MIG device of `compute_slices` on a GPU instance of that profile."""
    return gpu_instance if compute_slices == gpu_slices else f"{compute_slices}c.{gpu_instance}"


@dataclass(frozen=True)
class GpuLayout:
    """One GPU.

    `pci` is ``0000:3b:00.0``; `device_id` and `subsystem_id` are PCI's two ids as NVML packs them, device or
    subsystem above vendor: 0x20B010DE. `capable` is whether it knows MIG at all; `current` and `pending` are
    its modes now and after its next reset, equal where none waits. `slots` is how many memory slots it has, 0
    if not told. `architecture` is NVML_DEVICE_ARCH_* (7 Ampere, 9 Hopper, 10 Blackwell), 0 if not told;
    `virtualization` is NVML_GPU_VIRTUALIZATION_MODE_* (0 none, 1 passthrough, 2 vGPU guest, 3 vGPU host).
    `error` is why the GPU can't be described: the rest is then what could be read. `untold` is why its
    instances aren't known although its modes are: not enough rights.
    """

    uuid: str
    index: int
    name: str
    pci: str
    device_id: int = 0
    subsystem_id: int = 0
    minor: int | None = None
    memory_bytes: int = 0
    architecture: int = 0
    virtualization: int = 0
    capable: bool = False
    current: bool = False
    pending: bool = False
    slots: int = 0
    instances: tuple[GpuInstance, ...] = ()
    profiles: tuple[Profile, ...] = ()
    error: str = ""
    untold: str = ""

    @property
    def mode_pending(self) -> bool:
        """Whether another mode than the current one waits for a reset."""
        return self.current != self.pending

    def devices(self) -> Mapping[str, int]:
        """How many MIG devices there are of each profile, as mig-parted's configuration counts them."""
        return Counter(gi.device_name(ci) for gi in self.instances for ci in gi.compute)

    def profile(self, name: str) -> Profile | None:
        """The profile that this GPU offers under that name or an alias; None if it doesn't."""
        return next((one for one in self.profiles if name in one.names), None)


@dataclass(frozen=True)
class Layouts:
    """All GPUs of a node, in NVML's order."""

    driver_version: str = ""
    gpus: tuple[GpuLayout, ...] = ()

    def gpu(self, uuid: str) -> GpuLayout | None:
        """The GPU with that UUID; None if there is none."""
        return next((one for one in self.gpus if one.uuid == uuid), None)


_STARTS_AT_MULTIPLES_OF = {1: 1, 2: 2, 3: 4, 4: 4, 7: 8}


def inferred_compute(gpu_slices: int) -> tuple[ComputeProfile, ...]:
    """The compute instances that a GPU instance of so many slices takes, for one that isn't there yet.

    All of its slices, or at most half of them, rounded up: 1c, 2c and 4c of a 4g; 1c, 2c and 3c of a 3g; 1c,
    2c, 3c, 4c and 7c of a 7g (`nvidia-smi mig -lcip` on an A100).
    """
    found = []
    for slices, multiple in _STARTS_AT_MULTIPLES_OF.items():
        if slices == gpu_slices or (slices < gpu_slices and 2 * slices <= gpu_slices + 1):
            starts = range(0, gpu_slices - slices + 1, multiple)
            places = tuple(Placement(start, slices) for start in starts)
            found.append(ComputeProfile(slices, len(places), places))
    return tuple(found)
