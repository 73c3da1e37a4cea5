"""The vector-add program as something to start: its files, its arguments and how its answer is read."""

from __future__ import annotations

import json
import math
import operator
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpunode.gpu.model import Gpu, Inventory
from gpunode.gpu.vectoradd import DeviceResult, expected, inputs, judge

MODULE = "gpunode.gpu.vectoradd"
PROGRAM_FILES = (
    "__init__.py",
    "gpu/__init__.py",
    "gpu/cuda.py",
    "gpu/forked.py",
    "gpu/vectoradd.py",
)
"""All that the program needs besides the standard library, relative to the package gpunode."""

_AT_ONCE = 16  # forked.AT_ONCE; a test holds them equal
_START_SECONDS = 15.0


@dataclass(frozen=True)
class Answer:
    """What the program printed. `error` says why CUDA can't even count devices, `code` is its CUresult."""

    devices: tuple[DeviceResult, ...]
    error: str = ""
    code: int | None = None


def arguments(uuids: Sequence[str], timeout: float) -> tuple[str, ...]:
    """Command line of the program: these devices, or what CUDA itself sees; `timeout` seconds for each."""
    chosen = [argument for uuid in uuids for argument in ("--uuid", uuid)]
    return (*chosen, "--timeout", f"{timeout:g}")


def longest_run(devices: int, timeout: float) -> float:
    """Seconds after which the whole program must be over, when each device may take `timeout` seconds."""
    rounds = max(1, math.ceil(devices / _AT_ONCE)) + (0 if devices else 1)  # counting the devices is a round
    return rounds * (timeout + 2.0) + _START_SECONDS


def read_answer(text: str) -> Answer:
    """Read what the program printed; its document is the last line. ValueError if there is none."""
    try:
        document = json.loads(text.strip().rpartition("\n")[2])
        devices = tuple(_device(item) for item in document["devices"])
        error = document["error"]
        if error is None:
            return Answer(devices)
        code = error["code"]
        return Answer(devices, str(error["message"]), code if isinstance(code, int) else None)
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as problem:
        raise ValueError(f"not a vector-add answer: {problem!r}") from problem


def _device(item: Any) -> DeviceResult:
    error = item["max_error"]
    return DeviceResult(
        int(item["index"]),
        str(item["uuid"]),
        str(item["name"]),
        int(item["elements"]),
        None if error is None else float(error),
        float(item["milliseconds"]),
        str(item["status"]),
        str(item["message"]),
    )


# What of an inventory can run a kernel: whole GPUs, or the MIG devices of a GPU that is cut up.


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


# The vector-add of a node that isn't there: for recorded and simulated machines, on this machine's CPU.

NOTICE = "simulated: computed on the CPU"


def vector_add(devices: Iterable[tuple[int, str, str]]) -> Iterator[DeviceResult]:
    """For each device (index, UUID, name) the sums that it would compute, computed and compared for real.

    `message` says that it is simulated; `milliseconds` are this machine's.
    """
    (left, right), want = inputs(), expected()
    for index, uuid, name in devices:
        start = time.perf_counter()
        got = array("f", map(operator.add, left, right))
        milliseconds = (time.perf_counter() - start) * 1000
        yield replace(judge(index, uuid, name, got, want, milliseconds), message=NOTICE)
