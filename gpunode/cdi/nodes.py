"""Device files of the GPUs: which exist, and which belong to which GPU or MIG device."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from gpunode.facts.devices import driver_gpus
from gpunode.gpu.model import Gpu, MigDevice
from gpunode.host import Host
from gpunode.host.reading import DeviceNode

CONTROL = ("/dev/nvidia-modeset", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidiactl")
MIG_MINORS = "/proc/driver/nvidia-caps/mig-minors"
_PCI = "/sys/bus/pci/devices"


class NodeFacts(NamedTuple):
    """`present` has character devices by path, relative to `dev_root`.

    `drm` maps a PCI address to its nodes, `caps` a line of mig-minors (``gpu0/gi1/access``) to the number of
    its /dev/nvidia-caps node, `minors` a PCI address to N of /dev/nvidiaN.
    """

    present: Mapping[str, DeviceNode]
    drm: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    caps: Mapping[str, int] = MappingProxyType({})
    minors: Mapping[str, int] = MappingProxyType({})
    dev_root: str = ""


def read_nodes(host: Host, gpus: tuple[Gpu, ...], dev_root: str = "") -> NodeFacts:
    """The existing files for these GPUs. `dev_root` is the directory above another /dev, "" for the node's
    own."""
    present = {node.path: node for node in _devices(host, dev_root)}
    return NodeFacts(
        present,
        {gpu.pci: _drm(host, gpu.pci, present) for gpu in gpus if gpu.pci},
        mig_minors(host.read_text(MIG_MINORS) or ""),
        {gpu.address: gpu.minor for gpu in driver_gpus(host) if gpu.minor is not None},
        dev_root,
    )


def _devices(host: Host, dev_root: str) -> Iterator[DeviceNode]:
    for directory in ("/dev", "/dev/nvidia-caps", "/dev/dri"):
        yield from devices_below(host, dev_root, directory)


def devices_below(host: Host, dev_root: str, directory: str) -> Iterator[DeviceNode]:
    """Character devices of a directory below `dev_root`, by their paths relative to it."""
    for node in host.devices(f"{dev_root}{directory}"):
        yield node._replace(path=node.path.removeprefix(dev_root))


def need_groups(host: Host, dev_root: str = "") -> bool:
    """Whether only a group may open a device file that a specification may name."""
    nodes = (node for node in _devices(host, dev_root) if node.path.startswith(("/dev/nvidia", "/dev/dri/")))
    return any(open_to_group_only(node) for node in nodes)


def open_to_group_only(node: DeviceNode) -> bool:
    """Whether only this device's group may read and write it (`getAdditionalGIDs` in nvidia-ctk)."""
    return node.gid != 0 and node.mode & 0o006 != 0o006


def _drm(host: Host, pci: str, present: Container[str]) -> tuple[str, ...]:
    """cardN and renderDN of one GPU (kernel: Documentation/gpu/drm-uapi.rst); none without nvidia-drm."""
    names = (name for name in host.listdir(f"{_PCI}/{pci}/drm") if re.fullmatch(r"(card|renderD)\d+", name))
    return tuple(f"/dev/dri/{name}" for name in names if f"/dev/dri/{name}" in present)


def mig_minors(text: str) -> dict[str, int]:
    """The table of the driver's MIG capabilities: ``gpu0/gi1/ci0/access 31``."""
    lines = (re.fullmatch(r"(\S+)\s+(\d{1,7})", line.strip(), re.ASCII) for line in text.splitlines())
    return {line[1]: int(line[2]) for line in lines if line}


def gpu_node(gpu: Gpu, facts: NodeFacts) -> str | None:
    """/dev/nvidiaN of a GPU by its minor number, which need not be its index; None if unknown."""
    minor = gpu.minor if gpu.minor is not None else facts.minors.get(gpu.pci)
    return None if minor is None else f"/dev/nvidia{minor}"


def mig_nodes(gpu: Gpu, mig: MigDevice, facts: NodeFacts) -> tuple[str, ...] | None:
    """The two capabilities of a MIG device; None if the driver's table doesn't have them."""
    node = gpu_node(gpu, facts)
    if node is None:
        return None
    instance = f"gpu{node.removeprefix('/dev/nvidia')}/gi{mig.gi}"
    numbers = [facts.caps.get(f"{instance}/access"), facts.caps.get(f"{instance}/ci{mig.ci}/access")]
    return None if None in numbers else tuple(f"/dev/nvidia-caps/nvidia-cap{number}" for number in numbers)
