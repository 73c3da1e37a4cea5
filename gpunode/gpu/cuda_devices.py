"""A child that asks CUDA's driver what GPUs there are, where NVML tells none or too little: on Tegra.

It prints one JSON document: ``{"inventory": {...}}`` as `gpunode.gpu.probe` has it, without a driver's
version, PCI addresses and MIG, or ``{"error": {"message": "..."}}``.
"""

from __future__ import annotations

import json
import sys

from gpunode.gpu.child import end_with_parent
from gpunode.gpu.cuda import Cuda, CudaError
from gpunode.gpu.model import Gpu, Inventory
from gpunode.output.result import plain


def main() -> int:
    """Always 0, so that anything else means a crash."""
    end_with_parent()
    try:
        answer = {"inventory": plain(_inventory(Cuda()))}
    except CudaError as error:
        answer = {"error": {"message": error.message}}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


def _inventory(cuda: Cuda) -> Inventory:
    return Inventory("", cuda.version(), tuple(_gpu(cuda, number) for number in range(cuda.device_count())))


def _gpu(cuda: Cuda, number: int) -> Gpu:
    return Gpu(
        number,
        cuda.uuid(number) or f"GPU-{number}",
        cuda.name(number),
        "",
        memory_bytes=cuda.memory(number),
        compute_capability=cuda.compute_capability(number),
    )


if __name__ == "__main__":
    sys.exit(main())
