"""What containers get: the answers of several resources merged, and remembered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from gpunode.dataclass import dataclass, field
from gpunode.plugin.proto import deviceplugin_pb2 as pb

_Value = TypeVar("_Value")


class AdmissionError(ValueError):
    """The pod is refused, and why."""


@dataclass(frozen=True)
class Allocation:
    """What a container gets. Mounts are container path to (host path, read-only), devices container path to
    (host path, permissions). `conflicts` are what a second resource said of something already said.
    """

    ids: tuple[str, ...]
    envs: Mapping[str, str]
    mounts: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    devices: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    cdi: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Held:
    """What one container holds of one resource, with the plugin's answer as it came."""

    pod: str
    container: str
    resource: str
    ids: tuple[str, ...]
    response: bytes

    @property
    def answer(self) -> pb.ContainerAllocateResponse:
        return pb.ContainerAllocateResponse.FromString(self.response)


def merged(parts: Sequence[Held]) -> Allocation:
    """Environment by name, mounts and devices by container path, annotations by key, CDI devices by name:
    what was seen first wins, and another value is a conflict that only the log would tell."""
    envs: dict[str, str] = {}
    mounts: dict[str, tuple[str, bool]] = {}
    devices: dict[str, tuple[str, str]] = {}
    annotations: dict[str, str] = {}
    cdi: list[str] = []
    conflicts: list[str] = []
    for part in parts:
        answer = part.answer
        conflicts += _take(envs, dict(answer.envs))
        conflicts += _take(mounts, {m.container_path: (m.host_path, m.read_only) for m in answer.mounts})
        conflicts += _take(devices, {d.container_path: (d.host_path, d.permissions) for d in answer.devices})
        conflicts += _take(annotations, dict(answer.annotations))
        cdi += [item.name for item in answer.cdi_devices if item.name not in cdi]
    ids = tuple(device for part in parts for device in part.ids)
    return Allocation(ids, envs, mounts, devices, annotations, tuple(cdi), tuple(conflicts))


def _take(found: dict[str, _Value], more: Mapping[str, _Value]) -> list[str]:
    differing = [key for key, value in more.items() if found.get(key, value) != value]
    for key, value in more.items():
        found.setdefault(key, value)
    return differing


def topped_up(hint: Sequence[str], free: set[str], count: int) -> list[str]:
    """The plugin's answer is a hint: what is not free is dropped, what is lacking is added."""
    chosen = [item for item in dict.fromkeys(hint) if item in free][:count]
    return chosen + sorted(free - set(chosen))[: count - len(chosen)]
