"""What a GPU's reading says against it. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from gpunode.dataclass import dataclass
from gpunode.gpu.model import Reading

FABRIC = "fabric"
_ACTIONS = {
    "reset": ("the driver asks for a reset of the GPU", "reset"),
    "reboot": ("the driver asks for a reboot of the node", "reboot"),
    "drain-p2p": ("the driver asks to end the programs that use this GPU from others", "restart-app"),
    "drain-and-reset": ("the driver asks to drain and reset the GPU", "reset"),
    "recover-imex": ("the driver asks to recover the IMEX domain", ""),
    "bus-reset": ("the driver asks for a reset of the GPU's bus", "reset"),
    "system-reboot": ("the driver asks for a reboot of the system", "reboot"),
}


@dataclass(frozen=True)
class Condition:
    """One trouble that stands as long as the reading shows it."""

    code: str
    reason: str
    mend: str


def conditions(reading: Reading) -> Iterator[Condition]:
    """All of them. An uncorrectable ECC count that isn't 0 is none: what it left behind is told by others."""
    if reading.remap_failed:
        yield Condition("row-remap", "a row of memory could not be remapped", "replace")
    elif reading.remap_pending:
        yield Condition("row-remap", "a row of memory waits for a reset to be remapped", "reset")
    if reading.retired_pending:
        yield Condition("page-retirement", "a page of memory waits for a reset to be retired", "reset")
    if reading.recovery_action not in (None, "none"):
        action = str(reading.recovery_action)
        reason, mend = _ACTIONS.get(action, (f"the driver asks for the recovery action {action}", ""))
        yield Condition("recovery-action", reason, mend)
    if reading.fabric_state == "in-progress":
        yield Condition(FABRIC, "the GPU has not yet joined the NVLink fabric", "")
    elif reading.fabric_error:
        yield Condition(FABRIC, f"NVLink fabric: {reading.fabric_error}", "reset")
