"""The judge: takes news of the GPUs and tells each unit's problem. docs/health.md has the rules for people.

Beside marks (see marks.py) two things keep a GPU back: it is *lost* when it can't be asked, and the *driver*
is broken when none can. Both are over when the GPU was seen whole twice running, or for some seconds, so that
one that comes and goes doesn't flap; each further loss within an hour costs a longer time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpunode.dataclass import replace
from gpunode.facts.xids import BY_DRIVER, HARDWARE, xid
from gpunode.gpu.events import GpuEvent
from gpunode.gpu.model import Inventory, Reading
from gpunode.plugin.health.conditions import FABRIC, conditions
from gpunode.plugin.health.marks import STANDING, Mark, asks_reset, healed, with_reading, worst
from gpunode.plugin.health.rules import counts, readings_count
from gpunode.plugin.health.state import GpuState
from gpunode.plugin.logfmt import Log, Rarely
from gpunode.plugin.model import Problem, Unit
from gpunode.plugin.settings import HealthSettings

_MOST_MARKS = 64  # of one GPU; a storm of different XIDs must not grow without end


class HealthJudge:
    """See `gpunode.plugin.ledger.Judge`. `kept` is what health memory writes, replaced as a whole."""

    def __init__(
        self, settings: HealthSettings, log: Log | None = None, remembered: Iterable[Mark] = ()
    ) -> None:
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

    # --- news ------------------------------------------------------------------------------------------

    def configure(self, settings: HealthSettings) -> None:
        """Marks that count no longer go; what was ignored before is not held against a GPU now."""
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
                state.whole(now)
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
                state.mute(reading.error, now)
                continue
            if before is not None and before.error:
                state.speaks(now)
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
            self._say("health event of an unknown GPU", device=event.uuid, reason=mark.reason, times=times)

    def broken(self, reason: str, sure: bool, now: float) -> None:
        if not sure:
            return
        since = self._driver.since if self._driver is not None else now
        self._driver = Problem("driver", reason, since)
        for state in self._gpus.values():
            state.blind(self._driver)

    def tick(self, now: float) -> None:
        for state in self._gpus.values():
            self._settle(state, now)
        if self._driver is not None:
            return  # nobody can tell whether a cause is gone
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

    # --- marks -----------------------------------------------------------------------------------------

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
        """Take a mark; of the same one that is there only what is newer."""
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
            mark = replace(mark, generation=good.generation, ecc=good.ecc_volatile, asked=asks_reset(good))
        if len(marks) < _MOST_MARKS:
            self._put(mark.gpu, [*marks, mark])

    def _stand(self, state: GpuState, reading: Reading, now: float) -> None:
        """Marks for what the reading shows, and the end of those that it doesn't show any more."""
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
        """More uncorrectable errors than before: as grave as the event that should have told it."""
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
        """The end of marks that don't count by the settings of now, a restart's as well."""
        for gpu, marks in list(self._marks.items()):
            for mark in marks:
                if not self._still_counts(mark) and self._log is not None:
                    self._log.info("no longer held against this GPU", device=gpu, reason=mark.reason)
            self._put(gpu, [mark for mark in marks if self._still_counts(mark)])

    def _still_counts(self, mark: Mark) -> bool:
        if mark.code.startswith("xid-"):
            return counts(int(mark.code.removeprefix("xid-")), self._settings)
        return readings_count(self._settings)

    def _healed(self, state: GpuState, mark: Mark, now: float) -> bool:
        return healed(mark, state.reading, now, self._hold(state, mark, now))

    def _hold(self, state: GpuState, mark: Mark, now: float) -> float:
        """Seconds; joining the fabric for the first time is a beginning, no failure."""
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

    # --- saying it -------------------------------------------------------------------------------------

    def _ignored(self, event: GpuEvent) -> None:
        times = self._rarely.times((event.kind, event.uuid, event.xid))
        if times and self._log is not None:
            more = {"xid": event.xid, "meaning": xid(event.xid).meaning} if event.xid is not None else {}
            self._log.info("ignored GPU event", kind=event.kind, device=event.uuid, times=times, **more)

    def _say(self, message: str, **fields: object) -> None:
        if self._log is not None:
            self._log.error(message, **fields)
