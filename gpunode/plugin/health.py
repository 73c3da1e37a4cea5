"""Health of each unit, judged from events and readings of the GPUs. docs/health.md has the rules for people.

Besides marks (see `Mark`) two things make a GPU unhealthy: it is *lost* when it can't be queried, and the
*driver* is broken when no GPU can. Both end after two consecutive error-free readings, or after some seconds
without an error, so that an intermittent GPU doesn't flap; each further loss within an hour lasts longer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gpunode.errors import GpunodeError
from gpunode.facts.kernel_log import APPLICATION, BY_DRIVER, HARDWARE, IGNORE, REBOOT, RESET, RESTART_APP, xid
from gpunode.gpu.driver_traces import boot_id
from gpunode.gpu.model import Inventory, Reading
from gpunode.gpu.nvml import GpuEvent
from gpunode.host import Host
from gpunode.output.typed import from_plain
from gpunode.plugin.config.settings import ALL_XIDS, HealthSettings
from gpunode.plugin.logfmt import Log, OnChange, Rarely
from gpunode.plugin.model import Problem, Unit

# Problems in a GPU's reading. Pure.

FABRIC = "fabric"
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
class Condition:
    """A problem that lasts as long as the reading shows it."""

    code: str
    reason: str
    mend: str


def conditions(reading: Reading) -> Iterator[Condition]:
    """Every hardware condition of a reading. A nonzero count of uncorrectable ECC errors is not a condition:
    row remapping and page retirement report its consequences."""
    if reading.remap_failed:
        yield Condition("row-remap", "a row of memory could not be remapped", "replace")
    elif reading.remap_pending:
        yield Condition("row-remap", "a row of memory waits for a reset to be remapped", "reset")
    if reading.retired_pending:
        yield Condition("page-retirement", "a page of memory waits for a reset to be retired", "reset")
    if reading.recovery_action not in (None, "none"):
        action = str(reading.recovery_action)
        reason, mend = _ACTIONS.get(action, (f"the driver requests the recovery action {action}", ""))
        yield Condition("recovery-action", reason, mend)
    if reading.fabric_state == "in-progress":
        yield Condition(FABRIC, "the GPU has not yet joined the NVLink fabric", "")
    elif reading.fabric_error:
        yield Condition(FABRIC, f"NVLink fabric: {reading.fabric_error}", "reset")


# Marks: why a GPU, or some MIG instances of it, must not be allocated, and what must happen before they may
# be again. Pure.
#
# A mark heals when its cause is gone, what its class requires has been observed, and the hold-down time is
# over:
#
# - restart-app: nothing more; the affected program has ended
# - by-driver: the driver's recovery action reads none, or a reset was seen
# - reset, reboot: a reset was seen (see `evidence`)
# - hardware: the node was booted
# - standing: a problem in a reading; it ends when the reading no longer shows it

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
    `mended` when the requirement of its class was met (0: not yet). `generation` and `ecc` are the driver's
    and the count of uncorrectable errors at that time, to be compared with later readings; `asked` is whether
    the driver has requested a reset meanwhile.
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
        """Whether this unit is, or contains, the failed one."""
        if unit.gpu != self.gpu:
            return False
        if not unit.partition or self.gi is None:
            return True
        return unit.gi == self.gi and (self.ci is None or unit.ci == self.ci)


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


def healed(mark: Mark, reading: Reading | None, now: float, hold: float) -> bool:
    """Whether the device may be allocated again; `reading` is the GPU's present one."""
    if mark.kind in (RESTART_APP, APPLICATION, IGNORE):
        return now - mark.last >= hold
    action = reading.recovery_action if reading is not None else None
    if mark.kind == BY_DRIVER and action == "none":
        return now - mark.last >= hold
    return bool(mark.mended) and now - max(mark.mended, mark.last) >= hold


# Which events count, after NVIDIA's DP_DISABLE_HEALTHCHECKS and DP_ENABLE_HEALTHCHECKS. Pure.


def counts(number: int, settings: HealthSettings) -> bool:
    """Whether this XID makes a device unhealthy: enabled beats disabled beats its class."""
    if settings.enabled & {number, ALL_XIDS}:
        return True
    if settings.disabled & {number, ALL_XIDS}:
        return False
    return xid(number).counts


