"""What uses the GPUs now: processes with NVIDIA's device files open, and containers with them in /dev.

/proc/PID/fd shows it without NVML, and so also with a half replaced driver. The driver's own services don't
count: they stop and start with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gpunode.errors import DaemonError, GpunodeError
from gpunode.facts.cdi import vendor_specs
from gpunode.facts.device_plugins import nri_plugin
from gpunode.facts.devices import is_the_drivers, open_devices
from gpunode.facts.kubelet import root_directory
from gpunode.facts.node import Node

if TYPE_CHECKING:
    from gpunode.facts.workloads import Container


_ITS_OWN = ("nvidia-persistenced", "nv-fabricmanager", "nvidia-imex", "nvlsm")


class GpuUser(NamedTuple):
    """A process that has a GPU open, or with `container` the first one of a container that has GPUs."""

    pid: int
    name: str
    container: str = ""

    def __str__(self) -> str:
        inside = f" in container {self.container[:12]}" if self.container else ""
        return f"{self.name} (process {self.pid}){inside}"


class GpuUsers(NamedTuple):
    """The users, and the number of processes without permission to read: an ordinary user can't read others'
    files."""

    users: tuple[GpuUser, ...] = ()
    closed: int = 0


def gpu_users(node: Node) -> GpuUsers:
    """By process number; one per container. A driver that isn't loaded has no users."""
    majors, live = node.majors, node.host.live
    if live and not any(is_the_drivers(major, majors) for major in majors.values()):
        return GpuUsers()
    users: dict[int, GpuUser] = {}
    closed = 0
    try:
        containers = node.gpu_containers
    except GpunodeError:
        containers, closed = (), 1
    names = {process.pid: process.name for process in node.processes}
    for container in containers:
        if not live or any(is_the_drivers(file.major, majors) for file in container.nodes):
            users[container.pid] = GpuUser(container.pid, names.get(container.pid, "a process"), container.id)
    for process in node.processes:
        files = open_devices(node.host, process.pid, majors)
        closed += files is None
        if files and process.pid not in users and process.name not in _ITS_OWN:
            users[process.pid] = GpuUser(process.pid, process.name)
    return GpuUsers(tuple(users[pid] for pid in sorted(users)), closed)


# How pods get GPUs if the engine has no nvidia handler: through NRI, CDI, or a plugin's mounts.

_PLUGINS_KIND = "k8s.device-plugin.nvidia.com/gpu"  # of the specifications that NVIDIA's device plugin writes
# of NVIDIA's driver for dynamic resource allocation, below the kubelet's root
_DRA = "plugins/gpu.nvidia.com"
# Google's plugin mounts the driver into containers itself (container-engine-accelerators)
_MOUNTING = ("nvidia_gpu_device_plugin", "nvidia-gpu-device-plugin")
_OWN_KERNELS = ("kata", "runsc", "gvisor")  # their containers have no device files that the node sees


class GpuMethod(NamedTuple):
    """`summary` describes the method for users; `source` and `value` are the evidence."""

    summary: str
    source: str
    value: str


class GpuContainer(NamedTuple):
    """A running container with allocated GPUs, as the kubelet reports; `handler` is its pod's, "" for the
    default."""

    name: str
    handler: str
    container: Container


def possible_method(node: Node, *, cdi: bool) -> GpuMethod | None:
    """The method by which pods may get GPUs without a handler, None if none is known.

    `cdi` is whether the engine's CDI is enabled. The toolkit's packages write a specification on every node,
    so it alone only shows a possible method: see `used_method`.
    """
    return used_method(node, cdi=cdi) or (_by_specification(node, "nvidia.com/gpu") if cdi else None)


def used_method(node: Node, *, cdi: bool) -> GpuMethod | None:
    """A method that was configured, or that pods have got their GPUs by."""
    by_cdi = _by_specification(node, _PLUGINS_KIND) if cdi else None
    if plugin := nri_plugin(node.host, node.processes):
        return GpuMethod("the toolkit adds GPUs through NRI", f"/proc/{plugin.pid}", plugin.name)
    if cdi and by_cdi is None and (place := dra_directory(node)):
        return GpuMethod("NVIDIA's DRA driver adds GPUs to pods through CDI", place, "its directory")
    return by_cdi or mounting(node) or _by_access(node)


def _by_specification(node: Node, kind: str) -> GpuMethod | None:
    for spec in vendor_specs(node.host):
        if spec.kind == kind and spec.devices and not spec.problem:
            return GpuMethod(
                "containers get their GPUs through CDI",
                spec.path,
                f"for {kind}; CDI is enabled in the engine",
            )
    return None


def dra_directory(node: Node) -> str:
    """Where NVIDIA's DRA driver for GPUs has registered; empty if it hasn't."""
    place = f"{root_directory(node.kubelet)}/{_DRA}"
    return place if node.kubelet is not None and node.host.is_dir(place) else ""


def mounting(node: Node) -> GpuMethod | None:
    """A plugin that doesn't need the toolkit either."""
    for process in node.plugin_processes:
        if process.process.name in _MOUNTING:
            text = "the device plugin mounts the driver into containers"
            return GpuMethod(text, f"/proc/{process.process.pid}", process.process.name)
    return None


def _by_access(node: Node) -> GpuMethod | None:
    """Pods under another handler whose allocated GPUs are accessible to them."""
    for holder in holders(node):
        if holder.container.nodes and not holder.handler.startswith("nvidia"):
            return GpuMethod(
                "pods use GPUs without it", f"/proc/{holder.container.pid}/root/dev", holder.name
            )
    return None


def holders(node: Node) -> tuple[GpuContainer, ...]:
    """Running containers with allocated GPUs, as far as they use this kernel; () if unknown."""
    try:
        owners = {(holding.namespace, holding.pod, holding.container) for holding in node.gpu_holdings}
    except DaemonError:
        return ()
    running = {container.id: container for container in node.containers} if owners else {}
    return tuple(
        GpuContainer(
            f"pod {container.namespace}/{container.pod}, container {container.name}",
            container.handler,
            running[container.id],
        )
        for container in (node.cri_containers if owners else ())
        if (container.namespace, container.pod, container.name) in owners
        and container.id in running
        and not container.handler.startswith(_OWN_KERNELS)
        # a virtual machine's GPU isn't a device of this kernel's driver
        and not node.host.is_dir(f"/proc/{running[container.id].pid}/root/dev/vfio")
    )
