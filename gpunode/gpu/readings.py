"""What a GPU says of its own condition, from an open NVML. What it, or its driver, doesn't tell is None.

ECC counts, remapped rows, retired pages and the fabric as nvml.h describes them; the recovery action is the
field value NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, which drivers tell from 570 on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeVar

from gpunode.gpu.model import Reading
from gpunode.gpu.nvml import Handle, Nvml
from gpunode.gpu.nvml_errors import (
    FUNCTION_NOT_FOUND,
    INVALID_ARGUMENT,
    NO_PERMISSION,
    NOT_FOUND,
    NOT_SUPPORTED,
    NvmlError,
)

RECOVERY_ACTIONS = (
    *("none", "reset", "reboot", "drain-p2p", "drain-and-reset"),
    *("recover-imex", "bus-reset", "system-reboot"),
)
"""NVML_GPU_RECOVERY_ACTION_* from 0 on."""

FABRIC_STATES = (None, "not-started", "in-progress", "completed")
"""NVML_GPU_FABRIC_STATE_* from 0, not supported, on."""

_VERSION_UNKNOWN = 25  # NVML_ERROR_ARGUMENT_VERSION_MISMATCH
_UNTOLD = {
    *(NOT_SUPPORTED, NO_PERMISSION, INVALID_ARGUMENT, NOT_FOUND, FUNCTION_NOT_FOUND, _VERSION_UNKNOWN),
}
T = TypeVar("T")


class _Questions:
    """Asks one after another; the first answer that means the GPU itself ends it all."""

    def __init__(self) -> None:
        self.error = ""

    def ask(self, question: Callable[[], T]) -> T | None:
        if self.error:
            return None
        try:
            return question()
        except NvmlError as error:
            if error.code not in _UNTOLD:
                self.error = str(error)
            return None


def read_gpu(nvml: Nvml, device: Handle, uuid: str, *, use: bool = False, generation: str = "") -> Reading:
    """One GPU's reading; `use` asks for utilisation and memory, too, MIG devices' included. Never raises."""
    questions = _Questions()
    ask = questions.ask
    volatile = ask(lambda: nvml.uncorrectable_errors(device, aggregate=False))
    aggregate = ask(lambda: nvml.uncorrectable_errors(device, aggregate=True))
    remap = ask(lambda: nvml.row_remap(device))
    retired = ask(lambda: nvml.retirement_pending(device)) if remap is None else None
    action = ask(lambda: nvml.recovery_action(device))
    fabric = ask(lambda: nvml.fabric(device))
    busy = ask(lambda: nvml.busy_percent(device)) if use else None
    used = ask(lambda: nvml.memory_used(device)) if use else None
    return Reading(
        uuid,
        questions.error,
        volatile,
        aggregate,
        remap_pending=None if remap is None else remap[0],
        remap_failed=None if remap is None else remap[1],
        retired_pending=retired,
        recovery_action=None if action is None else _action(action),
        fabric_state=None if fabric is None else _named(FABRIC_STATES, fabric[0]),
        fabric_error="" if fabric is None else fabric[1],
        busy_percent=busy,
        memory_used_bytes=used,
        generation=generation,
        parts_used_bytes=_parts(nvml, device) if use and not questions.error else {},
    )


def _parts(nvml: Nvml, gpu: Handle) -> Mapping[str, int]:
    """Memory in use by MIG device. Compute instances of one GPU instance share its memory, so that nobody's
    part of it can be told; a MIG device that goes meanwhile is no news about its GPU."""
    found: dict[str, tuple[int, int]] = {}
    with suppress(NvmlError):
        for _, mig in nvml.mig_handles(gpu) if nvml.mig_enabled(gpu) else ():
            with suppress(NvmlError):
                found[nvml.uuid(mig)] = nvml.mig_instances(mig)[0], nvml.memory_used(mig)
    shared = Counter(gi for gi, _ in found.values())
    return {uuid: used for uuid, (gi, used) in found.items() if shared[gi] == 1}


def _action(number: int) -> str:
    return _named(RECOVERY_ACTIONS, number) or f"unknown-{number}"


def _named(names: tuple[str | None, ...], number: int) -> str | None:
    return names[number] if 0 <= number < len(names) else None
