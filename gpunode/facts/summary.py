"""What a report says of the node itself, beside the findings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpunode.errors import GpunodeError
from gpunode.facts.daemons import Daemon
from gpunode.facts.node import Node
from gpunode.facts.system import TEGRA, WSL2

if TYPE_CHECKING:
    from gpunode.gpu.model import Inventory

_MODEL = "/proc/device-tree/model"  # what the device tree calls the module

Ask = Callable[[str, Callable[[], Any]], Any]


def _at_once(_name: str, read: Callable[[], Any]) -> Any:
    return read()


def describe(node: Node, ask: Ask = _at_once) -> dict[str, Any]:
    """Name, class, distro, kernel, driver, toolkit, engines, gpus. What can't be read is left empty.

    Every reading goes through `ask`, by a name for it; what that raises is one more that can't be read.
    """

    def known(name: str, read: Callable[[], Any], otherwise: Any = None) -> Any:
        """A topic of a damaged recording or an unreadable machine must not take the report with it."""
        try:
            return ask(name, read)
        except (GpunodeError, OSError, ValueError, TypeError, AttributeError, LookupError):
            return otherwise

    # CRI-O, podman and the toolkit only if a check asked: a report adds few questions to a hanging machine
    asked = node.__dict__
    daemons = (
        known("docker", lambda: node.docker),
        known("containerd", lambda: node.containerd),
        asked.get("crio"),
        asked.get("podman"),
    )
    return {
        "name": known("name", lambda: _line(node.host.read_text("/proc/sys/kernel/hostname") or ""), ""),
        "class": known("class", lambda: node.kind, "unknown"),
        "distro": known("distro", lambda: node.distribution),
        "kernel": known("kernel", lambda: _line(node.kernel), ""),
        "driver": known("driver", lambda: _driver(node)),
        "toolkit": known("toolkit", lambda: ".".join(map(str, asked["toolkit"].version))),
        "engines": [_engine(daemon) for daemon in daemons if daemon is not None],
        "gpus": known("gpus", lambda: _gpus(node), []),
    }


def _gpu(name: str, uuid: str = "") -> dict[str, Any]:
    return {"pci": "", "deviceId": "", "driver": None, "numa": None, "name": name, "uuid": uuid}


def _line(text: str) -> str:
    """A recorded machine may name itself as it likes: a line break would forge a line of the report."""
    return " ".join(text.split())


def _engine(daemon: Daemon) -> dict[str, Any]:
    """`running` is None for podman, which is no daemon."""
    return {
        "name": daemon.name,
        "version": ".".join(map(str, daemon.version)),
        "running": None if daemon.name == "podman" else daemon.process is not None,
        "config": daemon.config_path,
        "socket": daemon.socket,
    }


def _inventory(node: Node) -> Inventory | None:
    """What NVML listed, if a check asked it."""
    probe = node.__dict__.get("nvml")
    return probe.inventory if probe else None


def _driver(node: Node) -> str | None:
    """Of the loaded module; in WSL it is Windows' driver that drives the GPUs, and NVML tells of it."""
    if node.module is not None:
        return node.module.version
    inventory = _inventory(node)
    return str(inventory.driver_version) or None if inventory and node.kind == WSL2 else None


def _gpus(node: Node) -> list[dict[str, Any]]:
    """From the bus; names and UUIDs where NVML was asked anyway. A GPU that is on no bus is known by NVML in
    WSL, and by the name of its module on a Jetson."""
    inventory = _inventory(node)
    told = {str(gpu.pci): gpu for gpu in inventory.gpus} if inventory else {}
    if node.kind == TEGRA:
        model = (node.host.read_text(_MODEL) or "").strip("\0\n ")
        return [_gpu(_line(model) or "NVIDIA Tegra")]
    if node.kind == WSL2:
        return [_gpu(_line(str(gpu.name)), str(gpu.uuid)) for gpu in told.values()]
    return [
        {
            "pci": gpu.address,
            "deviceId": gpu.device_id,
            "driver": gpu.driver,
            "numa": gpu.numa,
            "name": _line(str(told[gpu.address].name)) if gpu.address in told else "",
            "uuid": str(told[gpu.address].uuid) if gpu.address in told else "",
        }
        for gpu in node.gpus
    ]
