"""Reads the GPUs through a child that keeps NVML open (gpu/nvml_watcher.py), and restarts that child.

NVML may hang or crash, and must not take the plugin with it. An error that NVML itself reports (driver not
loaded, library mismatch) is certain at once. When a child is silent or gone, its note says which query to
which GPU NVML did not answer. A query about links or events is given up for that GPU. Any other one may have
failed because the node was busy: after the second failure in a row the GPU that it names is left out, and
without a name the driver is broken. All of it is tried again later. After timeouts the next query waits
longer each time, because a child stuck in the kernel can't even be killed, and no third child is started
beside two such.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Event, Lock
from typing import Any, NamedTuple

from gpunode.gpu.child import (
    EVENTS,
    GPU,
    LINKS,
    ChildFailure,
    NvmlQuestion,
    read_note,
    signal_name,
    start,
)
from gpunode.gpu.driver_traces import gpu_addresses, module, node_traces
from gpunode.gpu.library_paths import nvml_options
from gpunode.gpu.model import Inventory, Reading, Topology, inventory_from_json
from gpunode.gpu.nvml import GpuEvent
from gpunode.gpu.probe import probe
from gpunode.host import Host
from gpunode.host.files import LogReader
from gpunode.host.process import LineChild
from gpunode.output.typed import from_plain
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.logfmt import Log, OnChange, Rarely
from gpunode.plugin.model import ReportReceiver, pci_numbers
from gpunode.plugin.nvidia.platform import TEGRA, nvml_library

# XIDs that happened while no child listened: from the kernel's log.
#
# The log's reader starts where the last child last reported something, so everything after it is new; no
# clocks are compared. Only the kernel's own lines count, not those that root's programs write there.

_LOG = "/dev/kmsg"
_MOST = 256
# "<prefix>;NVRM: Xid (PCI:0000:3b:00 GPU-I:05 GPU-CI:00): 94, pid=...", kernel_rc.c of NVIDIA's open modules;
# the prefix is priority and facility, sequence number, microseconds, flags
_XID = re.compile(
    r"(?P<level>\d+),[^;]*;NVRM: Xid "
    r"\(PCI:(?P<pci>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})"
    r"(?:\.[0-9])?(?: GPU-I:(?P<gi>\d+))?(?: GPU-CI:(?P<ci>\d+))?\): (?P<xid>\d{1,5}),"
)


class MissedXids:
    """For the thread that listens to the children."""

    def __init__(self, host: Host, log: Log) -> None:
        self._host = host
        self._log = log
        self._reader: LogReader | None = None
        self._reason = ""
        self._module = 0
        self._gap = False  # not before the first child: events before the plugin's start don't count

    def open(self) -> None:
        """Start reading here."""
        try:
            self._reader = LogReader(self._host.path(_LOG))
        except OSError as error:
            self._reason = error.strerror or str(error)
        self._module = module(self._host)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def heard(self) -> None:
        """A child runs and reports events: no event was missed up to here."""
        if self._reader is not None:
            with suppress(OSError):
                self._reader.skip()

    def ended(self) -> None:
        """The child has ended."""
        self._gap = True
        self._module = module(self._host)

    def take(self, seen: Inventory) -> list[GpuEvent]:
        """Missed XIDs of these GPUs. None if the driver was reloaded, because that has reset them."""
        gap, self._gap = self._gap, False
        if self._reader is None:
            if gap and self._reason:
                self._log.info(
                    "XIDs that occurred while NVML was reopened can't be read", log=_LOG, reason=self._reason
                )
                self._reason = ""
            return []
        if module(self._host) != self._module:
            self.heard()
            return []
        try:
            lines = list(self._reader.news())
        except OSError:
            return []
        gpus = {pci_numbers(gpu.pci): gpu.uuid for gpu in seen.gpus if gpu.uuid}
        events = [event for line in lines if (event := _event(line, gpus))]
        return list(dict.fromkeys(events))[:_MOST]


def _event(line: str, gpus: Mapping[Any, str]) -> GpuEvent | None:
    match = _XID.match(line)
    if match is None or int(match["level"]) >> 3:  # a facility other than the kernel
        return None
    uuid = gpus.get(pci_numbers(match["pci"]))
    if uuid is None:
        return None
    gi, ci = (int(match[name]) if match[name] else None for name in ("gi", "ci"))
    return GpuEvent("xid", uuid, int(match["xid"]), gi, ci)


# One run of the watcher from its parent's view: reads lines, calls the sink, and reports how the run ended.

_CHECK_SECONDS = 5.0  # how often `stopped` is called while no line arrives and nothing wakes the child
_FATAL = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}


class WatcherEnd(NamedTuple):
    """How a watcher ended. `kind`: stopped (by us), again, error (reported by NVML), hung, crashed.

    `question` is the query that NVML has not answered, and `waiting` the wait for events, if it was in one.
    """

    kind: str
    reason: str = ""
    question: NvmlQuestion | None = None
    waiting: NvmlQuestion | None = None

    def ended(self, code: int | None) -> WatcherEnd:
        """The end with its exit code: only a signal of the processor or of abort(3) is a crash of NVML's."""
        if self.kind != "crashed":
            return self
        if code is not None and -code in _FATAL:
            outcome = self._replace(question=self.question or self.waiting)
            return outcome.because(f"NVML crashed the process that queried it ({signal_name(code)})")
        ended = f"was ended by {signal_name(code)}" if code and code < 0 else f"ended with status {code}"
        return self._replace(question=None, reason=self.reason or f"the NVML process {ended}")

    def because(self, reason: str) -> WatcherEnd:
        """The end with this reason and the query."""
        return self._replace(reason=f"{reason}: {self.question}" if self.question else reason)


