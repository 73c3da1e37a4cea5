"""Which control daemons there are and where their files lie. Pure.

::

    <mps-root>/<resource>/pipe    what clients reach the daemon by (CUDA_MPS_PIPE_DIRECTORY)
    <mps-root>/<resource>/log     control.log
    <mps-root>/<resource>/.started, <mps-root>/.ready, <mps-root>/shm

is the layout of NVIDIA's plugin and its own daemon, so each can be exchanged alone. Where a container can't
have more than one share each GPU gets a daemon of its own instead, in ``<mps-root>/<resource>/<gpu>/``: a
client then sees exactly its GPU (CUDA_VISIBLE_DEVICES of the daemon decides what clients see), a daemon that
has to be restarted costs one GPU, and containers of different users, which one daemon serves only after each
other (nvidia-cuda-mps-control(1)), meet on the same GPU only.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpunode.dataclass import dataclass
from gpunode.plugin.model import Problem, Resource, Unit
from gpunode.plugin.settings import Settings

MPS = "mps"
DEFAULT_ROOT = "/run/nvidia/mps"
MAX_SOCKET = 107  # bytes of a unix socket's path, unix(7)
_LONGEST_SOCKET = "control_privileged"  # of the four that the daemon makes
_MIB = 1 << 20
NOT_YET = Problem("mps", "the MPS control daemon is not up yet", starting=True)
_SHORT = 12  # "GPU-" and the first block of the UUID


@dataclass(frozen=True)
class DaemonSpec:
    """One control daemon. `gpus` are UUIDs in the order in which it and its clients count them.

    `percentage` of the threads and `memory` in MiB for each of `gpus` are what a client gets at most; 100 and
    0 stand for no limit.
    """

    resource: str
    gpus: tuple[str, ...]
    directory: str
    percentage: int = 100
    memory: tuple[int, ...] = ()

    @property
    def pipe(self) -> str:
        return f"{self.directory}/pipe"

    @property
    def log(self) -> str:
        return f"{self.directory}/log"

    @property
    def started(self) -> str:
        return f"{self.directory}/.started"

    @property
    def path_problem(self) -> str:
        """Why the daemon couldn't listen there: it would end without a word. Empty if it can."""
        length = len(f"{self.pipe}/{_LONGEST_SOCKET}".encode())
        if length <= MAX_SOCKET:
            return ""
        return f"{self.pipe} is {length - MAX_SOCKET} bytes too long for the daemon's sockets"


def root_of(settings: Settings) -> str:
    return settings.mps_root.rstrip("/") or DEFAULT_ROOT


def shared_units(resource: Resource) -> tuple[Unit, ...]:
    """The units that are cut into shares: those that a daemon serves. MIG devices never are."""
    counts = resource.share_counts
    return tuple(unit for unit in resource.units if unit.id in counts and not unit.partition)


def per_gpu(settings: Settings, resource: Resource) -> bool:
    """Whether each GPU of a resource has a daemon of its own.

    Only where the daemons are ours, and no container can span two of them.
    """
    return settings.mps and resource.single_share and len(resource.share_counts) > 1


def directory_of(settings: Settings, resource: Resource, unit: Unit) -> str:
    """Where the daemon lies that serves this unit."""
    base = f"{root_of(settings)}/{resource.name}"
    if not per_gpu(settings, resource):
        return base
    alike = sum(other[:_SHORT] == unit.id[:_SHORT] for other in resource.share_counts)
    name = unit.id if alike > 1 else unit.id[:_SHORT]
    return f"{base}/{name.replace('/', '_')}"


def memory_share(unit: Unit, shares: int, held: int = 1) -> int:
    """MiB of a unit's memory that `held` of its shares come to; 0 if its size isn't known."""
    return unit.memory_bytes * held // shares // _MIB


def thread_share(shares: int, held: int = 1) -> int:
    """Percent of the threads, at least 1: the daemon takes whole numbers above 0."""
    return max(1, 100 * held // shares)


def daemon_specs(
    settings: Settings, resources: Iterable[Resource], limits: bool | None = None
) -> tuple[DaemonSpec, ...]:
    """The daemons that these resources ask for; MIG devices have none.

    A client's own limit can only lower the daemon's (NVIDIA's MPS documentation, CUDA_MPS_PINNED_DEVICE_MEM_
    LIMIT). So a daemon limits everybody to one share where nobody can have more, and not at all where shares
    add up: there the containers carry their limit. `limits` overrides that.
    """
    found = []
    for resource in resources:
        units = shared_units(resource) if resource.sharing == MPS else ()
        if not units:
            continue
        limited = resource.single_share if limits is None else limits
        groups = [[unit] for unit in units] if per_gpu(settings, resource) else [list(units)]
        found += [_spec(settings, resource, group, limited) for group in groups]
    return tuple(found)


def _spec(settings: Settings, resource: Resource, units: list[Unit], limited: bool) -> DaemonSpec:
    count = resource.share_counts
    return DaemonSpec(
        resource.name,
        tuple(unit.id for unit in units),
        directory_of(settings, resource, units[0]),
        # one number for all GPUs of a daemon: no lower than the most generous of them needs
        max(thread_share(count[unit.id]) for unit in units) if limited else 100,
        tuple(memory_share(unit, count[unit.id]) if limited else 0 for unit in units),
    )
