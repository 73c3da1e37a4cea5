"""From settings to a service: which backend, which judge, which parts. The one place that knows them all."""

from __future__ import annotations

from gpunode.host import Host
from gpunode.plugin.backend import Backend
from gpunode.plugin.health.judge import HealthJudge
from gpunode.plugin.logfmt import Log
from gpunode.plugin.serve import PluginService
from gpunode.plugin.settings import Settings


def make_service(host: Host, settings: Settings, log: Log) -> PluginService:
    """A service that is ready to be started."""
    return PluginService(host, settings, log, make_backend(host, settings, log), HealthJudge(settings.health))


def make_backend(host: Host, settings: Settings, log: Log) -> Backend:
    """The backend for the vendor, or for the simulated node."""
    if settings.simulate:
        from gpunode.plugin.simulate.backend import SimulatedBackend

        return SimulatedBackend(host, settings, log)
    from gpunode.plugin.nvidia.backend import NvidiaBackend

    return NvidiaBackend(host, settings, log)
