"""`plugin serve`, the whole way: a backend tells the ledger, each resource's link shows its feed to the
kubelet.

Two threads beside gRPC's own: `link` (the kubelet, our sockets, the parts, systemd) and `backend` (the GPUs).
Only `link` must stay quick; the other may hang with a sick GPU and nothing else notices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from threading import Event, Thread

from gpunode.host import Host
from gpunode.plugin.backend import Backend
from gpunode.plugin.kubelet.link import KubeletLink, check_directory
from gpunode.plugin.ledger import Judge, Ledger
from gpunode.plugin.logfmt import Log
from gpunode.plugin.model import Answer, Snapshot
from gpunode.plugin.parts import Part
from gpunode.plugin.settings import Settings
from gpunode.plugin.systemd import Systemd

TICK_SECONDS = 0.25
SOON_SECONDS = 0.02
_HEALTH_SECONDS = 1.0
_STOP_SECONDS = 1.5  # a thread inside a hanging driver is left to the end of the process

PartMaker = Callable[["PluginService"], Part]


class PluginService:
    """Start it, let it run, stop it. It can be embedded: no signal handler and nothing global is set.

    `parts` are made with the service when it is; each gets its turn between the links'.
    """

    def __init__(
        self,
        host: Host,
        settings: Settings,
        log: Log,
        backend: Backend,
        judge: Judge,
        parts: Sequence[PartMaker] = (),
    ) -> None:
        self.host = host
        self.log = log
        self.backend = backend
        self.ledger = Ledger(backend, settings, judge, log, time.time)
        self.links: dict[str, KubeletLink] = {}
        self._stop = Event()
        self._failure: Exception | None = None
        self._next_health = 0.0
        self._systemd = Systemd(host, log)
        self._parts = [make(self) for make in parts]
        work: dict[str, Callable[[], None]] = {
            "link": self._run_link,
            "backend": lambda: backend.run(self.ledger, self._stop),
        }
        self._threads = [
            Thread(target=self._guard, args=(task,), name=name, daemon=True) for name, task in work.items()
        ]

    @property
    def settings(self) -> Settings:
        return self.ledger.settings

    @property
    def snapshots(self) -> Mapping[str, Snapshot]:
        """What is advertised now, by resource name."""
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
        return (
            bool(self.links)
            and not self.backend.waiting
            and all(link.watched for link in self.links.values())
        )

    def start(self) -> None:
        """Serve from now on. `PreconditionError` if we never could: not root."""
        check_directory(self.host, self.settings)
        for thread in self._threads:
            thread.start()
        self._systemd.tell("READY=1")

    def stop(self) -> None:
        """Ask everything to end; returns at once."""
        self._stop.set()
        self.backend.hurry()
        for feed in self.ledger.feeds.values():
            feed.wake()

    def join(self) -> None:
        """Wait for the end, at most two seconds. A bug that ended a thread is raised here."""
        deadline = self.host.monotonic() + _STOP_SECONDS
        for thread in self._threads:
            thread.join(max(0.05, deadline - self.host.monotonic()))
        if self._failure is not None:
            raise self._failure

    @property
    def status(self) -> str:
        """One line for people: how many devices of what, and how the kubelet takes them."""
        if self.backend.waiting or self.ledger.trouble:
            return self.backend.waiting or self.ledger.trouble
        told = []
        for name, snapshot in self.snapshots.items():
            healthy = sum(device.healthy for device in snapshot.devices)
            told.append(
                f"{healthy} of {len(snapshot.devices)} {name} healthy, {self.links[name].status}"
                if name in self.links
                else f"{healthy} of {len(snapshot.devices)} {name} healthy"
            )
        return "; ".join(told) or "no GPU to advertise"

    def _guard(self, task: Callable[[], None]) -> None:
        try:
            task()
        except Exception as error:  # noqa: BLE001 - raised again by join: half a plugin must not live on
            self._failure = error
            self.stop()

    def _run_link(self) -> None:
        try:
            while not self._stop.is_set():
                self._turn()
                expecting = any(link.expecting for link in self.links.values())
                self._stop.wait(SOON_SECONDS if expecting else TICK_SECONDS)
        finally:
            self._systemd.tell("STOPPING=1")
            for part in self._parts:
                part.close()
            for link in self.links.values():
                link.close()

    def _turn(self) -> None:
        now = self.host.monotonic()
        if now >= self._next_health:
            self._next_health = now + _HEALTH_SECONDS
            self.ledger.tick()
        for name in self.ledger.feeds:
            self._link(name).tick()
        for part in self._parts:
            part.tick(now)
        self._systemd.report(self.status)

    def _link(self, name: str) -> KubeletLink:
        link = self.links.get(name)
        if link is None:
            feed = self.ledger.feeds[name]
            link = KubeletLink(self.host, self.settings, name, feed, self, self.log)
            link.claim()
            self.links = {**self.links, name: link}
        return link

    # --- what the handlers ask -------------------------------------------------------------------------

    def answer(self, snapshot: Snapshot, ids: Sequence[str]) -> Answer:
        return self.backend.answer(self.settings, snapshot, ids)

    def prefer(
        self, snapshot: Snapshot, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> Sequence[str]:
        topology = self.ledger.topology
        return self.backend.prefer(self.settings, snapshot, topology, available, must_include, size)
