"""From settings to a service: selects the backend and the parts. The config file's watch is added
by `plugin serve`, which knows where settings come from."""

from __future__ import annotations

from gpunode.gpu.model import Inventory
from gpunode.host import Host
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.health import HealthChecker, HealthMemory
from gpunode.plugin.logfmt import Log
from gpunode.plugin.model import Backend
from gpunode.plugin.mps.supervisor import Supervisor
from gpunode.plugin.nvidia.backend import NvidiaBackend
from gpunode.plugin.observe.status_file import StatusFile
from gpunode.plugin.serve import PluginService


def make_service(host: Host, settings: Settings, log: Log) -> PluginService:
    """A service with its parts, ready to be started. `PreconditionError` if the port of `--listen` isn't
    available."""
    memory = HealthMemory(host, settings.state_dir, log)
    checker = HealthChecker(settings.health, log, memory.load())
    memory.source = lambda: checker.kept
    service = PluginService(host, settings, log, make_backend(host, settings, log), checker)
    if settings.vendor == "nvidia" and not settings.simulate:
        add_cdi(service)
        if host.live:
            supervisor = Supervisor(host, log, service.ledger)
            service.ledger.vetoes.append(supervisor)
            service.parts.append(supervisor)
    if settings.labels.to:
        add_labels(service)
    service.parts.append(StatusFile(service))
    if settings.listen:
        from gpunode.plugin.observe.http import Endpoints

        service.parts.append(Endpoints(service))
    service.parts.append(memory)
    return service


def add_cdi(service: PluginService) -> None:
    """NVIDIA's backend itself keeps the CDI specifications up to date, and knows what they lack."""
    assert isinstance(service.backend, NvidiaBackend)
    service.backend.replan = service.ledger.replan
    service.ledger.vetoes.append(service.backend)
    service.parts.append(service.backend)


def add_labels(service: PluginService) -> None:
    """The node's labels, for the GPUs that the service sees."""
    from gpunode.plugin.labels.watch import Labeller

    ledger = service.ledger

    def source() -> tuple[Settings, Inventory] | None:
        return None if ledger.inventory is None else (ledger.settings, ledger.inventory)

    service.parts.append(Labeller(service.host, service.log, source))


def make_backend(host: Host, settings: Settings, log: Log) -> Backend:
    """The backend for the vendor, or for the simulated node."""
    if settings.simulate:
        from gpunode.plugin.simulate.backend import SimulatedBackend

        return SimulatedBackend(host, settings, log)
    if settings.vendor == "amd":
        from gpunode.plugin.amd import AmdBackend

        return AmdBackend(host, settings, log)
    return NvidiaBackend(host, settings, log)