def readings_count(settings: HealthSettings) -> bool:
    """Whether ECC, row remapping, the recovery action and the fabric affect health. Disabling all XIDs
    disables these too."""
    return ALL_XIDS not in settings.disabled or ALL_XIDS in settings.enabled


# State of one GPU in addition to its marks: whether it was seen without an error, and how often it failed.

SIGHTINGS_TO_HEAL = 2
SETTLED_SECONDS = 10.0  # healthy for this long counts as a second observation if no other follows
_HOUR = 3600.0
_VANISHED = ("lost:", "(NVML 15)")  # model.NOT_LISTED and NVML_ERROR_GPU_IS_LOST: not transient


class GpuState:
    """One GPU. Times are seconds since the epoch."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self.reading: Reading | None = None
        self.reading_at = 0.0
        self.last_good: Reading | None = None  # the last reading without an error
        self.problem: Problem | None = None  # lost, or the driver is broken
        self._sightings = 0
        self._whole_since = 0.0
        self._episodes: list[float] = []
        self._losses: list[float] = []
        self._vanished = False
        self._listed = False  # the inventory reported no error for it

    def lose(self, reason: str, now: float) -> None:
        """The GPU can't be queried."""
        self._vanished = self._vanished or any(sign in reason for sign in _VANISHED)
        if self.problem is None or self.problem.code != "lost":
            self._losses = [*(when for when in self._losses if now - when < _HOUR), now]
            self.problem = Problem("lost", reason, now)
        elif self.problem.reason != reason:
            self.problem = Problem("lost", reason, self.problem.since)
        self._sightings = 0
        self._listed = False

    def unreadable(self, reason: str, now: float) -> None:
        """The inventory lists it without an error, but it can't be read."""
        listed = self._listed
        self.lose(reason, now)
        self._listed = listed

    def readable(self, now: float) -> None:
        """The GPU can be read again: the first error-free observation, unless the inventory reports an
        error."""
        if self._listed:
            self._sightings, self._whole_since = 1, now

    def driver_broken(self, problem: Problem) -> None:
        """No GPU can be queried."""
        if self.problem is None or self.problem.code != "lost":
            self.problem = problem
        self._sightings = 0

    def error_free(self, now: float) -> None:
        """The GPU was seen without an error."""
        if self._sightings == 0:
            self._whole_since = now
        self._sightings += 1
        self._listed = True

    def settle(self, now: float, hold: float) -> bool:
        """Let time pass; True if the GPU is back after it had vanished, which takes a reset."""
        if self.problem is None or self._sightings == 0 or (self.reading is not None and self.reading.error):
            return False
        whole = now - self._whole_since
        if self._sightings < SIGHTINGS_TO_HEAL and whole < SETTLED_SECONDS:
            return False
        lost = self.problem.code == "lost"
        if lost and len(self._losses) > 1 and whole < self.longer(hold, len(self._losses) - 2):
            return False
        vanished, self._vanished = self._vanished, False
        self.problem = None
        return vanished

    def episode(self, now: float) -> None:
        """The GPU got its first mark."""
        self._episodes = [*self._episodes[-31:], now]

    def recent(self, now: float) -> int:
        """How often it was marked within the last hour."""
        return sum(now - when < _HOUR for when in self._episodes)

    def longer(self, hold: float, times: int) -> float:
        """Twice as long each time, up to an hour."""
        return max(hold, min(hold * 2.0 ** min(times, 16), _HOUR))


_MOST_MARKS = 64  # of one GPU; a storm of different XIDs must not grow without limit


