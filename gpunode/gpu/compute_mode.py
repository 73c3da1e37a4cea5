"""The child that asks for compute modes or sets them.

Arguments are ``get UUID...``, ``set UUID=MODE...`` or ``restore UUID=MODE...``; restoring leaves a GPU alone
that is not in EXCLUSIVE_PROCESS any more: somebody else has changed it. Prints
``{"gpus": {"GPU-1": {"mode": 3}, "GPU-2": {"error": "...", "code": 4}}}``, or ``{"error": "...", "code": 9}``
if NVML itself fails. One GPU that fails costs no other.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from gpunode.gpu.child import end_with_parent
from gpunode.gpu.nvml import Nvml, NvmlError

DEFAULT, PROHIBITED, EXCLUSIVE_PROCESS = 0, 2, 3  # nvmlComputeMode_t


def main(arguments: Sequence[str]) -> int:
    """0, whatever NVML says; anything else means a crash."""
    end_with_parent()
    action, *gpus = arguments
    answer: dict[str, object]
    try:
        with Nvml.open() as nvml:
            answer = {"gpus": {gpu.partition("=")[0]: _one(nvml, action, gpu) for gpu in gpus}}
    except NvmlError as error:
        answer = _failure(error)
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


def _one(nvml: Nvml, action: str, gpu: str) -> dict[str, object]:
    uuid, _, wanted = gpu.partition("=")
    try:
        handle = nvml.handle_by_uuid(uuid)
        mode = nvml.compute_mode(handle)
        if action == "set" or (action == "restore" and mode == EXCLUSIVE_PROCESS):
            if mode != int(wanted):
                nvml.set_compute_mode(handle, int(wanted))
            mode = int(wanted)
    except NvmlError as error:
        return _failure(error)
    return {"mode": mode}


def _failure(error: NvmlError) -> dict[str, object]:
    return {"error": error.message, "code": error.code}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
