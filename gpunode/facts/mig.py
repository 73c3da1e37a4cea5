"""MIG layouts: partitioned GPUs, what restores the partitions, and driver releases with MIG faults.

The driver loses MIG instances at every boot (NVIDIA's MIG user guide); mig-parted's unit, the GPU operator's
MIG manager, or a script of the node's own creates them again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpunode.facts.boot import started
from gpunode.facts.driver import version_numbers
from gpunode.facts.tables import table

if TYPE_CHECKING:
    from gpunode.facts.node import Node
    from gpunode.gpu.model import Gpu


UNIT = "nvidia-mig-manager.service"
FAULTS = "mig_driver_faults"
# programs in pods: the GPU operator's MIG manager; the DRA driver, which partitions GPUs for pods
_PODS = ("nvidia-mig-manager", "gpu-kubelet-plugin")
_GKE = "/etc/nvidia/gpu_config.json"  # Google's partition_gpu partitions a node's GPUs with it at each start
_COMMANDS = (
    *("nvidia-mig-parted", "nvidia-smi mig", "mig -cgi", "mig --create-gpu-instance"),
    "mig apply --config-file",  # gpunode-mig.service
)


def partitioned(node: Node) -> list[Gpu]:
    """GPUs with MIG enabled, as NVML lists them; those that don't answer are left out."""
    inventory = node.nvml.inventory
    return [gpu for gpu in inventory.gpus if gpu.mig_enabled and not gpu.error] if inventory else []


def keeper(node: Node, besides: str = "") -> str:
    """What restores the instances after a reboot: a unit, a process or a file; empty if nothing does.
    `besides` is a unit to ignore."""
    unit = node.units.get(UNIT)
    if unit is not None and unit.may_start_at_boot:
        return UNIT
    process = manager(node)
    if process:
        return process
    if "partitionsize" in (node.host.read_text(_GKE) or "").lower():
        return _GKE
    return started(node.host, _COMMANDS, besides=(UNIT, besides))


def manager(node: Node) -> str:
    """A process that partitions the GPUs for the cluster; empty if none runs."""
    processes = (process for process in node.processes if process.name in _PODS)
    return next((f"process {process.pid}, {process.name}" for process in processes), "")


def known_fault(version: str) -> str | None:
    """The first release without the fault, for a driver that the table names; None for any other."""
    here = version_numbers(version)
    for row in table(FAULTS).rows:
        if version_numbers(row["first"]) <= here <= version_numbers(row["last"]):
            return str(row["fixed"])
    return None
