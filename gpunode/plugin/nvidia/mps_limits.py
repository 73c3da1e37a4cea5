"""What MPS can share, and how often."""

from __future__ import annotations

from collections.abc import Container

from gpunode.errors import ConfigError
from gpunode.plugin.model import Unit
from gpunode.plugin.settings import Settings, SharedResource
from gpunode.plugin.sharing import Refusal

MAX_CLIENTS = 48
"""Clients of one MPS server on Volta and newer; 16 before (CUDA's MPS documentation, "Limitations")."""
MAX_CLIENTS_BEFORE_VOLTA = 16
_VOLTA = (7, 0)


def max_clients(compute_capability: str) -> int:
    """How many shares a GPU can have. One that doesn't tell its capability is taken for a new one."""
    numbers = compute_capability.split(".")
    if len(numbers) != 2 or not all(part.isdecimal() for part in numbers):
        return MAX_CLIENTS
    return MAX_CLIENTS if (int(numbers[0]), int(numbers[1])) >= _VOLTA else MAX_CLIENTS_BEFORE_VOLTA


def mps_refusal(settings: Settings, cut_gpus: Container[str]) -> Refusal:
    """What `sharing.share` asks for each unit. `cut_gpus` are whole GPUs in MIG mode.

    `ConfigError` for more replicas than any GPU can have.
    """
    sharing = settings.sharing
    if sharing is None or sharing.strategy != "mps":
        return lambda unit, entry: ""
    for entry in sharing.resources:
        if entry.replicas > MAX_CLIENTS:
            raise ConfigError(
                f"sharing.mps: {entry.name}: {entry.replicas} replicas: MPS has {MAX_CLIENTS} at most",
                hint=f"replicas: {MAX_CLIENTS}, or use timeSlicing",
            )

    def refusal(unit: Unit, entry: SharedResource) -> str:
        if unit.partition or unit.id in cut_gpus:
            return "MPS can't share MIG devices: use timeSlicing, or keep it out of `devices`"
        limit = max_clients(unit.compute_capability)
        if entry.replicas > limit:
            return (
                f"{entry.replicas} replicas are wanted, MPS has {limit} at most on a GPU of compute "
                f"capability {unit.compute_capability}"
            )
        return ""

    return refusal
