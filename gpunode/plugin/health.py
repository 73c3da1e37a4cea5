"""Health of each unit, derived from events and readings of the GPUs. docs/health.md has the rules for people.

Besides marks (health_marks.py) two things make a GPU unhealthy: it is *lost* when it can't be queried, and
the *driver* is broken when no GPU can. Both end once two consecutive listings show no error, or after some
seconds without an error, so that an intermittent GPU doesn't flap; each further loss within an hour lasts
longer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from gpunode.errors import GpunodeError
from gpunode.facts.xids import BY_DRIVER, HARDWARE, xid
from gpunode.gpu.driver_traces import boot_id
from gpunode.gpu.model import GPU_IS_LOST, Gpu, Inventory, Reading
from gpunode.gpu.nvml import GpuEvent
from gpunode.host import Host
from gpunode.output.typed import from_plain
from gpunode.plugin.config.settings import ALL_XIDS, HealthSettings
from gpunode.plugin.health_marks import (
    FABRIC,
    STANDING,
    Mark,
    is_healed,
    needs_reset,
    reading_marks,
    with_reading,
    worst,
)
from gpunode.plugin.logfmt import Log, OnChange, Rarely
from gpunode.plugin.model import Problem, Unit

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

    def lose(self, gpu: Gpu | Reading, now: float) -> None:
        """The GPU can't be queried."""
        reason = gpu.error
        self._vanished = self._vanished or gpu.error_code == GPU_IS_LOST  # other errors may be transient
        if self.problem is None or self.problem.code != "lost":
            self._losses = [*(when for when in self._losses if now - when < _HOUR), now]
            self.problem = Problem("lost", reason, now)
        elif self.problem.reason != reason:
            self.problem = Problem("lost", reason, self.problem.since)
        self._sightings = 0
        self._listed = False

    def unreadable(self, reading: Reading, now: float) -> None:
        """The inventory lists it without an error, but it can't be read."""
        listed = self._listed
        self.lose(reading, now)
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


_MOST_MARKS = 64  # of one GPU; a storm of different XIDs must not grow without limit; see `_add`


class HealthChecker:
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
        self._remove_ignored()

    # --- events -----------------------------------------------------------------------------------------

    def configure(self, settings: HealthSettings) -> None:
        """Marks that no longer count are removed; events that were ignored before don't count against a GPU
        now."""
        self._settings = settings
        self._remove_ignored()
        for state in self._gpus.values():
            if state.last_good is not None:
                self._apply_reading(state, state.last_good, state.reading_at)

    def seen(self, inventory: Inventory, now: float) -> None:
        self._driver = None
        for gpu in inventory.gpus:
            if not gpu.uuid:
                continue
            state = self._gpus.setdefault(gpu.uuid, GpuState(gpu.uuid))
            if gpu.error:
                state.lose(gpu, now)
            else:
                state.error_free(now)
                self._settle(state, now)

    def readings(self, readings: Sequence[Reading], now: float) -> None:
        for reading in readings:
            state = self._gpus.setdefault(reading.uuid, GpuState(reading.uuid))
            before = state.reading
            if reading == before:
                continue
            state.reading, state.reading_at = reading, now
            if reading.error:
                state.unreadable(reading, now)
                continue
            if before is not None and before.error:
                state.readable(now)
            last = state.last_good
            self._count_ecc_errors(state, reading, last, now)
            state.last_good = reading
            self._apply_reading(state, reading, now)
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
                still = [
                    mark
                    for mark in marks
                    if not is_healed(mark, known.reading, now, self._hold(known, mark, now))
                ]
                self._put(gpu, still)

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
        known = xid(event.xid)
        gi, ci = (None, None) if known.whole else (event.gi, event.ci)
        return Mark(event.uuid, f"xid-{event.xid}", known.text, known.kind, now, now, gi=gi, ci=ci)

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
            return
        # the bound must not leave an instance healthy that only this mark concerns
        last = worst((marks[-1], mark)) or mark
        self._put(mark.gpu, [*marks[:-1], replace(last, gi=None, ci=None, last=now, mended=0.0)])
        if times := self._rarely.times(("many", mark.gpu)):
            self._log.error(
                f"the GPU has more than {_MOST_MARKS} problems; the last one counts for the whole GPU",
                device=mark.gpu,
                reason=last.reason,
                times=times,
            )

    def _apply_reading(self, state: GpuState, reading: Reading, now: float) -> None:
        """Add marks for problems in the reading, and end those that it no longer shows."""
        new_marks = reading_marks(reading, now) if readings_count(self._settings) else ()
        present = {mark.code: mark for mark in new_marks}
        marks = self._marks.get(state.uuid, ())
        self._put(
            state.uuid,
            [
                replace(mark, mended=mark.mended or now)
                if mark.kind == STANDING and mark.code not in present
                else mark
                for mark in marks
            ],
        )
        for mark in present.values():
            self._add(mark, now)

    def _count_ecc_errors(self, state: GpuState, reading: Reading, last: Reading | None, now: float) -> None:
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
        self.kept = tuple(mark for unit_marks in self._marks.values() for mark in unit_marks)

    def _remove_ignored(self) -> None:
        """End marks that don't count under the present settings, including those from before a restart."""
        for gpu, marks in list(self._marks.items()):
            for mark in marks:
                if not self._still_counts(mark):
                    self._log.info("problem cleared", device=gpu, reason=mark.reason)
            self._put(gpu, [mark for mark in marks if self._still_counts(mark)])

    def _still_counts(self, mark: Mark) -> bool:
        return readings_count(self._settings) if mark.xid is None else counts(mark.xid, self._settings)

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


