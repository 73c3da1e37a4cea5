"""What MPS can share, and how often."""

from __future__ import annotations

from collections.abc import Container

from gpunode.errors import ConfigError
from gpunode.plugin.model import Unit
from gpunode.plugin.settings import Settings, SharedResource
from gpunode.plugin.sharing import Refusal


def mps_refusal(settings: Settings, cuda_version: str, cut_gpus: Container[str]) -> Refusal:
    """What `sharing.share` asks for each unit. `cut_gpus` are whole GPUs in MIG mode.

    `ConfigError` for more replicas than a GPU of any kind can have with this driver.
    """
    sharing = settings.sharing
    if sharing is None or sharing.strategy != "mps":
        return lambda unit, entry: ""
    from gpunode.plugin.mps.share import limit

    most = limit("", cuda_version)
    for entry in sharing.resources:
        if entry.replicas > most:
            raise ConfigError(
                f"sharing.mps: {entry.name}: {entry.replicas} replicas: MPS has {most} clients at most",
                hint=f"replicas: {most}, or use timeSlicing",
            )

    def refusal(unit: Unit, entry: SharedResource) -> str:
        if unit.partition or unit.id in cut_gpus:
            return "MPS can't share MIG devices: use timeSlicing, or keep it out of `devices`"
        most = limit(unit.compute_capability, cuda_version)
        if entry.replicas > most:
            return (
                f"{entry.replicas} replicas are wanted, and MPS has {most} clients at most on a GPU of "
                f"compute capability {unit.compute_capability}"
            )
        return ""

    return refusal
