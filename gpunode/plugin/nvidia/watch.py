"""Looks at the GPUs through a child that keeps NVML open (gpu/sentinel.py), and sees to it that there is one.

NVML may hang or crash, and must hang or crash nothing else. A failure that it names itself (driver not
loaded, library mismatch) is certain at once. When a child is silent or gone, its note says which question to
which GPU NVML did not answer. A question about links or events is given up for that GPU. Any other one may
have met the node at a bad moment: the second failure in a row leaves out the GPU that it names, and without a
name the driver is broken. All of it is tried again later. After timeouts the next question comes later and
later, as a child stuck in the kernel can't even be killed, and no third child is started beside two such.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Lock

from gpunode._process import LineChild
from gpunode.dataclass import dataclass
from gpunode.gpu.child import module_argv
from gpunode.gpu.isolated import probe
from gpunode.gpu.model import Inventory, Topology
from gpunode.gpu.note import EVENTS, GPU, LINKS, NvmlQuestion
from gpunode.gpu.traces import gpu_addresses, module, node_traces
from gpunode.host import Host
from gpunode.plugin.backend import Sink
from gpunode.plugin.logfmt import Log, OnChange, Rarely
from gpunode.plugin.nvidia.hearing import Hearing, Outcome
from gpunode.plugin.nvidia.library import nvml_library
from gpunode.plugin.nvidia.missed import MissedXids
from gpunode.plugin.nvidia.platform import TEGRA
from gpunode.plugin.settings import Settings

_UNSURE_SECONDS = 5.0  # while there is no GPU, or one is missing
_LOOK_SECONDS = 1.0  # how soon a driver that was just loaded is noticed
_LONGEST_SECONDS = 600.0
_GIVEN_UP_SECONDS = 600.0  # after which what was given up is tried again
_LONGEST_GIVEN_UP_SECONDS = 3600.0
_AWAY_SECONDS = 120.0  # for how long NVML stays closed when that was asked for
_MOST_STUCK = 2
_IGNORED = {
    LINKS: "the links of this GPU are ignored",
    EVENTS: "XIDs of this GPU are not noticed: its events can't be watched",
}
_STEADY_SECONDS = 60.0  # a child that lived so long was no failure

Start = Callable[[tuple[str, ...]], LineChild]
Topic = tuple[str, int | None]
"""GPU, LINKS or EVENTS of the GPU with this index; of all GPUs with None."""


@dataclass(frozen=True)
class _GivenUp:
    """Until when, and the children that are still stuck in that question."""

    until: float
    stuck: tuple[LineChild, ...] = ()


class Watch:
    """Tells the sink what NVML says. `waiting` is empty once GPUs were seen."""

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
        self._failures = 0  # running, of the kind that NVML doesn't name
        self._timeouts = 0
        self._unchanged = 0
        self._away = 0.0  # until when NVML stays closed
        self._anew = False
        self._seen = False
        self.waiting = "waiting for the NVIDIA driver"

    # --- what others ask -------------------------------------------------------------------------------

    def hurry(self) -> None:
        """Look again now; also ends every wait in here, and the time for which NVML was let go."""
        self._away = 0.0
        self._look()

    def _look(self) -> None:
        self._soon.set()
        with self._lock:
            if self._child is not None:
                self._child.tell("look")
                self._child.wake()

    def configure(self, settings: Settings) -> None:
        """Take other settings; the child is started anew if it was told otherwise."""
        if settings.health.poll_seconds != self._settings.health.poll_seconds:
            self._settings = settings
            self._anew = True
            self._look()

    def let_go(self) -> None:
        """Close NVML for a while, so that the driver can be unloaded or a GPU be reset; asked again, for
        longer. Takes no lock, as a signal handler may call it.
        """
        self._away = self._host.monotonic() + _AWAY_SECONDS
        child = self._child
        if child is not None:
            child.wake()

    # --- the loop --------------------------------------------------------------------------------------

    def run(self, sink: Sink, stop: Event) -> None:
        if self._settings.device_discovery_strategy == TEGRA:  # one device, and no NVML to ask
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
                    self._rest_away(stop)
                    continue
                self._soon.clear()
                self._anew = False
                before = node_traces(self._host)
                started = self._host.monotonic()
                outcome = self._listen(sink, stop)
                lived = self._host.monotonic() - started
                pause = self._judge(outcome, sink, lived)
                self._pause(stop, before, pause)
        finally:
            self._end_child()
            self._missed.close()

    def _listen(self, sink: Sink, stop: Event) -> Outcome:
        """One child's life."""
        self._stuck = [child for child in self._stuck if not child.ended()]
        if len(self._stuck) >= _MOST_STUCK:
            return Outcome("hung", f"{len(self._stuck)} processes are stuck inside the driver")
        addresses = gpu_addresses(self._host)
        if addresses != self._addresses:  # the indices may mean other GPUs now
            self._addresses = addresses
            self._given_up.clear()
            self._times.clear()
        try:
            child = self._start(self._arguments())
        except OSError as error:
            return Outcome("crashed", f"no process can be started: {error.strerror or error}")
        with self._lock:
            self._child = child
        seconds, clock = self._settings.probe_seconds, self._host.monotonic
        hearing = Hearing(child, sink, self._log, seconds, self._found, clock, self._rarely, self._missed)
        outcome = hearing.run(lambda: stop.is_set() or self._away > 0 or self._anew or self._due_again())
        self._missed.ended()
        self._uuids |= hearing.uuids
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

    def _judge(self, outcome: Outcome, sink: Sink, lived: float) -> float:
        """Draw the conclusions from a child's end; seconds until the next one."""
        if outcome.kind == "stopped":
            return 0.0
        if lived > _STEADY_SECONDS:
            self._failures = self._timeouts = 0
        if outcome.kind == "again":
            if times := self._rarely.times(outcome.reason):
                self._log.info("opening NVML anew", reason=outcome.reason, times=times)
            return 0.0 if lived > _LOOK_SECONDS else _LOOK_SECONDS
        if outcome.kind == "error":
            self._failures = self._timeouts = 0
            self._broken(sink, outcome.reason, sure=True)
            self._unchanged += 1
            return min(
                self._settings.rediscover_seconds, _UNSURE_SECONDS * 2.0 ** min(self._unchanged - 1, 20)
            )
        return self._unanswered(outcome, sink)

    def _unanswered(self, outcome: Outcome, sink: Sink) -> float:
        """NVML hung or crashed."""
        question = outcome.question
        if question is not None and question.gpus and question.part != GPU:
            self._give_up(question, outcome.reason)
            return 0.0
        self._failures += 1
        self._timeouts = self._timeouts + 1 if outcome.kind == "hung" else 0
        named = question is not None and (question.gpus or question.part == EVENTS)
        if question is not None and named and self._failures > 1:
            self._give_up(question, outcome.reason)
            self._failures, self._timeouts = 1, 0  # a second sick GPU gets no second chance
            return 0.0
        self._broken(sink, outcome.reason, sure=self._failures > 1)
        if self._failures == 1:
            return 0.0
        regular = self._settings.rediscover_seconds
        if self._timeouts:
            return min(max(regular, _UNSURE_SECONDS) * 2.0 ** (self._timeouts - 1), _LONGEST_SECONDS)
        return min(regular, _UNSURE_SECONDS * 2.0 ** min(self._failures - 2, 20))

    def _give_up(self, question: NvmlQuestion, reason: str) -> None:
        """Ask this no more for some time; a child that is stuck in it hinders no other question."""
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

    def _broken(self, sink: Sink, reason: str, sure: bool) -> None:
        sink.broken(reason, sure)
        what = "NVML is broken" if self._seen else "waiting for the NVIDIA driver"
        self.waiting = f"{what}: {reason}" if sure or not self._seen else self.waiting
        self._say.warning(f"{what}: {reason}", hint="gpunode doctor")

    def _found(self, reason: str) -> None:
        """An inventory came; `reason` is why it has no GPU to advertise."""
        self._unchanged = 0
        self._seen = self._seen or not reason
        self.waiting = f"waiting for the NVIDIA driver: {reason}" if reason else ""
        if reason:
            self._say.warning(self.waiting, hint="gpunode doctor")
        else:
            self._say.reset()

    def _pause(self, stop: Event, before: object, seconds: float) -> None:
        """Wait for the next child; cut short by `hurry`, `stop`, or a driver that comes or goes."""
        deadline = self._host.monotonic() + seconds
        while not stop.is_set() and not self._soon.is_set():
            left = deadline - self._host.monotonic()
            if left <= 0 or self._soon.wait(min(left, _LOOK_SECONDS)):
                return
            if not self._timeouts and node_traces(self._host) != before:
                return

    def _rest_away(self, stop: Event) -> None:
        """NVML was to be let go: until another driver is loaded, or for some time."""
        before = module(self._host)
        self._log.info("NVML is closed for a while, as was asked for", seconds=int(_AWAY_SECONDS))
        while not stop.is_set() and self._host.monotonic() < self._away:
            self._soon.clear()
            self._soon.wait(_LOOK_SECONDS)
            if module(self._host) not in (0, before):
                break
        self._missed.heard()  # whoever asked for this was at work on the GPUs
        self._away = 0.0

    # --- a child ---------------------------------------------------------------------------------------

    def _due_again(self) -> bool:
        """Whether something that was given up is to be tried again; not while a child is stuck in it."""
        now = self._host.monotonic()
        due = [
            topic
            for topic, given_up in self._given_up.items()
            if now >= given_up.until and all(child.ended() for child in given_up.stuck)
        ]
        for topic in due:
            del self._given_up[topic]
        return bool(due)

    def _arguments(self) -> tuple[str, ...]:
        library = nvml_library(self._host, self._settings)
        return module_argv(
            "gpunode.gpu.sentinel",
            *("--poll", f"{self._settings.health.poll_seconds:g}"),
            *("--rediscover", f"{self._settings.rediscover_seconds:g}"),
            *(("--use",) if self._settings.listen else ()),
            *("--patience", f"{self._settings.probe_seconds:g}"),
            *(
                argument
                for part, index in self._given_up
                for argument in ("--without", part if index is None else f"{part}:{index}")
            ),
            *(("--library", library) if library else ()),
        )

    def _spawn(self, argv: tuple[str, ...]) -> LineChild:
        return LineChild(argv, {**self._host.environ, "LC_ALL": "C.UTF-8"}, noting=True)

    def _replay(self, sink: Sink, stop: Event) -> None:
        """A recorded machine answers once and for all."""
        seen = probe(self._host)
        if seen.inventory is not None:
            sink.seen(seen.inventory, Topology())
            self._found("" if seen.inventory.gpus else "NVML lists no GPU")
        else:
            self._broken(sink, seen.message or "NVML gave no answer", sure=True)
        stop.wait()
