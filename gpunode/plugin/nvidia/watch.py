"""Looks at the GPUs through NVML, again and again."""

from __future__ import annotations

from threading import Event

from gpunode.gpu.isolated import probe
from gpunode.gpu.model import Topology
from gpunode.host import Host
from gpunode.plugin.backend import Sink
from gpunode.plugin.logfmt import Log, OnChange
from gpunode.plugin.settings import Settings


class Watch:
    """Tells the sink what NVML says. `waiting` is empty once GPUs were seen."""

    def __init__(self, host: Host, settings: Settings, log: Log) -> None:
        self._host = host
        self._settings = settings
        self._say = OnChange(log)
        self._soon = Event()
        self.waiting = "waiting for the NVIDIA driver"

    def run(self, sink: Sink, stop: Event) -> None:
        while not stop.is_set():
            self._soon.clear()
            seen = probe(self._host, self._settings.probe_seconds)
            if seen.inventory is not None:
                sink.seen(seen.inventory, Topology())
                self.waiting = ""
                self._say.reset()
            else:
                self.waiting = f"waiting for the NVIDIA driver: {seen.message}"
                self._say.warning(self.waiting, hint="gpunode doctor")
                sink.broken(seen.message, seen.code is not None)
            self._soon.wait(self._settings.rediscover_seconds)

    def hurry(self) -> None:
        self._soon.set()
