"""One look at the node's GPUs, as `plugin serve` would see them, without serving."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event, Thread

from gpunode.gpu.model import Inventory, Reading, Topology
from gpunode.gpu.nvml import GpuEvent
from gpunode.host import Host
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.model import Backend


def look(host: Host, settings: Settings, backend: Backend) -> tuple[Inventory | None, str]:
    """The inventory, or None and why there is none. `ConfigError` for a malformed recording."""
    if settings.vendor == "nvidia" and not settings.simulate:
        from gpunode.gpu.probe import probe
        from gpunode.plugin.nvidia.platform import TEGRA, nvml_library

        if settings.device_discovery_strategy == TEGRA:  # one device, and no NVML to ask
            return Inventory(""), ""
        seen = probe(host, settings.probe_seconds, library=nvml_library(host, settings))
        return seen.inventory, seen.message
    first = _First()
    thread = Thread(target=backend.run, args=(first, first.stop), name="look", daemon=True)
    thread.start()
    first.stop.wait(settings.probe_seconds)
    first.stop.set()
    backend.hurry()
    thread.join(1.0)
    return first.inventory, first.reason or "no answer"


class _First:
    """A `Sink` that wants the first news only."""

    def __init__(self) -> None:
        self.stop = Event()
        self.inventory: Inventory | None = None
        self.reason = ""

    def seen(self, inventory: Inventory, topology: Topology) -> None:
        if self.inventory is None:
            self.inventory = inventory
        self.stop.set()

    def readings(self, readings: Sequence[Reading]) -> None:
        """Not asked for."""

    def event(self, event: GpuEvent) -> None:
        """Not asked for."""

    def broken(self, reason: str, sure: bool) -> None:
        self.reason = reason
        self.stop.set()