class HealthJudge:
    """Receives the ledger's events and returns each unit's problem. `now` is seconds since the epoch.

    The ledger calls it under its own lock, one call at a time. Other methods return nothing; the caller sees
    changes by calling `problem` again, which is cheap. `kept` is the content for health memory, replaced as a
    whole.
    """

    def __init__(self, settings: HealthSettings, log: Log, remembered: Iterable[Mark] = ()) -> None:
        self._settings = settings
        self._log = log
        self._rarely = Rarely()
        self._gpus: dict[str, GpuState] = {}
        self._marks: dict[str, tuple[Mark, ...]] = {}
        self._driver: Problem | None = None
        self.kept: tuple[Mark, ...] = ()
        for mark in remembered:
            self._put(mark.gpu, (*self._marks.get(mark.gpu, ()), mark))
        self._lift()

    # --- news -------------------------------------------------------------------------------------------

    def configure(self, settings: HealthSettings) -> None:
        """Marks that no longer count are removed; events that were ignored before don't count against a GPU
        now."""
        self._settings = settings
        self._lift()
        for state in self._gpus.values():
            if state.last_good is not None:
                self._stand(state, state.last_good, state.reading_at)

    def seen(self, inventory: Inventory, now: float) -> None:
        self._driver = None
        for gpu in inventory.gpus:
            if not gpu.uuid:
                continue
            state = self._gpus.get(gpu.uuid)
            if state is None:
                state = self._gpus[gpu.uuid] = GpuState(gpu.uuid)
            if gpu.error:
                state.lose(gpu.error, now)
            else:
                state.error_free(now)
                self._settle(state, now)

    def readings(self, readings: Sequence[Reading], now: float) -> None:
        for reading in readings:
            state = self._gpus.get(reading.uuid)
            if state is None:
                state = self._gpus[reading.uuid] = GpuState(reading.uuid)
            before = state.reading
            if reading == before:
                continue
            state.reading, state.reading_at = reading, now
            if reading.error:
                state.unreadable(reading.error, now)
                continue
            if before is not None and before.error:
                state.readable(now)
            last = state.last_good
            self._grown(state, reading, last, now)
            state.last_good = reading
            self._stand(state, reading, now)
            self._put(
                reading.uuid,
                [with_reading(mark, reading, now) for mark in self._marks.get(reading.uuid, ())],
            )

    def event(self, event: GpuEvent, now: float) -> None:
        mark = self._mark_of(event, now)
        if mark is None:
            self._ignored(event)
        elif event.uuid in self._gpus:
            self._add(mark, now)
        elif times := self._rarely.times(("unknown", mark.code, event.uuid)):
            self._log.error(
                "health event of an unknown GPU", device=event.uuid, reason=mark.reason, times=times
            )

    def broken(self, reason: str, sure: bool, now: float) -> None:
        if not sure:
            return
        since = self._driver.since if self._driver is not None else now
        self._driver = Problem("driver", reason, since)
        for state in self._gpus.values():
            state.driver_broken(self._driver)

    def tick(self, now: float) -> None:
        for state in self._gpus.values():
            self._settle(state, now)
        if self._driver is not None:
            return  # it is unknown whether a cause is gone
        for gpu, marks in list(self._marks.items()):
            known = self._gpus.get(gpu)
            if known is not None and known.problem is None:
                self._put(gpu, [mark for mark in marks if not self._healed(known, mark, now)])

    def problem(self, unit: Unit) -> Problem | None:
        marks = self._marks.get(unit.gpu)
        if marks:
            mark = worst(mark for mark in marks if mark.concerns(unit))
            if mark is not None:
                return mark.problem
        state = self._gpus.get(unit.gpu)
        return state.problem if state is not None else self._driver

    # --- marks ------------------------------------------------------------------------------------------

    def _mark_of(self, event: GpuEvent, now: float) -> Mark | None:
        if event.kind == "ecc-double" and readings_count(self._settings):
            return Mark(
                event.uuid, "ecc", "double-bit ECC error", BY_DRIVER, now, now, gi=event.gi, ci=event.ci
            )
        if event.kind != "xid" or event.xid is None or not counts(event.xid, self._settings):
            return None
        found = xid(event.xid)
        gi, ci = (None, None) if found.whole else (event.gi, event.ci)
        return Mark(event.uuid, f"xid-{event.xid}", found.text, found.kind, now, now, gi=gi, ci=ci)

    def _add(self, mark: Mark, now: float) -> None:
        """Add a mark; of an existing equal mark update only newer values."""
        state = self._gpus[mark.gpu]
        marks = self._marks.get(mark.gpu, ())
        same = next((old for old in marks if old.key == mark.key), None)
        if same is not None:
            if mark.kind == STANDING and not same.mended and same.reason == mark.reason:
                return
            fresh = replace(same, last=now, mended=0.0, reason=mark.reason, mend=mark.mend)
            self._put(mark.gpu, [fresh if old is same else old for old in marks])
            return
        if not marks:
            state.episode(now)
        good = state.last_good
        if good is not None and mark.kind != STANDING:
            mark = replace(mark, generation=good.generation, ecc=good.ecc_volatile, asked=needs_reset(good))
        if len(marks) < _MOST_MARKS:
            self._put(mark.gpu, [*marks, mark])

    def _stand(self, state: GpuState, reading: Reading, now: float) -> None:
        """Add marks for problems in the reading, and end those that it no longer shows."""
        found = {item.code: item for item in conditions(reading)} if readings_count(self._settings) else {}
        marks = self._marks.get(state.uuid, ())
        self._put(
            state.uuid,
            [
                replace(mark, mended=mark.mended or now)
                if mark.kind == STANDING and mark.code not in found
                else mark
                for mark in marks
            ],
        )
        for item in found.values():
            self._add(Mark(state.uuid, item.code, item.reason, STANDING, now, now, item.mend), now)

    def _grown(self, state: GpuState, reading: Reading, last: Reading | None, now: float) -> None:
        """More uncorrectable errors than before: as severe as the event that should have reported it."""
        if last is None or last.ecc_volatile is None or reading.ecc_volatile is None:
            return
        more = reading.ecc_volatile - last.ecc_volatile
        if more > 0 and readings_count(self._settings):
            reason = f"uncorrectable ECC errors ({reading.ecc_volatile} since the last reset)"
            self._add(Mark(state.uuid, "ecc", reason, BY_DRIVER, now, now), now)

    def _put(self, gpu: str, marks: Sequence[Mark]) -> None:
        if tuple(marks) == self._marks.get(gpu, ()):
            return
        if marks:
            self._marks[gpu] = tuple(marks)
        else:
            self._marks.pop(gpu, None)
        self.kept = tuple(mark for found in self._marks.values() for mark in found)

    def _lift(self) -> None:
        """End marks that don't count under the present settings, including those from before a restart."""
        for gpu, marks in list(self._marks.items()):
            for mark in marks:
                if not self._still_counts(mark):
                    self._log.info("problem cleared", device=gpu, reason=mark.reason)
            self._put(gpu, [mark for mark in marks if self._still_counts(mark)])

    def _still_counts(self, mark: Mark) -> bool:
        if mark.code.startswith("xid-"):
            return counts(int(mark.code.removeprefix("xid-")), self._settings)
        return readings_count(self._settings)

    def _healed(self, state: GpuState, mark: Mark, now: float) -> bool:
        return healed(mark, state.reading, now, self._hold(state, mark, now))

    def _hold(self, state: GpuState, mark: Mark, now: float) -> float:
        """Seconds; joining the fabric for the first time is a start, not a failure."""
        times = state.recent(now)
        if mark.code == FABRIC and not mark.mend and times <= 1:
            return 0.0
        return state.longer(self._settings.hold_seconds, max(0, times - 1))

    def _settle(self, state: GpuState, now: float) -> None:
        if state.settle(now, self._settings.hold_seconds):
            marks = self._marks.get(state.uuid, ())
            untouched = (STANDING, HARDWARE)
            fresh = [
                mark if mark.kind in untouched else replace(mark, mended=mark.mended or now) for mark in marks
            ]
            self._put(state.uuid, fresh)

    # --- reporting --------------------------------------------------------------------------------------

    def _ignored(self, event: GpuEvent) -> None:
        if times := self._rarely.times((event.kind, event.uuid, event.xid)):
            more = {"xid": event.xid, "meaning": xid(event.xid).meaning} if event.xid is not None else {}
            self._log.info("ignored GPU event", kind=event.kind, device=event.uuid, times=times, **more)


