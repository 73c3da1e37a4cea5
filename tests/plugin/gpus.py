"""Inventories for the plugin's policy tests: whole GPUs, GPUs in MIG mode, broken ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpunode.gpu.model import Gpu, Inventory, MigDevice
from gpunode.host import Host
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.model import KubeletDevice, Problem, Resource, ResourcePlan, Snapshot, Unit
from gpunode.plugin.nvidia.resources import plan
from tests.files import write

H100 = "NVIDIA H100 80GB HBM3"
GPU_RESOURCE = "nvidia.com/gpu"


def uuid(index: int) -> str:
    return f"GPU-{index:08x}-1111-4222-8333-444444444444"


def mig_uuid(gpu: int, index: int) -> str:
    return f"MIG-{gpu:08x}-5555-4666-8777-{index:012x}"


def gpu(index: int, **more) -> Gpu:
    """A healthy GPU; its minor number is its index."""
    facts: dict[str, Any] = {
        "minor": index,
        "memory_bytes": 80 << 30,
        "compute_capability": "9.0",
        "numa": index // 4,
    }
    facts |= {"uuid": uuid(index), "name": H100, "pci": f"0000:{index + 0x19:02x}:00.0"}
    return Gpu(index, **{**facts, **more})


def cut(index: int, *profiles: str, **more) -> Gpu:
    """A GPU in MIG mode with these devices."""
    parts = (
        MigDevice(slot, mig_uuid(index, slot), profile, slot + 1, 0, 10 << 30)
        for slot, profile in enumerate(profiles)
    )
    return gpu(index, mig_enabled=True, mig=tuple(parts), **more)


def inventory(*gpus: Gpu) -> Inventory:
    return Inventory("550.54.15", "12.4", gpus)


def planned(host: Host, *gpus: Gpu, **settings) -> ResourcePlan:
    return plan(host, Settings(**settings), inventory(*gpus))


def shown(made: ResourcePlan) -> dict[str, list[str]]:
    """Indices of the units by resource."""
    return {one.name: [unit.index for unit in one.units] for one in made.resources}


def only(made: ResourcePlan) -> Resource:
    (resource,) = made.resources
    return resource


def problem_of(device: KubeletDevice) -> Problem:
    assert device.problem is not None
    return device.problem


def snapshot(resource: Resource) -> Snapshot:
    return Snapshot(1, resource)


def named(name: str, count: int) -> dict[str, tuple[KubeletDevice, ...]]:
    """A resource of whole units as an argument of `sharing.share`."""
    units = (Unit(uuid(index), uuid(index), str(index), name=H100) for index in range(count))
    return {name: tuple(KubeletDevice(unit.id, unit) for unit in units)}


def bare_host(root: Path, devices: tuple[str, ...] = (), files: dict[str, str] | None = None) -> Host:
    """A recorded node with these device files."""
    import json

    (root / ".gpunode").mkdir(parents=True)
    recorded = {path: {"major": 195, "minor": n, "mode": "0666"} for n, path in enumerate(devices)}
    (root / ".gpunode/recording.json").write_text(json.dumps({"devices": recorded}))
    for path, text in (files or {}).items():
        write(root, path, text)
    return Host(root, {})
