"""The vector-add program as something to start: its files, its arguments and how its answer is read."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from gpunode.dataclass import dataclass
from gpunode.gpu.vectors import DeviceResult

MODULE = "gpunode.gpu.vectoradd"
PROGRAM_FILES = (
    "__init__.py",
    "gpu/__init__.py",
    "gpu/cuda.py",
    "gpu/cuda_errors.py",
    "gpu/forked.py",
    "gpu/ptx.py",
    "gpu/vectoradd.py",
    "gpu/vectors.py",
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
