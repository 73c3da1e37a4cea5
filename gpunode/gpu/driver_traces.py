"""Traces of the driver in /proc, /sys and /dev: cheap to read, without a query to the driver.

When a trace changes, NVML must be reopened: a process keeps the library that it has loaded, and NVML
counts GPUs once, when it is initialised.
"""

from __future__ import annotations

from gpunode.errors import GpunodeError
from gpunode.host import Host

_MODULE = "/sys/module/nvidia"
_VERSION = "/proc/driver/nvidia/version"
_GPUS = "/proc/driver/nvidia/gpus"
_CAPABILITIES = "/proc/driver/nvidia/capabilities"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"

Traces = tuple[object, ...]


def driver_traces(host: Host, library: str = "") -> Traces:
    """The loaded driver: module, version, GPUs, MIG instances, and the present file of `library`."""
    version = host.text_or_empty(_VERSION)
    return (module(host), version, names_in(host, _GPUS), _instances(host), _file(host, library))


def gpu_addresses(host: Host) -> tuple[str, ...]:
    """The PCI addresses of the driver's GPUs. NVML's indices are valid as long as these don't change."""
    return names_in(host, _GPUS)


def node_traces(host: Host) -> Traces:
    """`driver_traces` and the device files, which appear when a driver is loaded."""
    nodes = tuple(name for name in names_in(host, "/dev") if name.startswith("nvidia"))
    return (*driver_traces(host), nodes)


def module(host: Host, path: str = _MODULE) -> int:
    """A number that changes each time the kernel module is loaded (sysfs numbers its inodes), 0 while it
    isn't."""
    return _file(host, path)[1]


def generation(host: Host, driver_version: str) -> str:
    """A text that changes with a reboot, a reload or a replacement of the driver."""
    return f"{boot_id(host)}/{module(host)}/{driver_version}"


def boot_id(host: Host) -> str:
    """The kernel's own id of this boot, "" where it reports none."""
    return host.text_or_empty(_BOOT_ID).strip()


def _instances(host: Host) -> tuple[str, ...]:
    instances = []
    for gpu in names_in(host, _CAPABILITIES):
        if gpu.startswith("gpu"):
            for instance in names_in(host, f"{_CAPABILITIES}/{gpu}/mig"):
                inner = names_in(host, f"{_CAPABILITIES}/{gpu}/mig/{instance}")
                instances.append("/".join((gpu, instance, *inner)))
    return tuple(instances)


def names_in(host: Host, directory: str) -> tuple[str, ...]:
    """Sorted names; none if the directory doesn't exist or can't be read."""
    try:
        return host.listdir(directory)
    except GpunodeError:
        return ()


def _file(host: Host, path: str) -> tuple[int, int]:
    try:
        seen = host.stat(path) if path else None
    except GpunodeError:
        seen = None
    return (seen.st_dev, seen.st_ino) if seen else (0, 0)
