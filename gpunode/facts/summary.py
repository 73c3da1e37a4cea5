"""What a report says of the node itself, beside the findings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpunode.errors import GpunodeError
from gpunode.facts.daemons import Daemon
from gpunode.facts.node import Node


def describe(node: Node) -> dict[str, Any]:
    """Name, class, distro, kernel, driver, toolkit, engines, gpus. What can't be read is left empty."""
    return {
        "name": known(lambda: (node.host.read_text("/proc/sys/kernel/hostname") or "").strip(), ""),
        "class": known(lambda: node.kind, "unknown"),
        "distro": known(lambda: node.distribution, None),
        "kernel": known(lambda: node.kernel, ""),
        "driver": known(lambda: node.module.version if node.module else None, None),
        "toolkit": known(lambda: ".".join(map(str, node.__dict__["toolkit"].version)), ""),
        "engines": [
            _engine(daemon)
            for read in (lambda: node.docker, lambda: node.containerd, *map(_asked(node), ("crio", "podman")))
            if (daemon := known(read, None)) is not None
        ],
        "gpus": known(lambda: _gpus(node), []),
    }


def _asked(node: Node) -> Callable[[str], Callable[[], Any]]:
    """A topic, if a check wanted to know it: a report adds no questions of its own to a hanging machine."""
    return lambda name: lambda: node.__dict__[name]


def known(read: Callable[[], Any], otherwise: Any) -> Any:
    """A topic of a damaged recording or an unreadable machine must not take the report with it."""
    try:
        return read()
    except (GpunodeError, OSError, ValueError, TypeError, AttributeError, LookupError):
        return otherwise


def _engine(daemon: Daemon) -> dict[str, Any]:
    """`running` is None for podman, which is no daemon."""
    return {
        "name": daemon.name,
        "version": ".".join(map(str, daemon.version)),
        "running": None if daemon.name == "podman" else daemon.process is not None,
        "config": daemon.config_path,
        "socket": daemon.socket,
    }


def _gpus(node: Node) -> list[dict[str, Any]]:
    """From the bus; names and UUIDs where NVML was asked anyway."""
    probe = node.__dict__.get("nvml")
    told = {str(gpu.pci): gpu for gpu in probe.inventory.gpus} if probe and probe.inventory else {}
    return [
        {
            "pci": gpu.address,
            "deviceId": gpu.device_id,
            "driver": gpu.driver,
            "numa": gpu.numa,
            "name": str(told[gpu.address].name) if gpu.address in told else "",
            "uuid": str(told[gpu.address].uuid) if gpu.address in told else "",
        }
        for gpu in node.gpus
    ]