# Health memory: the marks in ``STATE_DIR/health.json``, so that a restarted plugin still knows an unhealthy
# GPU.
#
# It is forgotten with a reboot, which resets every GPU; only what requires other hardware is kept. A file
# that can't be understood is renamed to ``health.json.broken``, with a warning.

VERSION = 1
_FILE = "health.json"
_PAUSE_SECONDS = 2.0  # a storm of events must not cause a storm of writes
_RETRY_SECONDS = 30.0  # a disk that was full may have room again
_MOST_BYTES = 1 << 20
_MOST_REMEMBERED = 4096


class HealthMemory:
    """Read once; as a part of the service write what has changed. See `gpunode.plugin.model.Part`."""

    def __init__(self, host: Host, state_dir: str, log: Log) -> None:
        self._host = host
        self._path = f"{state_dir.rstrip('/')}/{_FILE}"
        self._log = log
        self._say = OnChange(log)
        self._written: tuple[Mark, ...] = ()
        self._next = 0.0
        self.source: Callable[[], tuple[Mark, ...]] = lambda: self._written

    def load(self) -> tuple[Mark, ...]:
        """The marks that still count. Never raises: the plugin serves without memory as well."""
        try:
            data = self._host.read_bytes(self._path)
        except (GpunodeError, OSError) as error:
            self._log.warning("health memory can't be read", reason=str(error))
            return ()
        if data is None:
            return ()
        try:
            boot, marks = _read(data)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self._lay_aside(repr(error))
            return ()
        self._written = marks
        now = boot_id(self._host)
        if boot and now and boot != now:
            marks = tuple(mark for mark in marks if mark.kind == HARDWARE)
        present = self._host.now()  # a clock that was ahead must not prolong a hold time
        marks = tuple(_not_after(mark, present) for mark in marks)
        if marks:
            self._log.info("health memory read", path=self._path, marks=len(marks))
        return marks

    def tick(self, now: float) -> None:
        """Write changes, at limited intervals."""
        if now >= self._next and self.source() != self._written:
            self._write(self.source())
            self._next = now + (_PAUSE_SECONDS if self.source() == self._written else _RETRY_SECONDS)

    def close(self) -> None:
        """Write all unwritten changes."""
        if self.source() != self._written:
            self._write(self.source())

    def _write(self, marks: tuple[Mark, ...]) -> None:
        document = {
            "version": VERSION,
            "bootId": boot_id(self._host),
            "marks": [asdict(mark) for mark in marks[:_MOST_REMEMBERED]],
        }
        try:
            self._host.make_dirs(self._path.rpartition("/")[0])
            data = (json.dumps(document, indent=1) + "\n").encode()
            self._host.write_atomic(self._path, data, keep=False)
            self._written = marks
            self._say.reset()
        except (GpunodeError, OSError) as error:
            self._say.warning(
                "health memory can't be written: it is lost when the plugin restarts", reason=str(error)
            )

    def _lay_aside(self, reason: str) -> None:
        aside = self._path + ".broken"
        try:
            self._host.rename(self._path, aside)
            self._log.warning("health memory is invalid and was renamed", path=aside, reason=reason)
        except (GpunodeError, OSError) as error:
            self._log.warning("health memory is invalid", path=self._path, reason=str(error))


def _read(data: bytes) -> tuple[str, tuple[Mark, ...]]:
    if len(data) > _MOST_BYTES:
        raise ValueError(f"{len(data)} bytes")
    document = json.loads(data)
    if document["version"] != VERSION:
        raise ValueError(f"version {document['version']!r}, not {VERSION}")
    return str(document["bootId"]), tuple(_mark(item) for item in document["marks"][:_MOST_REMEMBERED])


def _not_after(mark: Mark, now: float) -> Mark:
    return replace(mark, since=min(mark.since, now), last=min(mark.last, now), mended=min(mark.mended, now))


def _mark(item: Any) -> Mark:
    mark = from_plain(Mark, item, unknown=False)
    if not all(math.isfinite(when) for when in (mark.since, mark.last, mark.mended)):
        raise ValueError("invalid time")
    if not mark.gpu or (mark.code.startswith("xid-") and not mark.code.removeprefix("xid-").isdecimal()):
        raise ValueError(f"invalid mark: {mark.code!r}")
    return mark
