"""Who uses the GPUs now: processes with NVIDIA's device files open, and containers that have them in /dev.

/proc/PID/fd tells it without NVML, and so also where the driver is half exchanged. The driver's own services
don't count: they end and start with it.
"""

from __future__ import annotations

import re

from gpunode.dataclass import dataclass
from gpunode.errors import GpunodeError, Unreadable
from gpunode.facts.node import Node
from gpunode.host import Host

_DEVICE = re.compile(r"/dev/nvidia(\d+|ctl|-uvm)( \(deleted\))?")
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
    """By process number; one in a container is named once."""
    found: dict[int, GpuUser] = {}
    closed = 0
    try:
        containers = node.gpu_containers
    except GpunodeError:
        containers, closed = (), 1
    names = {process.pid: process.name for process in node.processes}
    for one in containers:
        found[one.pid] = GpuUser(one.pid, names.get(one.pid, "a process"), one.id)
    for process in node.processes:
        opened = _opens(node.host, process.pid)
        closed += opened is None
        if opened and process.pid not in found and process.name not in _ITS_OWN:
            found[process.pid] = GpuUser(process.pid, process.name)
    return GpuUsers(tuple(found[pid] for pid in sorted(found)), closed)


def _opens(host: Host, pid: int) -> bool | None:
    """Whether a process has a GPU's device file open; None if it isn't ours to see, False if it is gone."""
    place = f"/proc/{pid}/fd"
    try:
        links = (host.readlink(f"{place}/{number}") for number in host.listdir(place))
        return any(link is not None and _DEVICE.fullmatch(link) for link in links)
    except (Unreadable, PermissionError):
        return None
    except (GpunodeError, OSError):
        return False
