"""`plugin serve`, end to end: a backend reports to the ledger, each resource's link sends its feed to the
kubelet.

Two threads in addition to gRPC's own and to those of background tasks (plugin/background.py): `link` (the
kubelet, our sockets, the parts, systemd) and `backend` (the GPUs). Only `link` must respond quickly; the
other may hang with a failing GPU without affecting it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from threading import Event, Thread

from gpunode.errors import GpunodeError
from gpunode.host import Host
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.health import HealthChecker
from gpunode.plugin.kubelet.link import Link, check_directory
from gpunode.plugin.kubelet.registration import KubeletLink
from gpunode.plugin.kubelet.server import LinkContext, Observer
from gpunode.plugin.kubelet.watcher import WatcherLink
from gpunode.plugin.ledger import Feed, Ledger
from gpunode.plugin.logfmt import Log
from gpunode.plugin.model import Backend, ServicePart, Snapshot
from gpunode.plugin.service import Systemd

TICK_SECONDS = 0.25
# each turn compares the sockets and the config file with what they were (stat): a tenth of a millisecond for
# each resource. What the kubelet and the GPUs do wakes the thread at once
_CALM_SECONDS = 1.0
_EAGER_SECONDS = 0.05  # a kubelet has just stopped, and is likely to return in a moment
_EAGER_FOR = 30.0
_HEALTH_SECONDS = 1.0
_CLOSE_SECONDS = 4.0  # no socket must stay behind, nor a status of a running plugin; the unit allows ten
_STOP_SECONDS = 1.5  # a thread inside a hanging driver is abandoned at the end of the process


def steady_clock() -> Callable[[], float]:
    """Seconds since the epoch by the present clock, which advance evenly whatever the clock is set to later:
    a hold time must neither end early nor last for years."""
    ahead = time.time() - time.monotonic()
    return lambda: ahead + time.monotonic()


class PluginService:
    """Start it, let it run, stop it. It can be embedded: it sets no signal handler and no global state.

    `parts` are added before the start; each gets its turn after the links'. `links` are by resource name,
    replaced as a whole, and may be read by any thread. `observers` are called for every RPC that was
    answered, from any thread.
    """

    def __init__(
        self, host: Host, settings: Settings, log: Log, backend: Backend, checker: HealthChecker
    ) -> None:
        self.host = host
        self.log = log
        self.backend = backend
        self.ledger = Ledger(backend, settings, checker, log, steady_clock())
        self.ledger.changed.append(self.wake)
        self.parts: list[ServicePart] = []
        self.links: Mapping[str, Link] = {}
        self.observers: list[Observer] = []
        self._context = LinkContext(host, settings, backend, self.ledger, log, self.observers, self.wake)
        # called when a resource is about to get a link
        self.before_registering: list[Callable[[], None]] = []
        self.at_end: Callable[[], None] = lambda: None  # called when the end is requested, by any thread
        self._woken = Event()
        self._stop = Event()
        self._failure: Exception | None = None
        self._next_health = 0.0
        self._eager_until = 0.0
        self._systemd = Systemd(host, log)
        self._backend_thread = self._thread("backend", lambda: backend.run(self.ledger, self._stop))
        self._link_thread = self._thread("link", self._run_link)

    @property
    def settings(self) -> Settings:
        return self.ledger.settings

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
        self._backend_thread.start()
        self._link_thread.start()
        self._systemd.tell("READY=1")

    def wake(self) -> None:
        """An event: the next turn comes at once. Not for signal handlers: it takes a lock."""
        self._woken.set()

    def stop(self) -> None:
        """Request the end of everything; returns at once."""
        self._stop.set()
        self.wake()
        self.at_end()
        self.backend.hurry()
        for feed in self.ledger.feeds.values():
            feed.wake()

    def join(self) -> None:
        """Wait for the end, at most five seconds. An exception that ended a thread is raised here."""
        deadline = self.host.monotonic() + _STOP_SECONDS
        self._link_thread.join(_CLOSE_SECONDS)
        self._backend_thread.join(max(0.05, deadline - self.host.monotonic()))
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

    def _thread(self, name: str, task: Callable[[], None]) -> Thread:
        def guarded() -> None:
            try:
                task()
            except Exception as error:  # noqa: BLE001 - raised by join: half a plugin must not keep running
                self._failure = self._failure or error
                self.stop()

        return Thread(target=guarded, name=name, daemon=True)

    def _run_link(self) -> None:
        try:
            while not self._stop.is_set():
                self._woken.wait(min(self._turn(), self._patience()))
                self._woken.clear()
        finally:
            self._systemd.tell("STOPPING=1")
            self._close()

    def _patience(self) -> float:
        """Seconds until the next turn without events."""
        now = self.host.monotonic()
        if self.ready:
            self._eager_until = now + _EAGER_FOR
            return _CALM_SECONDS
        return _EAGER_SECONDS if now < self._eager_until else TICK_SECONDS

    def _turn(self) -> float:
        """Seconds within which the next turn must come."""
        now = self.host.monotonic()
        if now >= self._next_health:
            self._next_health = now + _HEALTH_SECONDS
            self.ledger.tick()
        self._make_links()
        for link in self.links.values():
            link.tick()
        soon = [seconds for part in self.parts if (seconds := part.tick(now)) is not None]
        self._systemd.report(self.status)
        return min([_CALM_SECONDS, *soon])

    def _make_links(self) -> None:
        """Make links for resources that have devices for the first time.

        `PreconditionError` if the first resources can't be served. Later ones wait instead, and report it:
        they must not end those that are already served.
        """
        if not self._new_feeds():
            return
        for prepare in self.before_registering:
            prepare()
        first = not self.links
        # read again: a resource may have lost its devices meanwhile
        new = {name: self._make_link(name, feed) for name, feed in self._new_feeds().items()}
        self.links = {**self.links, **new}
        for link in new.values():
            try:
                link.claim()
            except GpunodeError:
                if first:
                    raise  # later the link's own turns retry, and report the cause

    def _new_feeds(self) -> dict[str, Feed]:
        feeds = self.ledger.feeds.items()
        return {name: feed for name, feed in feeds if name not in self.links and feed.snapshot().devices}

    def _make_link(self, name: str, feed: Feed) -> Link:
        if self.settings.registration == "watcher":
            return WatcherLink(self._context, name, feed)
        return KubeletLink(self._context, name, feed)

    def _close(self) -> None:
        """The sockets first: a part that hangs must not leave sockets that don't respond to the kubelet."""
        for link in self.links.values():
            link.close()
        for part in self.parts:
            try:
                part.close()
            except Exception as error:  # noqa: BLE001 - the others have resources to release, too
                self._failure = self._failure or error
