"""What a container gets for the devices that the kubelet chose. Pure; reads no file.

`NVIDIA_VISIBLE_DEVICES` and the mounts below /var/run/nvidia-container-devices are read by NVIDIA's container
runtime, CDI names by the engine itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from zlib import crc32

from gpunode.plugin.config.settings import Settings
from gpunode.plugin.model import (
    Answer,
    ContainerDevice,
    ContainerMount,
    Resource,
    Snapshot,
    Unit,
    requested_devices,
)
from gpunode.plugin.mps.layout import container_parts

VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"
IMEX_CHANNELS = "NVIDIA_IMEX_CHANNELS"
CDI_VENDOR = "k8s.device-plugin.nvidia.com"
MOUNTED = "/var/run/nvidia-container-devices"
_ANNOTATION = "nvidia-device-plugin_"
_MAX_KEY = 63  # of an annotation's name after its prefix


def answer(settings: Settings, snapshot: Snapshot, ids: Sequence[str]) -> Answer:
    """The container's part of an Allocate, see docs/resources.md. Units in request order, each once.

    `AllocationError` names a device that doesn't exist, with some that do, or one that is unhealthy, with the
    reason: a container would not start on it, and would not say why.
    """
    devices = requested_devices(snapshot, ids)
    resource = snapshot.resource
    units = tuple({device.unit.id: device.unit for device in devices}.values())
    names = [unit.index if settings.device_id_strategy == "index" else unit.id for unit in units]
    strategies = settings.device_list_strategy
    envs: dict[str, str] = {}
    mounts: list[ContainerMount] = []
    if resource.sharing == "mps":
        envs, mounts = container_parts(settings, resource, devices)
    envs |= _feature_envs(settings)
    cdi = _cdi_names(resource, names) if "cdi-cri" in strategies or "cdi-annotations" in strategies else ()
    annotations = (
        {annotation_key(settings.cdi_annotation_prefix, resource.name): ",".join(cdi)}
        if "cdi-annotations" in strategies
        else {}
    )
    nodes: tuple[ContainerDevice, ...] = ()
    channels = [str(channel) for channel in resource.common.channels]
    if "envvar" in strategies:
        envs[VISIBLE_DEVICES] = ",".join(names)
        if channels:
            envs[IMEX_CHANNELS] = ",".join(channels)
    if "volume-mounts" in strategies:
        envs[VISIBLE_DEVICES] = MOUNTED
        targets = (*names, *(f"imex/{channel}" for channel in channels))
        mounts += [ContainerMount("/dev/null", f"{MOUNTED}/{target}") for target in targets]
    if settings.pass_device_specs and ("envvar" in strategies or "volume-mounts" in strategies):
        nodes = _nodes(settings, resource, units)
    return Answer(envs, tuple(mounts), nodes, annotations, cdi if "cdi-cri" in strategies else ())


# --- the parts ------------------------------------------------------------------------------------------


def _feature_envs(settings: Settings) -> dict[str, str]:
    envs = {}
    if settings.gdrcopy_enabled:
        envs["NVIDIA_GDRCOPY"] = "enabled"
    if settings.gds_enabled:
        envs["NVIDIA_GDS"] = "enabled"
    if settings.mofed_enabled:
        envs["NVIDIA_MOFED"] = "enabled"
    return envs


def _cdi_names(resource: Resource, names: Iterable[str]) -> tuple[str, ...]:
    common = resource.common
    return (
        *(f"{CDI_VENDOR}/gpu={name}" for name in names),
        *(f"{CDI_VENDOR}/imex-channel={channel}" for channel in common.channels),
        *(f"{CDI_VENDOR}/{name}=all" for name in common.cdi),
    )


def annotation_key(prefix: str, resource: str) -> str:
    """Equal for the same resource, and different for each resource of a container."""
    name = resource.replace("/", "_")
    if len(_ANNOTATION) + len(name) > _MAX_KEY:
        digest = f"{crc32(name.encode()):08x}"
        name = f"{name[: _MAX_KEY - len(_ANNOTATION) - 9]}-{digest}"
    return f"{prefix}{_ANNOTATION}{name}"


def _nodes(settings: Settings, resource: Resource, units: Iterable[Unit]) -> tuple[ContainerDevice, ...]:
    """Control nodes, then the units' own, then IMEX channels: each once, below the device root."""
    root = (settings.dev_root or settings.driver_root).rstrip("/")
    own = (path for unit in units for path in unit.paths)
    return tuple(
        ContainerDevice(f"{root}{path}", path) for path in dict.fromkeys((*resource.common.nodes, *own))
    )