class ChildReader:
    """Listens to one child.

    `on_inventory` is called for each inventory: why it has no GPU to advertise, or "".
    """

    def __init__(
        self,
        child: LineChild,
        sink: ReportReceiver,
        log: Log,
        seconds: float,
        on_inventory: Callable[[str], None],
        clock: Callable[[], float],
        rarely: Rarely,
        missed: MissedXids,
    ) -> None:
        self._child = child
        self._sink = sink
        self._log = log
        self._seconds = seconds
        self._inventory_seen = on_inventory
        self._clock = clock
        self._rarely = rarely
        self._count = -1
        self._readings: dict[str, Any] = {}
        self._missed = missed
        self._seen: Inventory | None = None
        self._watching = False
        self._whole = False  # GPUs and their events are known, and missed events were reported

    def run(self, stopped: Callable[[], bool]) -> WatcherEnd:
        """Read until it ends, is silent for too long without another query to NVML, or `stopped`."""
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
        return WatcherEnd("stopped")

    def _take(self, line: str) -> WatcherEnd | None:
        try:
            document = json.loads(line)
            if not isinstance(document, dict):
                raise TypeError(line[:100])
            outcome = self._document(document)
            self._catch_up()
            return outcome
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return self._end("crashed", f"the NVML process printed {line[:100]!r}")

    def _catch_up(self) -> None:
        """Report what happened between two children, once this one watches the GPUs."""
        if self._whole:
            self._missed.heard()
        elif self._watching and self._seen is not None:
            self._whole = True
            for event in self._missed.take(self._seen):
                self._log.warning("XID while NVML was reopened", device=event.uuid, xid=event.xid)
                self._sink.event(event)

    def _document(self, document: dict[str, Any]) -> WatcherEnd | None:
        if "event" in document:
            self._sink.event(from_plain(GpuEvent, document["event"]))
        elif "readings" in document:
            readings = (from_plain(Reading, reading) for reading in document["readings"])
            self._readings |= {reading.uuid: reading for reading in readings}
            self._sink.readings(tuple(self._readings.values()))
        elif "inventory" in document:
            self._inventory(document)
        elif "watching" in document:
            self._watching = "error" not in document["watching"]
            self._tell_watching(document["watching"])
        elif "error" in document:
            return WatcherEnd("error", str(document["error"]["message"]))
        elif "again" in document:
            return WatcherEnd("again", str(document["again"]))
        elif "stuck" in document:
            stuck = self._end("hung", "")
            outcome = stuck._replace(question=stuck.question or stuck.waiting)
            return outcome.because(str(document["stuck"]))
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
        self._sink.seen(seen, from_plain(Topology, document["topology"]))
        reason = _none(seen)
        self._inventory_seen(reason)
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

    def _end(self, kind: str, reason: str) -> WatcherEnd:
        words = self._child.last_words
        if kind == "crashed" and not reason and words:
            reason = f"the NVML process ended: {words}"
        return WatcherEnd(kind, reason, *self._note()[1:])

    def _note(self) -> tuple[int, NvmlQuestion | None, NvmlQuestion | None]:
        try:
            return read_note(self._child.note())
        except ValueError:
            return 0, None, None


