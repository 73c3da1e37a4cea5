"""`gpunode labels --watch`: the labels are kept while this runs; NVML stays open in a child of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from threading import Event, Thread
from typing import TYPE_CHECKING

from gpunode.commands.plugin_serve import until_signal
from gpunode.gpu.model import Inventory, Reading, Topology
from gpunode.host import Host
from gpunode.plugin.config.watch import Hangup
from gpunode.result import Result, Text

if TYPE_CHECKING:
    from gpunode.gpu.events import GpuEvent
    from gpunode.plugin.backend import Backend
    from gpunode.plugin.config.resolve import Resolved, Sources
    from gpunode.plugin.logfmt import Log
    from gpunode.plugin.settings import Settings

_TURN_SECONDS = 1.0
_END_SECONDS = 1.5


def watch(host: Host, given: Sources, resolved: Resolved, stop: Event | None = None) -> Result:
    """Until SIGTERM, Ctrl-C or `stop`. The config file is followed, a missing driver is waited for."""
    from gpunode.plugin.config.watch import ConfigWatch
    from gpunode.plugin.labels.watch import Labeller
    from gpunode.plugin.logfmt import LogfmtLog
    from gpunode.plugin.systemd import Systemd

    hangup = Hangup()
    with until_signal(hangup) as asked:
        log = LogfmtLog(sys.stderr, host.environ)
        for warning in resolved.warnings:
            log.warning(warning.text, **warning.fields)
        node = _Node(host, log, resolved.settings)
        waiter = host.waiter()
        waiter.hear_signals()
        asked.wake = asked.look = waiter.wake
        asked.let_go = node.let_go
        node.told = waiter.wake
        config = ConfigWatch(node, given, hangup, resolved.content)
        labeller = Labeller(host, log, node.source, lambda seconds: None)
        systemd = Systemd(host, log)
        node.start()
        systemd.tell("READY=1")
        try:
            while not asked and not (stop is not None and stop.is_set()):
                config.tick(host.monotonic())
                labeller.tick(host.monotonic())
                waiter.wait(_TURN_SECONDS)
        finally:
            systemd.tell("STOPPING=1")
            node.stop()
            labeller.close()
            waiter.close()
    for name in asked:
        log.info("stopped", signal=name)
    passes = f"{labeller.passes} times" if labeller.passes != 1 else "once"
    return Result("NodeLabels", {"passes": labeller.passes}, blocks=(Text(f"labels were made {passes}"),))


class _Node:
    """The GPUs as they are now, told by the backend of `plugin serve`, and the settings.

    A `Sink` for the backend; for the config file it is service, ledger and backend in one.
    """

    def __init__(self, host: Host, log: Log, settings: Settings) -> None:
        from gpunode.plugin.labels.make import VFIO

        self._host = host
        self._stop = Event()
        self._inventory: Inventory | None = None
        self._next = 0.0
        self._gone = False  # nobody is there to be waited for
        self._backend: Backend | None = None
        self._thread: Thread | None = None
        self.log = log
        self.settings = settings
        self.config_trouble = ""
        self.told: Callable[[], None] = lambda: None
        if settings.device_discovery_strategy == VFIO:
            return
        from gpunode.plugin.compose import make_backend

        self._backend = make_backend(host, settings, log)
        task = self._backend.run
        self._thread = Thread(target=task, args=(self, self._stop), name="backend", daemon=True)

    def start(self) -> None:
        if self._thread is not None:
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._backend is not None and self._thread is not None:
            self._backend.hurry()
            self._thread.join(_END_SECONDS)

    @property
    def ledger(self) -> _Node:
        return self

    @property
    def backend(self) -> _Node:
        return self

    def hurry(self) -> None:
        if self._backend is not None:
            self._backend.hurry()

    def configure(self, settings: Settings) -> None:
        self.settings = settings
        self.told()

    def follow(self, directory: str) -> None:
        """It is looked at in every turn."""

    def again_within(self, seconds: float) -> None:
        """The next turn is soon enough."""

    def let_go(self) -> None:
        if self._backend is not None:
            self._backend.let_go()

    def source(self) -> tuple[Settings, Inventory | None] | None:
        """See `gpunode.plugin.labels.watch.Source`."""
        if self._backend is None:
            return self.settings, self._on_the_bus()
        if self._inventory is None and not self._gone:
            return None
        return self.settings, self._inventory

    def _on_the_bus(self) -> Inventory:
        """GPUs that no driver of ours knows, read again now and then."""
        from gpunode.plugin.labels.vfio import vfio_inventory

        now = self._host.monotonic()
        if self._inventory is None or now >= self._next:
            self._inventory, self._next = vfio_inventory(self._host), now + self.settings.rediscover_seconds
        return self._inventory

    # --- what the backend tells ------------------------------------------------------------------------

    def seen(self, inventory: Inventory, topology: Topology) -> None:
        from gpunode.plugin.remember import remembered

        self._inventory, self._gone = remembered(inventory, self._inventory), False
        self.told()

    def broken(self, reason: str, sure: bool) -> None:
        """What is there stays, unless there is no GPU, or it was asked for otherwise."""
        from gpunode.plugin.labels.make import none_there
        from gpunode.plugin.nvidia.platform import tegra_files

        if self.settings.vendor != "nvidia":
            return
        if sure and tegra_files(self._host):
            self._inventory, self._gone = Inventory(""), False  # the labeller asks CUDA
            self.told()
        elif sure and (not self.settings.fail_on_init_error or none_there(self._host)):
            self._inventory, self._gone = None, True
            self.told()

    def readings(self, readings: Sequence[Reading]) -> None:
        """Not asked for."""

    def event(self, event: GpuEvent) -> None:
        """Not asked for."""
