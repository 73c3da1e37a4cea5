"""One sentinel's life as its parent hears it: lines come in, the sink is told, and how it ended is said."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Any

from gpunode._process import LineChild
from gpunode.dataclass import dataclass, replace
from gpunode.gpu.child import signal_name
from gpunode.gpu.model import Inventory, inventory_from_json
from gpunode.gpu.note import NvmlQuestion, read_note
from gpunode.gpu.wire import event_from_json, readings_from_json, topology_from_json
from gpunode.plugin.backend import Sink
from gpunode.plugin.logfmt import Log, Rarely
from gpunode.plugin.nvidia.missed import MissedXids

_CHECK_SECONDS = 5.0  # how often `stopped` is asked while nothing comes and nobody wakes the child
_FATAL = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}


@dataclass(frozen=True)
class Outcome:
    """How a sentinel ended. `kind`: stopped (we did), again, error (NVML named it), hung, crashed.

    `question` is what NVML has not answered, and `waiting` the wait for events, if it was in one.
    """

    kind: str
    reason: str = ""
    question: NvmlQuestion | None = None
    waiting: NvmlQuestion | None = None

    def ended(self, code: int | None) -> Outcome:
        """With what the exit code adds: only a signal of the processor or of abort(3) is NVML's crash."""
        if self.kind != "crashed":
            return self
        if code is not None and -code in _FATAL:
            named = replace(self, question=self.question or self.waiting)
            return named.because(f"NVML crashed the process that asked it ({signal_name(code)})")
        ended = f"was ended by {signal_name(code)}" if code and code < 0 else f"ended with status {code}"
        return replace(self, question=None, reason=self.reason or f"the process that asks NVML {ended}")

    def because(self, reason: str) -> Outcome:
        """With this reason and the question."""
        return replace(self, reason=f"{reason}: {self.question}" if self.question else reason)


class Hearing:
    """Listens to one child. `found` is told of each inventory: why it has no GPU to advertise, or ""."""

    def __init__(
        self,
        child: LineChild,
        sink: Sink,
        log: Log,
        seconds: float,
        found: Callable[[str], None],
        clock: Callable[[], float],
        rarely: Rarely,
        missed: MissedXids,
    ) -> None:
        self._child = child
        self._sink = sink
        self._log = log
        self._seconds = seconds
        self._found = found
        self._clock = clock
        self._rarely = rarely
        self._count = -1
        self._readings: dict[str, Any] = {}
        self._missed = missed
        self._seen: Inventory | None = None
        self._watching = False
        self._whole = False  # GPUs and their events are known, and what was missed was told

    def run(self, stopped: Callable[[], bool]) -> Outcome:
        """Until it ends, is silent for too long without another question to NVML, or `stopped`."""
        deadline = self._clock() + self._seconds
        pause = min(_CHECK_SECONDS, self._seconds / 3)
        questions = 0
        while not stopped():
            line = self._child.read_line(min(pause, deadline - self._clock()))
            if line is None:
                count = self._note()[0]
                if count != questions:
                    questions, deadline = count, self._clock() + self._seconds
                elif self._clock() >= deadline and not stopped():
                    silent = self._end("hung", "")
                    return silent.because(f"NVML did not answer within {self._seconds:g} s")
                continue
            deadline = self._clock() + self._seconds
            if line == "":
                return self._end("crashed", "")
            outcome = self._take(line)
            if outcome is not None:
                return outcome
        return Outcome("stopped")

    def _take(self, line: str) -> Outcome | None:
        try:
            document = json.loads(line)
            if not isinstance(document, dict):
                raise TypeError(line[:100])
            outcome = self._document(document)
            self._catch_up()
            return outcome
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return self._end("crashed", f"the process that asks NVML said {line[:100]!r}")

    def _catch_up(self) -> None:
        """Tell what happened between two children, once this one watches the GPUs."""
        if self._whole:
            self._missed.heard()
        elif self._watching and self._seen is not None:
            self._whole = True
            for event in self._missed.take(self._seen):
                self._log.warning("XID while NVML was opened anew", device=event.uuid, xid=event.xid)
                self._sink.event(event)

    def _document(self, document: dict[str, Any]) -> Outcome | None:
        if "event" in document:
            self._sink.event(event_from_json(document["event"]))
        elif "readings" in document:
            changed = {reading.uuid: reading for reading in readings_from_json(document["readings"])}
            self._readings |= changed
            self._sink.readings(tuple(self._readings.values()))
        elif "inventory" in document:
            self._inventory(document)
        elif "watching" in document:
            self._watching = "error" not in document["watching"]
            self._tell_watching(document["watching"])
        elif "error" in document:
            return Outcome("error", str(document["error"]["message"]))
        elif "again" in document:
            return Outcome("again", str(document["again"]))
        elif "stuck" in document:
            stuck = self._end("hung", "")
            named = replace(stuck, question=stuck.question or stuck.waiting)
            return named.because(str(document["stuck"]))
        return None

    @property
    def uuids(self) -> dict[int, str]:
        """The UUIDs that this child has read, by index."""
        return {gpu.index: gpu.uuid for gpu in self._seen.gpus if gpu.uuid} if self._seen else {}

    def _inventory(self, document: dict[str, Any]) -> None:
        seen = inventory_from_json(document["inventory"])
        self._readings = {
            uuid: reading
            for uuid, reading in self._readings.items()
            if uuid in {gpu.uuid for gpu in seen.gpus}
        }
        self._seen = seen
        self._sink.seen(seen, topology_from_json(document["topology"]))
        reason = _none(seen)
        self._found(reason)
        whole = sum(not gpu.error for gpu in seen.gpus)
        if not reason and whole != self._count:
            self._log.info("GPUs found", count=len(seen.gpus), readable=whole)
            self._count = whole

    def _tell_watching(self, state: dict[str, Any]) -> None:
        if not self._rarely.times(json.dumps(state, sort_keys=True)):
            return
        if "error" in state:
            self._log.warning("health events can't be watched, trying again", reason=state["error"])
            return
        for uuid in state["unsupported"]:
            self._log.warning("this GPU reports no health events", device=uuid)
        self._log.info("watching health events", count=state["count"])
        for uuid, reason in state["failed"].items():
            self._log.warning("this GPU's events can't be watched", device=uuid, reason=reason)

    def _end(self, kind: str, reason: str) -> Outcome:
        words = self._child.last_words
        if kind == "crashed" and not reason and words:
            reason = f"the process that asks NVML ended: {words}"
        return Outcome(kind, reason, *self._note()[1:])

    def _note(self) -> tuple[int, NvmlQuestion | None, NvmlQuestion | None]:
        try:
            return read_note(self._child.note())
        except ValueError:
            return 0, None, None


def _none(seen: Inventory) -> str:
    """Why there is no GPU that could be advertised, now or later; "" if there is one."""
    if any(gpu.uuid for gpu in seen.gpus):
        return ""
    return "; ".join(f"GPU {gpu.index}: {gpu.error}" for gpu in seen.gpus) or "NVML lists no GPU"
