"""What NVIDIA GPUs are advertised as."""

from __future__ import annotations

from gpunode.gpu.model import Gpu, Inventory
from gpunode.host import Host
from gpunode.plugin.model import Device, LeftOut, Plan, Resource, Unit
from gpunode.plugin.settings import Settings

_DISPLAY_ONLY = {"DGX Display", "NVIDIA DGX Display"}  # drives a monitor, runs no CUDA


def plan(host: Host, settings: Settings, inventory: Inventory) -> Plan:
    """Resources and devices for this inventory."""
    gpus = [gpu for gpu in inventory.gpus if gpu.uuid and gpu.name not in _DISPLAY_ONLY]
    devices = tuple(Device(gpu.uuid, _unit(gpu)) for gpu in gpus)
    left_out = tuple(
        LeftOut(str(gpu.index), "", gpu.error or "NVML tells no UUID")
        for gpu in inventory.gpus
        if not gpu.uuid
    )
    return Plan((Resource(settings.resource_name, devices),) if devices else (), left_out)


def _unit(gpu: Gpu) -> Unit:
    return Unit(
        gpu.uuid,
        gpu.uuid,
        str(gpu.index),
        name=gpu.name,
        pci=gpu.pci,
        numa=gpu.numa,
        minor=gpu.minor,
        memory_bytes=gpu.memory_bytes,
        compute_capability=gpu.compute_capability,
    )
