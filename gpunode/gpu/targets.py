"""What of an inventory can run a kernel: whole GPUs, or the MIG devices of a GPU that is cut up."""

from __future__ import annotations

from collections.abc import Sequence

from gpunode.dataclass import dataclass, replace
from gpunode.gpu.model import Gpu, Inventory
from gpunode.gpu.vectors import DeviceResult


@dataclass(frozen=True)
class Plan:
    """`runnable` devices as results yet to come, and `settled` ones about which there is nothing to try."""

    runnable: tuple[DeviceResult, ...] = ()
    settled: tuple[DeviceResult, ...] = ()

    @property
    def uuids(self) -> tuple[str, ...]:
        return tuple(device.uuid for device in self.runnable)


def plan(inventory: Inventory | None) -> Plan:
    """Sort an inventory's devices; a GPU that NVML can't read or that has another's UUID fails, an empty MIG
    GPU is skipped.
    """
    runnable: list[DeviceResult] = []
    settled: list[DeviceResult] = []
    owners: dict[str, int] = {}
    for gpu in inventory.gpus if inventory else ():
        owner = owners.setdefault(gpu.uuid, gpu.index)
        if owner != gpu.index and not gpu.error:
            message = f"NVML gives it the UUID of GPU {owner}: neither can be told from the other"
            settled.append(DeviceResult(gpu.index, gpu.uuid, gpu.name, status="fail", message=message))
        elif gpu.error or (gpu.mig_enabled and not gpu.mig):
            settled.append(_settled(gpu))
        elif gpu.mig_enabled:
            runnable += [
                DeviceResult(gpu.index, mig.uuid, f"{gpu.name} MIG {mig.profile}") for mig in gpu.mig
            ]
        else:
            runnable.append(DeviceResult(gpu.index, gpu.uuid, gpu.name))
    return Plan(tuple(runnable), tuple(settled))


def _settled(gpu: Gpu) -> DeviceResult:
    if gpu.error:
        return DeviceResult(gpu.index, gpu.uuid, gpu.name, status="fail", message=gpu.error)
    message = "MIG is on and holds no device: make some (nvidia-smi mig -cgi ... -C) or switch it off"
    return DeviceResult(gpu.index, gpu.uuid, gpu.name, status="skip", message=message)


def merge(wanted: Plan, seen: Sequence[DeviceResult]) -> tuple[DeviceResult, ...]:
    """The program's results with the inventory's indices and names, in the inventory's order."""
    by_uuid = {result.uuid: result for result in seen}
    told = [
        replace(by_uuid[device.uuid], index=device.index, name=device.name or by_uuid[device.uuid].name)
        if device.uuid in by_uuid
        else replace(device, status="fail", message="the program said nothing of this device")
        for device in wanted.runnable
    ]
    extra = [result for result in seen if result.uuid not in wanted.uuids]
    return tuple(sorted([*told, *wanted.settled, *extra], key=lambda result: result.index))
