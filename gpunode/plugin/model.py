"""The plugin's nouns: a unit, a device, a resource, what is advertised of it now, and what a container gets.

A *unit* is something that a container can be given as a whole: a GPU or a partition of one. A *device* is
what the kubelet counts: a unit, or one of several shares of it. A *resource* is a name with its devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType

from gpunode.dataclass import dataclass, field
from gpunode.errors import GpunodeError

SHARE_MARK = "::"
"""Between a unit's id and the number of a share, as NVIDIA's plugin has it: ``GPU-1234::0``."""


@dataclass(frozen=True)
class Unit:
    """A GPU or a partition (MIG device, AMD partition) of one.

    `id` is what the kubelet sees of an unshared one: the UUID, for AMD the PCI address or ``amdgpu_xcp_3``.
    `gpu` is the id of the physical GPU, its own for a whole one. `index` is ``0``, or ``0:1`` for the second
    MIG device of the first GPU. `pci` is the physical GPU's address as sysfs spells it. `paths` are the
    device nodes on the node that this unit needs beside the vendor's common ones. `memory_bytes` is the
    unit's own.
    """

    id: str
    gpu: str
    index: str
    name: str = ""
    pci: str = ""
    numa: int | None = None
    profile: str = ""
    gi: int | None = None
    ci: int | None = None
    minor: int | None = None
    memory_bytes: int = 0
    compute_capability: str = ""
    paths: tuple[str, ...] = ()

    @property
    def partition(self) -> bool:
        """Whether it is a part of a GPU."""
        return self.id != self.gpu

    @property
    def order(self) -> tuple[int, ...]:
        """Sorts units as people count them: 0, 1, 2:0, 2:1, 10."""
        return tuple(int(part) if part.isdecimal() else 1 << 30 for part in self.index.split(":"))


@dataclass(frozen=True)
class Problem:
    """Why a device must not be handed out.

    `code` is short and stable, for metrics and JSON: ``xid-79``, ``ecc``, ``row-remap``, ``lost``,
    ``fabric``, ``recovery-action``, ``driver``, ``mig-mode``, ``mps``... `reason` is for people. `since` is
    seconds since the epoch. `mend` says what brings the device back: ``restart-app``, ``reset``, ``reboot``,
    ``replace``, "" if unknown or if it comes back by itself. `starting` is no failure: it is not ready yet.
    `logged` if the log has one line for all devices with this problem.
    """

    code: str
    reason: str
    since: float = 0.0
    mend: str = ""
    starting: bool = False
    logged: bool = False


@dataclass(frozen=True)
class Device:
    """What the kubelet counts. `id` is the unit's id, with ``::N`` for a share of it."""

    id: str
    unit: Unit
    problem: Problem | None = None

    @property
    def healthy(self) -> bool:
        return self.problem is None


@dataclass(frozen=True)
class Common:
    """What a container gets beside its units, looked up when the plan was made: Allocate looks at no file.

    `nodes` are device nodes such as ``/dev/nvidiactl``, `channels` IMEX channels, `cdi` the classes beside
    ``gpu`` that have a specification (``gdrcopy``).
    """

    nodes: tuple[str, ...] = ()
    channels: tuple[int, ...] = ()
    cdi: tuple[str, ...] = ()


@dataclass(frozen=True)
class Resource:
    """One extended resource. `sharing` is none, time-slicing or mps; `devices` are ordered by unit, then
    share.

    `shares` is the largest number of shares that any unit of it has (1 unshared). With `single_share` a
    container may ask for one share only (NVIDIA's failRequestsGreaterThanOne). Some units may be unshared:
    their devices bear the unit's own id.
    """

    name: str
    devices: tuple[Device, ...] = ()
    sharing: str = "none"
    shares: int = 1
    single_share: bool = False
    common: Common = field(default_factory=Common)

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """Each unit once."""
        return tuple({device.unit.id: device.unit for device in self.devices}.values())

    @cached_property
    def share_counts(self) -> Mapping[str, int]:
        """How many shares each shared unit is cut into, by its id; unshared units aren't in it."""
        return Counter(device.unit.id for device in self.devices if device.id != device.unit.id)


@dataclass(frozen=True)
class LeftOut:
    """A GPU or partition that is not advertised, and why. `unshareable`: it can't be shared as configured."""

    index: str
    id: str
    reason: str
    unshareable: bool = False


@dataclass(frozen=True)
class Plan:
    """What this node advertises: pure outcome of inventory and settings. `problems` lie in the devices."""

    resources: tuple[Resource, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Snapshot:
    """One resource at one moment. `version` grows with every change that the kubelet is to see."""

    version: int
    resource: Resource

    @property
    def devices(self) -> tuple[Device, ...]:
        return self.resource.devices

    @cached_property
    def by_id(self) -> Mapping[str, Device]:
        return MappingProxyType({device.id: device for device in self.resource.devices})

    @cached_property
    def healthy(self) -> int:
        """How many devices can be handed out."""
        return sum(device.healthy for device in self.resource.devices)

    def find(self, device_id: str) -> Device | None:
        return self.by_id.get(device_id)


@dataclass(frozen=True)
class Mount:
    """A host path in the container."""

    host: str
    container: str
    read_only: bool = False


@dataclass(frozen=True)
class DeviceNode:
    """A device node in the container; `permissions` of r, w, m."""

    host: str
    container: str
    permissions: str = "rw"


@dataclass(frozen=True)
class Answer:
    """What a container gets: the fields of ContainerAllocateResponse, free of protobuf."""

    envs: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    nodes: tuple[DeviceNode, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)
    cdi: tuple[str, ...] = ()


class AllocationError(GpunodeError):
    """A request that can't be met, in words for the pod's events. `code`: not-found, invalid, unhealthy."""

    default_code = "invalid"
