"""Marks: why a GPU, or some MIG instances of it, must not be allocated, and when they may be again. Pure.

A mark heals when its cause is gone, what its class requires has been observed, and the hold-down time is
over:

- restart-app: nothing more; the affected program has ended
- by-driver: the driver's recovery action reads none, or a reset was seen
- reset, reboot: a reset was seen (see `evidence`)
- hardware: the node was booted
- standing: a problem in a reading; it ends when the reading no longer shows it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from gpunode.facts.xids import APPLICATION, BY_DRIVER, HARDWARE, IGNORE, REBOOT, RESET, RESTART_APP
from gpunode.gpu.model import Reading
from gpunode.plugin.model import Problem, Unit

FABRIC = "fabric"
STANDING = "standing"
_RECOVERY = {
    **{APPLICATION: "restart-app", IGNORE: "restart-app", RESTART_APP: "restart-app"},
    **{BY_DRIVER: "reset", RESET: "reset", REBOOT: "reboot", HARDWARE: "replace"},
}
_RESETS = frozenset({"reset", "reboot", "drain-and-reset", "bus-reset", "system-reboot"})
_SEVERITY = {"replace": 4, "reboot": 3, "reset": 2, "restart-app": 1}
_ACTIONS = {
    "reset": ("the driver requests a reset of the GPU", "reset"),
    "reboot": ("the driver requests a reboot of the node", "reboot"),
    "drain-p2p": ("the driver requests ending the programs that use this GPU from others", "restart-app"),
    "drain-and-reset": ("the driver requests draining and resetting the GPU", "reset"),
    "recover-imex": ("the driver requests recovery of the IMEX domain", ""),
    "bus-reset": ("the driver requests a reset of the GPU's bus", "reset"),
    "system-reboot": ("the driver requests a reboot of the system", "reboot"),
}


@dataclass(frozen=True)
class Mark:
    """One reason against a GPU; with `gi`, and `ci`, against these MIG instances only.

    `code`, `reason` and `mend` are those of its `Problem`, `kind` is an XID's class or `STANDING`. `since`
    and `last` are when its cause was first and last seen, `mended` when the requirement of its class was met
    (0: not yet). `generation` and `ecc` are the driver's and the count of uncorrectable errors at that time,
    to be compared with later readings; `asked` is whether the driver has requested a reset meanwhile.
    """

    gpu: str
    code: str
    reason: str
    kind: str
    since: float
    last: float
    mend: str = ""
    gi: int | None = None
    ci: int | None = None
    mended: float = 0.0
    generation: str = ""
    ecc: int | None = None
    asked: bool = False

    @property
    def xid(self) -> int | None:
        """The XID that caused it; None for any other cause."""
        cause, _, number = self.code.partition("-")
        return int(number) if cause == "xid" and number.isdecimal() else None

    @property
    def key(self) -> tuple[object, ...]:
        return (self.gpu, self.code, self.gi, self.ci)

    @property
    def problem(self) -> Problem:
        return Problem(self.code, self.reason, self.since, self.mend or _RECOVERY.get(self.kind, ""))

    def concerns(self, unit: Unit) -> bool:
        """Whether this unit of the same GPU is, or contains, the failed one."""
        if not unit.partition or self.gi is None:
            return True
        return unit.gi == self.gi and (self.ci is None or unit.ci == self.ci)


def reading_marks(reading: Reading, now: float) -> Iterator[Mark]:
    """A mark for each problem that a reading shows. A nonzero count of uncorrectable ECC errors is none: row
    remapping and page retirement report its consequences."""
    for code, reason, recovery in _problems(reading):
        yield Mark(reading.uuid, code, reason, STANDING, now, now, recovery)


def _problems(reading: Reading) -> Iterator[tuple[str, str, str]]:
    """Code, reason and `mend` of each."""
    if reading.remap_failed:
        yield "row-remap", "a row of memory could not be remapped", "replace"
    elif reading.remap_pending:
        yield "row-remap", "a row of memory waits for a reset to be remapped", "reset"
    if reading.retired_pending:
        yield "page-retirement", "a page of memory waits for a reset to be retired", "reset"
    if reading.recovery_action not in (None, "none"):
        action = str(reading.recovery_action)
        reason, recovery = _ACTIONS.get(action, (f"the driver requests the recovery action {action}", ""))
        yield "recovery-action", reason, recovery
    if reading.fabric_state == "in-progress":
        yield FABRIC, "the GPU has not yet joined the NVLink fabric", ""
    elif reading.fabric_error:
        yield FABRIC, f"NVLink fabric: {reading.fabric_error}", "reset"


def worst(marks: Iterable[Mark]) -> Mark | None:
    """The problem to report: the one that is hardest to fix, the oldest on a tie."""
    return max(marks, key=lambda mark: (_SEVERITY.get(mark.problem.mend, 0), -mark.since), default=None)


def needs_reset(reading: Reading) -> bool:
    """Whether the driver requests an action that resets the GPU, not only the end of some programs."""
    return reading.recovery_action in _RESETS


def with_reading(mark: Mark, reading: Reading, now: float) -> Mark:
    """The mark after a reading of its GPU."""
    if mark.kind == STANDING:
        return mark
    ecc, seen = mark.ecc, reading.ecc_volatile
    if evidence(mark, reading):
        return replace(mark, mended=mark.mended or now, ecc=seen, generation=reading.generation, asked=False)
    if seen is not None and (ecc is None or seen > ecc):
        mark = replace(mark, ecc=seen)
    if reading.recovery_action not in (None, "none"):  # not over, whatever was observed before
        return replace(mark, mended=0.0, last=now, asked=mark.asked or needs_reset(reading))
    return replace(mark, generation=mark.generation or reading.generation)


def evidence(mark: Mark, reading: Reading) -> bool:
    """Whether the GPU was reset since: its count of errors fell, its driver was reloaded, or the driver no
    longer requests it. For `HARDWARE` only a boot is evidence of a repair.
    """
    fell = mark.ecc is not None and reading.ecc_volatile is not None and reading.ecc_volatile < mark.ecc
    reloaded = bool(mark.generation and reading.generation) and mark.generation != reading.generation
    if mark.kind == HARDWARE:
        return reloaded and mark.generation.partition("/")[0] != reading.generation.partition("/")[0]
    return fell or reloaded or (mark.asked and reading.recovery_action == "none")


def is_healed(mark: Mark, reading: Reading | None, now: float, hold: float) -> bool:
    """Whether the device may be allocated again; `reading` is the GPU's present one."""
    if mark.kind in (RESTART_APP, APPLICATION, IGNORE):
        return now - mark.last >= hold
    action = reading.recovery_action if reading is not None else None
    if mark.kind == BY_DRIVER and action == "none":
        return now - mark.last >= hold
    return bool(mark.mended) and now - max(mark.mended, mark.last) >= hold