def _none(seen: Inventory) -> str:
    """Why there is no GPU that could ever be advertised; "" if there is one."""
    if any(gpu.uuid for gpu in seen.gpus):
        return ""
    return "; ".join(f"GPU {gpu.index}: {gpu.error}" for gpu in seen.gpus) or "NVML lists no GPU"


_UNSURE_SECONDS = 5.0  # while there is no GPU, or one is missing
_LOOK_SECONDS = 1.0  # how soon a newly loaded driver is noticed
_LONGEST_SECONDS = 600.0
_GIVEN_UP_SECONDS = 600.0  # after this time given-up queries are tried again
_LONGEST_GIVEN_UP_SECONDS = 3600.0
_AWAY_SECONDS = 120.0  # for how long NVML stays closed on request
_MOST_STUCK = 2
_IGNORED = {
    LINKS: "the links of this GPU are ignored",
    EVENTS: "XIDs of this GPU are not noticed: its events can't be watched",
}
_STEADY_SECONDS = 60.0  # a child that ran this long was no failure

Start = Callable[[Mapping[str, Any]], LineChild]
Topic = tuple[str, int | None]
"""GPU, LINKS or EVENTS of the GPU with this index; of all GPUs with None."""


class _GivenUp(NamedTuple):
    """Until when, and the children that are still stuck in that query."""

    until: float
    stuck: tuple[LineChild, ...] = ()


