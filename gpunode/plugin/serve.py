"""`plugin serve`, the whole way: discovery and health feed the table, the server hands it out.

Three threads beside gRPC's own: `link` (the kubelet, our socket, systemd), `discovery` (NVML in a child)
and `health` (NVML events in this process). Only `link` must stay quick; the other two may hang with a sick
GPU and nothing else notices.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Event, Thread

from gpunode.gpu.isolated import NvmlProbe, probe
from gpunode.host import Host
from gpunode.plugin.devices import DeviceTable, Snapshot
from gpunode.plugin.discovery import Discovery
from gpunode.plugin.health import HealthMonitor
from gpunode.plugin.kubelet import KubeletLink
from gpunode.plugin.logfmt import Log, OnChange
from gpunode.plugin.settings import Settings

TICK_SECONDS = 0.25
SOON_SECONDS = 0.02
_STOP_SECONDS = 1.5  # a thread inside a hanging NVML is left to the end of the process


class PluginService:
    """Start it, let it run, stop it. It can be embedded: no signal handler and nothing global is set."""

    def __init__(
        self,
        host: Host,
        settings: Settings,
        log: Log,
        probe: Callable[[Host, float], NvmlProbe] = probe,
    ) -> None:
        self._host = host
        self._settings = settings
        self._log = log
        self._table = DeviceTable()
        self._stop = Event()
        self._failure: Exception | None = None
        self._link = KubeletLink(host, settings, self._table, log)
        self._discovery = Discovery(host, settings, self._table, log, probe)
        self._systemd = Systemd(host, log)
        work: dict[str, Callable[[], None]] = {
            "link": self._run_link,
            "discovery": lambda: self._discovery.run(self._stop),
        }
        if host.live:  # a recorded machine has no events
            monitor = HealthMonitor(self._table, log, self._discovery.hurry)
            work["health"] = lambda: monitor.run(self._stop)
        self._threads = [
            Thread(target=self._guard, args=(task,), name=name, daemon=True) for name, task in work.items()
        ]

    @property
    def snapshot(self) -> Snapshot:
        """The devices as they are advertised now."""
        return self._table.snapshot()

    @property
    def registrations(self) -> int:
        """How often the kubelet has accepted a registration."""
        return self._link.registrations

    @property
    def running(self) -> bool:
        return not self._stop.is_set()

    def start(self) -> None:
        """Serve from now on. `PreconditionError`: not root, or another plugin serves on our socket."""
        self._link.claim()
        for thread in self._threads:
            thread.start()
        self._systemd.tell("READY=1")

    def stop(self) -> None:
        """Ask everything to end; returns at once."""
        self._stop.set()
        self._discovery.hurry()
        self._table.wake()

    def join(self) -> None:
        """Wait for the end, at most two seconds. A bug that ended a thread is raised here."""
        deadline = self._host.monotonic() + _STOP_SECONDS
        for thread in self._threads:
            thread.join(max(0.05, deadline - self._host.monotonic()))
        if self._failure is not None:
            raise self._failure

    def _guard(self, task: Callable[[], None]) -> None:
        try:
            task()
        except Exception as error:  # noqa: BLE001 - raised again by join: half a plugin must not live on
            self._failure = error
            self.stop()

    def _run_link(self) -> None:
        try:
            while not self._stop.is_set():
                self._link.tick()
                self._systemd.report(self._status())
                self._stop.wait(SOON_SECONDS if self._link.expecting else TICK_SECONDS)
        finally:
            self._systemd.tell("STOPPING=1")
            self._link.close()

    def _status(self) -> str:
        devices = self._table.snapshot().devices
        if self._discovery.waiting:
            return self._discovery.waiting
        healthy = sum(device.healthy for device in devices)
        return f"{healthy} of {len(devices)} {self._settings.resource_name} healthy; {self._link.status}"


class Systemd:
    """READY, STATUS and the watchdog, as sd_notify(3) and sd_watchdog_enabled(3) have them."""

    def __init__(self, host: Host, log: Log) -> None:
        self._host = host
        self._say = OnChange(log)
        self._status = ""
        self._next_sign = 0.0
        mine = host.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        limit = host.environ.get("WATCHDOG_USEC", "")
        self._interval = int(limit) / 2e6 if mine and limit.isdecimal() else 0.0

    def report(self, status: str) -> None:
        """Called often; tells a new status, and that we live when it is time to."""
        if status != self._status:
            self._status = status
            self.tell(f"STATUS={status}")
        if self._interval and self._host.monotonic() >= self._next_sign:
            self._next_sign = self._host.monotonic() + self._interval
            self.tell("WATCHDOG=1")

    def tell(self, message: str) -> None:
        try:
            self._host.notify(message)
        except OSError as error:
            self._say.warning("systemd can't be told", reason=error.strerror or str(error))
