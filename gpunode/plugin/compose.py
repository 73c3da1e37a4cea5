"""From settings to a service: selects the backend, the judge and the parts. The only module that imports all
of them."""

from __future__ import annotations

from collections.abc import Sequence

from gpunode.gpu.model import Inventory
from gpunode.host import Host
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.health import HealthJudge
from gpunode.plugin.health_memory import HealthMemory
from gpunode.plugin.logfmt import Log
from gpunode.plugin.model import Backend, Part, Plan
from gpunode.plugin.serve import PartMaker, PluginService


def make_service(host: Host, settings: Settings, log: Log, parts: Sequence[PartMaker] = ()) -> PluginService:
    """A service that is ready to be started, with these parts in addition to its own."""
    memory = HealthMemory(host, settings.state_dir, log)
    judge = HealthJudge(settings.health, log, memory.load())
    memory.source = lambda: judge.kept

    def remember(service: PluginService) -> Part:
        return memory

    backend = make_backend(host, settings, log)
    nvidia = (make_cdi,) if settings.vendor == "nvidia" and not settings.simulate else ()
    mps = (make_mps,) if nvidia and host.live else ()
    seen = (make_status_file, make_endpoints) if settings.listen else (make_status_file,)
    labels = (make_labels,) if settings.labels.to else ()
    every = (*nvidia, *mps, *parts, *labels, *seen, remember)
    return PluginService(host, settings, log, backend, judge, every)


def make_cdi(service: PluginService) -> Part:
    """NVIDIA's backend itself, which keeps the CDI specifications up to date and knows what they lack."""
    from gpunode.plugin.nvidia.backend import NvidiaBackend

    assert isinstance(service.backend, NvidiaBackend)
    service.backend.replan = service.ledger.replan
    service.ledger.vetoes.append(service.backend)
    return service.backend


def make_mps(service: PluginService) -> Part:
    """MPS daemons; does nothing while no resource is shared with MPS."""
    from gpunode.plugin.mps.supervisor import Supervisor

    ledger = service.ledger

    def source() -> tuple[Settings, Plan] | None:
        return (ledger.settings, ledger.plan) if ledger.planned and not ledger.trouble else None

    supervisor = Supervisor(service.host, service.log, source, ledger.tick, soon=service.again_within)
    ledger.vetoes.append(supervisor)
    return supervisor


def make_labels(service: PluginService) -> Part:
    """The node's labels, for the GPUs that the service sees."""
    from gpunode.plugin.labels.watch import Labeller

    ledger = service.ledger

    def source() -> tuple[Settings, Inventory] | None:
        return None if ledger.inventory is None else (ledger.settings, ledger.inventory)

    return Labeller(service.host, service.log, source, service.again_within)


def make_status_file(service: PluginService) -> Part:
    """The status file that `plugin status` reads."""
    from gpunode.plugin.observe.status_file import StatusFile

    return StatusFile(service)


def make_endpoints(service: PluginService) -> Part:
    """/metrics, /healthz and /readyz. `PreconditionError` if the port isn't available."""
    from gpunode.plugin.observe.http import Endpoints

    return Endpoints(service)


def make_backend(host: Host, settings: Settings, log: Log) -> Backend:
    """The backend for the vendor, or for the simulated node."""
    if settings.simulate:
        from gpunode.plugin.simulate.backend import SimulatedBackend

        return SimulatedBackend(host, settings, log)
    if settings.vendor == "amd":
        from gpunode.plugin.amd import AmdBackend

        return AmdBackend(host, settings, log)
    from gpunode.plugin.nvidia.backend import NvidiaBackend

    return NvidiaBackend(host, settings, log)
