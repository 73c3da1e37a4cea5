"""`plugin serve`, end to end: a backend reports to the ledger, each resource's link sends its feed to the
kubelet.

Two threads in addition to gRPC's own: `link` (the kubelet, our sockets, the parts, systemd) and `backend`
(the GPUs). Only `link` must respond quickly; the other may hang with a failing GPU without affecting it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Event, Thread
from typing import TYPE_CHECKING, Protocol

from gpunode.errors import GpunodeError
from gpunode.host import Host
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.health import HealthJudge
from gpunode.plugin.kubelet.server import (
    Call,
    LinkContext,
    Observer,
    check_directory,
    socket_directories,
)
from gpunode.plugin.ledger import Feed, Ledger
from gpunode.plugin.logfmt import Log, Rarely
from gpunode.plugin.model import Answer, Backend, Part, Snapshot
from gpunode.plugin.placement import prefer
from gpunode.plugin.service import Systemd

if TYPE_CHECKING:
    from gpunode.host.waiting import Waiter


TICK_SECONDS = 0.25
_CALM_SECONDS = 3.0  # the end of a stream wakes the thread, and so does a socket that is created or removed
_UNWATCHED_SECONDS = 0.5  # where the kernel doesn't report changes of sockets
_EAGER_SECONDS = 0.05  # a kubelet has just stopped, and is likely to return in a moment
_EAGER_FOR = 30.0
_HEALTH_SECONDS = 1.0
_STOP_SECONDS = 1.5  # a thread inside a hanging driver is abandoned at the end of the process

PartMaker = Callable[["PluginService"], Part]


def steady_clock() -> Callable[[], float]:
    """Seconds since the epoch by the present clock, which advance evenly whatever the clock is set to later:
    a hold time must neither end early nor last for years."""
    ahead = time.time() - time.monotonic()
    return lambda: ahead + time.monotonic()


class PluginService:
    """Start it, let it run, stop it. It can be embedded: it sets no signal handler and no global state.

    `parts` are made with the service when it is; each gets its turn between the links'. `observers` are
    called for every RPC that was answered, from any thread.
    """

    def __init__(
        self,
        host: Host,
        settings: Settings,
        log: Log,
        backend: Backend,
        judge: HealthJudge,
        parts: Sequence[PartMaker] = (),
    ) -> None:
        self.host = host
        self.log = log
        self.backend = backend
        self.ledger = Ledger(backend, settings, judge, log, steady_clock())
        self.ledger.changed.append(self.wake)
        self.observers: list[Observer] = []
        # called when a resource is about to get a link
        self.before_registering: list[Callable[[], None]] = []
        self.at_end: Callable[[], None] = lambda: None  # called when the end is requested, by any thread
        self._links: Links | None = None
        self._rarely = Rarely()
        self._waiter: Waiter | None = None
        self._followed: tuple[str, ...] = ()
        self._soon = _CALM_SECONDS
        self._stop = Event()
        self._failure: Exception | None = None
        self._next_health = 0.0
        self._eager_until = 0.0
        self._systemd = Systemd(host, log)
        self._parts = [make(self) for make in parts]
        work: dict[str, Callable[[], None]] = {
            "backend": lambda: backend.run(self.ledger, self._stop),
            "link": self._run_link,
        }
        self._threads = [
            Thread(target=self._guard, args=(task,), name=name, daemon=True) for name, task in work.items()
        ]

    @property
    def settings(self) -> Settings:
        return self.ledger.settings

    @property
    def links(self) -> Mapping[str, Link]:
        """By resource name."""
        return {} if self._links is None else self._links.by_name

    @property
    def snapshots(self) -> Mapping[str, Snapshot]:
        """The present snapshots, by resource name."""
        return {name: feed.snapshot() for name, feed in self.ledger.feeds.items()}

    @property
    def registrations(self) -> int:
        """How often the kubelet has accepted a registration, of all resources."""
        return sum(link.registrations for link in self.links.values())

    @property
    def running(self) -> bool:
        return not self._stop.is_set()

    @property
    def ready(self) -> bool:
        """GPUs are seen, and the kubelet watches every resource."""
        links = self.links
        return bool(links) and not self.backend.waiting and all(link.watched for link in links.values())

    def start(self) -> None:
        """Serve from now on. `PreconditionError` if serving is impossible: not root."""
        check_directory(self.host, self.settings.directory)
        self._waiter = self.host.waiter()
        for thread in self._threads:
            thread.start()
        self._systemd.tell("READY=1")

    def wake(self) -> None:
        """An event: the next turn comes at once. Signal handlers may call it."""
        if self._waiter is not None:
            self._waiter.wake()

    def follow(self, directory: str) -> None:
        """For parts: request a turn when an entry of this directory is created or removed, or a file in it is
        written."""
        self._followed = (*self._followed, directory)

    def again_within(self, seconds: float) -> None:
        """For a part in its turn: the next turn must come within this time. Call it in each turn."""
        self._soon = min(self._soon, seconds)

    def stop(self) -> None:
        """Request the end of everything; returns at once."""
        self._stop.set()
        self.wake()
        self.at_end()
        self.backend.hurry()
        for feed in self.ledger.feeds.values():
            feed.wake()

    def join(self) -> None:
        """Wait for the end, at most two seconds. An exception that ended a thread is raised here."""
        deadline = self.host.monotonic() + _STOP_SECONDS
        for thread in reversed(self._threads):
            thread.join(max(0.05, deadline - self.host.monotonic()))
        if self._failure is not None:
            raise self._failure

    @property
    def status(self) -> str:
        """One line for people: how many devices of each resource, and its registration with the kubelet."""
        if self.backend.waiting or self.ledger.trouble:
            return self.backend.waiting or self.ledger.trouble
        links, states = self.links, []
        for name, snapshot in self.snapshots.items():
            count = f"{snapshot.healthy} of {len(snapshot.devices)} {name} healthy"
            states.append(f"{count}, {links[name].status}" if name in links else count)
        line = "; ".join(states) or "no GPU to advertise"
        return f"simulated: {line}" if self.settings.simulate else line

    def _guard(self, task: Callable[[], None]) -> None:
        try:
            task()
        except Exception as error:  # noqa: BLE001 - raised again by join: half a plugin must not keep running
            self._failure = self._failure or error
            self.stop()

    def _run_link(self) -> None:
        assert self._waiter is not None  # `start` has made it
        context = LinkContext(self.host, self.settings, self, self.log, self._observed, self.wake)
        links = self._links = Links(context)
        try:
            while not self._stop.is_set():
                places = (*socket_directories(self.settings), *self._followed)
                notified = self._waiter.watch([self.host.path(place) for place in places])
                self._soon = _CALM_SECONDS
                self._turn(links)  # after `watch`, so that nothing changes between the two unseen
                self._waiter.wait(min(self._soon, self._patience(notified)))
        finally:
            self._systemd.tell("STOPPING=1")
            self._close(links)
            self._waiter.close()

    def _patience(self, notified: bool) -> float:
        """Seconds until the next turn without events; `notified` whether changes of sockets wake the
        thread."""
        now = self.host.monotonic()
        if self.ready:
            self._eager_until = now + _EAGER_FOR
            calm = _CALM_SECONDS if notified else _UNWATCHED_SECONDS
            return min([calm, *(link.due_in(now) for link in self.links.values())])
        return _EAGER_SECONDS if now < self._eager_until else TICK_SECONDS

    def _turn(self, links: Links) -> None:
        now = self.host.monotonic()
        if now >= self._next_health:
            self._next_health = now + _HEALTH_SECONDS
            self.ledger.tick()
        if links.new(self.ledger.feeds):
            for prepare in self.before_registering:
                prepare()
        links.tick(self.ledger.feeds)
        for part in self._parts:
            part.tick(now)
        self._systemd.report(self.status)

    def _close(self, links: Links) -> None:
        """The sockets first: a part that hangs must not leave sockets that don't respond to the kubelet."""
        links.close()
        for part in self._parts:
            try:
                part.close()
            except Exception as error:  # noqa: BLE001 - the others have resources to release, too
                self._failure = self._failure or error

    # --- policy of the handlers -------------------------------------------------------------------------

    def answer(self, snapshot: Snapshot, ids: Sequence[str]) -> Answer:
        return self.backend.answer(self.settings, snapshot, ids)

    def prefer(
        self, snapshot: Snapshot, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> Sequence[str]:
        return prefer(self.settings, snapshot, self.ledger.topology, available, must_include, size)

    def _observed(self, call: Call) -> None:
        for observe in self.observers:
            try:
                observe(call)
            except Exception as error:  # noqa: BLE001 - an observer must not make calls fail
                if times := self._rarely.times(repr(error)):
                    self.log.error("counting a call failed", reason=repr(error), times=times)


# One link per resource: new ones are created, and all get their turn.


class Link(Protocol):
    """A resource's registration: see registration.py and watcher.py. `status` is one line for people."""

    registrations: int
    status: str

    @property
    def socket(self) -> str:
        """The path of the resource's socket."""

    @property
    def watched(self) -> bool:
        """Whether the kubelet follows our list of devices, and allocates from it."""

    def due_in(self, now: float) -> float:
        """Seconds after which `tick` has something to do even without events."""

    def claim(self) -> None:
        """Start serving if the kubelet's directory exists. `PreconditionError` without permission."""

    def tick(self) -> None:
        """Do the next step towards serving, registered and watched."""

    def close(self) -> None:
        """Stop serving."""


class Links:
    """Methods belong to one thread; `by_name` is replaced as a whole and may be read by any."""

    def __init__(self, context: LinkContext) -> None:
        self._context = context
        self.by_name: Mapping[str, Link] = {}

    def __iter__(self) -> Iterator[Link]:
        return iter(self.by_name.values())

    def new(self, feeds: Mapping[str, Feed]) -> list[str]:
        """Resources that have devices and no link yet."""
        return [name for name, feed in feeds.items() if name not in self.by_name and feed.snapshot().devices]

    def tick(self, feeds: Mapping[str, Feed]) -> None:
        """Make links for resources that have devices for the first time, then give each link its turn.

        `PreconditionError` if the first resources can't be served. Later ones wait instead, and report it:
        they must not end those that are already served.
        """
        first = not self.by_name
        new = {name: self._make(name, feeds[name]) for name in self.new(feeds)}
        if new:
            self.by_name = {**self.by_name, **new}
        for link in new.values():
            self._claim(link, first)
        for link in self:
            link.tick()

    def close(self) -> None:
        for link in self:
            link.close()

    def _make(self, name: str, feed: Feed) -> Link:
        if self._context.settings.registration == "watcher":
            from gpunode.plugin.kubelet.watcher import WatcherLink

            return WatcherLink(self._context, name, feed)
        from gpunode.plugin.kubelet.registration import KubeletLink

        return KubeletLink(self._context, name, feed)

    def _claim(self, link: Link, first: bool) -> None:
        try:
            link.claim()
        except GpunodeError:
            if first:
                raise  # later the link's own turns retry, and report the cause
