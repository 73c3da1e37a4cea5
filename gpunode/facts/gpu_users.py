"""Who uses the GPUs now: processes with NVIDIA's device files open, and containers that have them in /dev.

/proc/PID/fd tells it without NVML, and so also where the driver is half exchanged. The driver's own services
don't count: they end and start with it.
"""

from __future__ import annotations

from gpunode.dataclass import dataclass
from gpunode.errors import GpunodeError
from gpunode.facts.gpu_files import is_the_drivers, opened
from gpunode.facts.node import Node

_ITS_OWN = ("nvidia-persistenced", "nv-fabricmanager", "nvidia-imex", "nvlsm")


@dataclass(frozen=True)
class GpuUser:
    """A process that has a GPU open, or with `container` the first one of a container that has GPUs."""

    pid: int
    name: str
    container: str = ""

    def __str__(self) -> str:
        inside = f" in container {self.container[:12]}" if self.container else ""
        return f"{self.name} (process {self.pid}){inside}"


@dataclass(frozen=True)
class GpuUsers:
    """Who they are, and how many processes are closed to us: an ordinary user sees no others' files."""

    users: tuple[GpuUser, ...] = ()
    closed: int = 0


def gpu_users(node: Node) -> GpuUsers:
    """By process number; one in a container is named once. Nobody uses a driver that isn't loaded."""
    majors, live = node.majors, node.host.live
    if live and not any(is_the_drivers(major, majors) for major in majors.values()):
        return GpuUsers()
    found: dict[int, GpuUser] = {}
    closed = 0
    try:
        containers = node.gpu_containers
    except GpunodeError:
        containers, closed = (), 1
    names = {process.pid: process.name for process in node.processes}
    for one in containers:
        if not live or any(is_the_drivers(file.major, majors) for file in one.nodes):
            found[one.pid] = GpuUser(one.pid, names.get(one.pid, "a process"), one.id)
    for process in node.processes:
        files = opened(node.host, process.pid, majors)
        closed += files is None
        if files and process.pid not in found and process.name not in _ITS_OWN:
            found[process.pid] = GpuUser(process.pid, process.name)
    return GpuUsers(tuple(found[pid] for pid in sorted(found)), closed)
