"""Marks: why a GPU, or some MIG instances of it, must not be handed out, and what must happen before they may
again. Pure.

A mark heals when its cause is gone, what its class asks for has been seen, and the hold-down time is over:

- restart-app: nothing more; the program that was hit has ended
- by-driver: the driver's recovery action reads none, or a reset was seen
- reset, reboot: a reset was seen (see `evidence`)
- hardware: the node was booted
- standing: a reading that shows the trouble; it is over when the reading no longer does
"""

from __future__ import annotations

from collections.abc import Iterable

from gpunode.dataclass import dataclass, replace
from gpunode.facts.xids import APPLICATION, BY_DRIVER, HARDWARE, IGNORE, REBOOT, RESET, RESTART_APP
from gpunode.gpu.model import Reading
from gpunode.plugin.model import Problem, Unit

STANDING = "standing"
_MEND = {
    **{APPLICATION: "restart-app", IGNORE: "restart-app", RESTART_APP: "restart-app"},
    **{BY_DRIVER: "reset", RESET: "reset", REBOOT: "reboot", HARDWARE: "replace"},
}
_RESETS = frozenset({"reset", "reboot", "drain-and-reset", "bus-reset", "system-reboot"})
_SEVERITY = {"replace": 4, "reboot": 3, "reset": 2, "restart-app": 1}


@dataclass(frozen=True)
class Mark:
    """One reason against a GPU; with `gi`, and `ci`, against these MIG instances only.

    `kind` is an XID's class or `STANDING`. `since` and `last` are when its cause was first and last seen,
    `mended` when its class was satisfied (0: not yet). `generation` and `ecc` are the driver's and the count
    of uncorrectable errors at that time, to be compared with later readings; `asked` is whether the driver
    has asked for a reset meanwhile.
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
    def key(self) -> tuple[object, ...]:
        return (self.gpu, self.code, self.gi, self.ci)

    @property
    def problem(self) -> Problem:
        return Problem(self.code, self.reason, self.since, self.mend or _MEND.get(self.kind, ""))

    def concerns(self, unit: Unit) -> bool:
        """Whether this unit is, or holds, what failed."""
        if unit.gpu != self.gpu:
            return False
        if not unit.partition or self.gi is None:
            return True
        return unit.gi == self.gi and (self.ci is None or unit.ci == self.ci)


def worst(marks: Iterable[Mark]) -> Mark | None:
    """The one to tell: what is hardest to mend, of those the oldest."""
    return max(marks, key=lambda mark: (_SEVERITY.get(mark.problem.mend, 0), -mark.since), default=None)


def asks_reset(reading: Reading) -> bool:
    """Whether the driver asks for what resets the GPU, and not only for the end of some programs."""
    return reading.recovery_action in _RESETS


def with_reading(mark: Mark, reading: Reading, now: float) -> Mark:
    """The mark after its GPU was read."""
    if mark.kind == STANDING:
        return mark
    ecc, seen = mark.ecc, reading.ecc_volatile
    if evidence(mark, reading):
        return replace(mark, mended=mark.mended or now, ecc=seen, generation=reading.generation, asked=False)
    if seen is not None and (ecc is None or seen > ecc):
        mark = replace(mark, ecc=seen)
    if reading.recovery_action not in (None, "none"):  # not over, whatever has been seen before
        return replace(mark, mended=0.0, last=now, asked=mark.asked or asks_reset(reading))
    return replace(mark, generation=mark.generation or reading.generation)


def evidence(mark: Mark, reading: Reading) -> bool:
    """Whether the GPU was reset since: its count of errors fell, its driver was loaded anew, or the driver
    doesn't ask for it any more. Of `HARDWARE` only a boot tells that somebody has seen to it."""
    fell = mark.ecc is not None and reading.ecc_volatile is not None and reading.ecc_volatile < mark.ecc
    reloaded = bool(mark.generation and reading.generation) and mark.generation != reading.generation
    if mark.kind == HARDWARE:
        return reloaded and mark.generation.partition("/")[0] != reading.generation.partition("/")[0]
    return fell or reloaded or (mark.asked and reading.recovery_action == "none")


def healed(mark: Mark, reading: Reading | None, now: float, hold: float) -> bool:
    """Whether the device may be handed out again; `reading` is the GPU's present one."""
    if mark.kind in (RESTART_APP, APPLICATION, IGNORE):
        return now - mark.last >= hold
    told = reading.recovery_action if reading is not None else None
    if mark.kind == BY_DRIVER and told == "none":
        return now - mark.last >= hold
    return bool(mark.mended) and now - max(mark.mended, mark.last) >= hold