# Health memory: the marks in ``STATE_DIR/health.json``, which tell a restarted plugin the unhealthy GPUs.
#
# It is forgotten with a reboot, which resets every GPU; only what requires other hardware is kept. An invalid
# file is renamed to ``health.json.broken``, with a warning.

_VERSION = 1
_MEMORY_FILE = "health.json"
_WRITE_PAUSE_SECONDS = 2.0  # a storm of events must not cause a storm of writes
_WRITE_RETRY_SECONDS = 30.0  # a disk that was full may have room again
_MOST_BYTES = 1 << 20
_MOST_REMEMBERED = 4096


class HealthMemory:
    """Read once; as a part of the service write what has changed. See `gpunode.plugin.model.ServicePart`."""

    def __init__(self, host: Host, state_dir: str, log: Log) -> None:
        self._host = host
        self._path = f"{state_dir.rstrip('/')}/{_MEMORY_FILE}"
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
            self._rename_invalid(repr(error))
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
            self._next = now + (
                _WRITE_PAUSE_SECONDS if self.source() == self._written else _WRITE_RETRY_SECONDS
            )

    def close(self) -> None:
        """Write all unwritten changes."""
        if self.source() != self._written:
            self._write(self.source())

    def _write(self, marks: tuple[Mark, ...]) -> None:
        document = {
            "version": _VERSION,
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

    def _rename_invalid(self, reason: str) -> None:
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
    if document["version"] != _VERSION:
        raise ValueError(f"version {document['version']!r}, not {_VERSION}")
    return str(document["bootId"]), tuple(_mark(item) for item in document["marks"][:_MOST_REMEMBERED])


def _not_after(mark: Mark, now: float) -> Mark:
    return replace(mark, since=min(mark.since, now), last=min(mark.last, now), mended=min(mark.mended, now))


def _mark(item: Any) -> Mark:
    mark = from_plain(Mark, item, unknown=False)
    if not all(math.isfinite(when) for when in (mark.since, mark.last, mark.mended)):
        raise ValueError("invalid time")
    if not mark.gpu or (mark.xid is None and mark.code.startswith("xid-")):
        raise ValueError(f"invalid mark: {mark.code!r}")
    return mark