class Watch:
    """Reports NVML's data to the sink. `waiting` is empty once GPUs were seen."""

    def __init__(self, host: Host, settings: Settings, log: Log, start: Start | None = None) -> None:
        self._host = host
        self._settings = settings
        self._log = log
        self._say = OnChange(log)
        self._rarely = Rarely()
        self._missed = MissedXids(host, log)
        self._start = start or self._spawn
        self._soon = Event()
        self._lock = Lock()
        self._child: LineChild | None = None
        self._stuck: list[LineChild] = []
        self._given_up: dict[Topic, _GivenUp] = {}
        self._times: dict[Topic, int] = {}  # how many times each was given up
        self._addresses: tuple[str, ...] = ()
        self._uuids: dict[int, str] = {}  # by index, for the log
        self._failures = 0  # in a row, of the kind that NVML doesn't report
        self._timeouts = 0
        self._unchanged = 0
        self._away = 0.0  # until when NVML stays closed
        self._reopen = False
        self._seen = False
        self.waiting = "waiting for the NVIDIA driver"

    # --- requests ---------------------------------------------------------------------------------------

    def hurry(self) -> None:
        """Read the GPUs now; also ends every wait in here, and the time for which NVML is closed on
        request."""
        self._away = 0.0
        self._look()

    def _look(self) -> None:
        self._soon.set()
        with self._lock:
            if self._child is not None:
                self._child.tell("look")
                self._child.wake()

    def configure(self, settings: Settings) -> None:
        """Apply other settings; the child is restarted if its own settings changed."""
        if settings.health.poll_seconds != self._settings.health.poll_seconds:
            self._settings = settings
            self._reopen = True
            self._look()

    def let_go(self) -> None:
        """Close NVML for a while, so that the driver can be unloaded or a GPU be reset; a repeated call
        prolongs it. Takes no lock, as a signal handler may call it.
        """
        self._away = self._host.monotonic() + _AWAY_SECONDS
        child = self._child
        if child is not None:
            child.wake()

    # --- the loop ---------------------------------------------------------------------------------------

    def run(self, sink: ReportReceiver, stop: Event) -> None:
        if self._settings.device_discovery_strategy == TEGRA:  # one device, and no NVML to query
            self.waiting = ""
            sink.seen(Inventory(""), Topology())
            stop.wait()
            return
        if not self._host.live:
            self._replay(sink, stop)
            return
        self._missed.open()
        try:
            while not stop.is_set():
                if self._away:
                    self._keep_closed(stop)
                    continue
                self._soon.clear()
                self._reopen = False
                before = node_traces(self._host)
                started = self._host.monotonic()
                outcome = self._listen(sink, stop)
                lived = self._host.monotonic() - started
                pause = self._handle_end(outcome, sink, lived)
                self._pause(stop, before, pause)
        finally:
            self._end_child()
            self._missed.close()

    def _listen(self, sink: ReportReceiver, stop: Event) -> WatcherEnd:
        """Run one child to its end."""
        self._stuck = [child for child in self._stuck if not child.ended()]
        if len(self._stuck) >= _MOST_STUCK:
            return WatcherEnd("hung", f"{len(self._stuck)} processes are stuck inside the driver")
        addresses = gpu_addresses(self._host)
        if addresses != self._addresses:  # the indexes may mean other GPUs now
            self._addresses = addresses
            self._given_up.clear()
            self._times.clear()
        try:
            child = self._start(self._options())
        except ChildFailure as error:
            return WatcherEnd("crashed", error.reason)
        with self._lock:
            self._child = child
        seconds, clock = self._settings.probe_seconds, self._host.monotonic
        reader = ChildReader(
            child, sink, self._log, seconds, self._inventory_seen, clock, self._rarely, self._missed
        )
        outcome = reader.run(lambda: stop.is_set() or self._away > 0 or self._reopen or self._due_again())
        self._missed.ended()
        self._uuids |= reader.uuids
        code = self._end_child()
        return outcome.ended(code)

    def _end_child(self) -> int | None:
        with self._lock:
            child, self._child = self._child, None
        if child is None:
            return 0
        code = child.end()
        if code is None:
            self._stuck.append(child)
        return code

    def _handle_end(self, outcome: WatcherEnd, sink: ReportReceiver, lived: float) -> float:
        """Handle a child's end; return the seconds until the next one."""
        if outcome.kind == "stopped":
            return 0.0
        if lived > _STEADY_SECONDS:
            self._failures = self._timeouts = 0
        if outcome.kind == "again":
            if times := self._rarely.times(outcome.reason):
                self._log.info("reopening NVML", reason=outcome.reason, times=times)
            return 0.0 if lived > _LOOK_SECONDS else _LOOK_SECONDS
        if outcome.kind == "error":
            self._failures = self._timeouts = 0
            self._broken(sink, outcome.reason, sure=True)
            self._unchanged += 1
            return min(
                self._settings.rediscover_seconds, _UNSURE_SECONDS * 2.0 ** min(self._unchanged - 1, 20)
            )
        return self._unanswered(outcome, sink)

    def _unanswered(self, outcome: WatcherEnd, sink: ReportReceiver) -> float:
        """NVML hung or crashed."""
        question = outcome.question
        if question is not None and question.gpus and question.part != GPU:
            self._give_up(question, outcome.reason)
            return 0.0
        self._failures += 1
        self._timeouts = self._timeouts + 1 if outcome.kind == "hung" else 0
        is_named = question is not None and (question.gpus or question.part == EVENTS)
        if question is not None and is_named and self._failures > 1:
            self._give_up(question, outcome.reason)
            self._failures, self._timeouts = 1, 0  # a second failing GPU gets no second chance
            return 0.0
        self._broken(sink, outcome.reason, sure=self._failures > 1)
        if self._failures == 1:
            return 0.0
        regular = self._settings.rediscover_seconds
        if self._timeouts:
            return min(max(regular, _UNSURE_SECONDS) * 2.0 ** (self._timeouts - 1), _LONGEST_SECONDS)
        return min(regular, _UNSURE_SECONDS * 2.0 ** min(self._failures - 2, 20))

    def _give_up(self, question: NvmlQuestion, reason: str) -> None:
        """Stop this query for some time; a child that is stuck in it blocks no other query."""
        stuck, self._stuck = tuple(self._stuck), []
        for index in question.gpus or (None,):
            topic = question.part, index
            times = self._times[topic] = self._times.get(topic, 0) + 1
            seconds = min(_GIVEN_UP_SECONDS * 2.0 ** (times - 1), _LONGEST_GIVEN_UP_SECONDS)
            self._given_up[topic] = _GivenUp(self._host.monotonic() + seconds, stuck)
            uuid = self._uuids.get(index, "") if index is not None else ""
            where = {} if index is None else {"index": index, "device": uuid}
            more = {"function": question.function, "reason": reason, "hint": "gpunode doctor"}
            if question.part == GPU:
                self._log.error("GPU is left out", **where, **more)
            else:
                self._log.warning(_IGNORED[question.part], **where, **more)

    def _broken(self, sink: ReportReceiver, reason: str, sure: bool) -> None:
        sink.broken(reason, sure)
        what = "NVML is broken" if self._seen else "waiting for the NVIDIA driver"
        self.waiting = f"{what}: {reason}" if sure or not self._seen else self.waiting
        self._say.warning(f"{what}: {reason}", hint="gpunode doctor")

    def _inventory_seen(self, reason: str) -> None:
        """An inventory arrived; `reason` is why it has no GPU to advertise."""
        self._unchanged = 0
        self._seen = self._seen or not reason
        self.waiting = f"waiting for the NVIDIA driver: {reason}" if reason else ""
        if reason:
            self._say.warning(self.waiting, hint="gpunode doctor")
        else:
            self._say.reset()

    def _pause(self, stop: Event, before: object, seconds: float) -> None:
        """Wait for the next child; cut short by `hurry`, `stop`, or a driver that is loaded or unloaded."""
        deadline = self._host.monotonic() + seconds
        while not stop.is_set() and not self._soon.is_set():
            left = deadline - self._host.monotonic()
            if left <= 0 or self._soon.wait(min(left, _LOOK_SECONDS)):
                return
            if not self._timeouts and node_traces(self._host) != before:
                return

    def _keep_closed(self, stop: Event) -> None:
        """Keep NVML closed, as requested, until another driver is loaded or the time is over."""
        before = module(self._host)
        self._log.info("NVML is closed temporarily, on request", seconds=int(_AWAY_SECONDS))
        while not stop.is_set() and self._host.monotonic() < self._away:
            self._soon.clear()
            self._soon.wait(_LOOK_SECONDS)
            if module(self._host) not in (0, before):
                break
        self._missed.heard()  # the administrator worked on the GPUs
        self._away = 0.0

    # --- a child ----------------------------------------------------------------------------------------

    def _due_again(self) -> bool:
        """Whether something that was given up must be tried again; not while a child is stuck in it."""
        now = self._host.monotonic()
        due = [
            topic
            for topic, given_up in self._given_up.items()
            if now >= given_up.until and all(child.ended() for child in given_up.stuck)
        ]
        for topic in due:
            del self._given_up[topic]
        return bool(due)

    def _options(self) -> dict[str, Any]:
        """The options for `gpu.nvml_watcher.Options` and `nvml.Nvml.for_parent`."""
        return {
            **nvml_options(self._host, nvml_library(self._host, self._settings)),
            "poll": self._settings.health.poll_seconds,
            "rediscover": self._settings.rediscover_seconds,
            "use": bool(self._settings.listen),
            "patience": self._settings.probe_seconds,
            "without": list(self._given_up),
        }

    def _spawn(self, options: Mapping[str, Any]) -> LineChild:
        return start(self._host, "gpunode.gpu.nvml_watcher", options)

    def _replay(self, sink: ReportReceiver, stop: Event) -> None:
        """A recorded machine answers once, and never changes."""
        seen = probe(self._host)
        if seen.inventory is not None:
            sink.seen(seen.inventory, Topology())
            self._inventory_seen("" if seen.inventory.gpus else "NVML lists no GPU")
        else:
            self._broken(sink, seen.message or "NVML gave no answer", sure=True)
        stop.wait()
