"""What goes beside the GPUs: GDRCopy, GPUDirect Storage, InfiniBand, IMEX channels. One class each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from gpunode.cdi.common import device_edits
from gpunode.cdi.model import Device, Edits, Mount, Spec
from gpunode.cdi.nodes import devices_below
from gpunode.cdi.versions import needed
from gpunode.dataclass import replace
from gpunode.host import DeviceNode, Host

_PLACES = {
    "gdrcopy": ("/dev", r"gdrdrv"),
    "gds": ("/dev", r"nvidia-fs\d*"),
    "mofed": ("/dev/infiniband", r"uverbs\d+|rdma_cm"),
    "imex-channel": ("/dev/nvidia-caps-imex-channels", r"channel\d+"),
}
_GDS_FILES = ("/run/udev", "/etc/cufile.json")


def feature_nodes(host: Host, dev_root: str = "") -> Mapping[str, tuple[DeviceNode, ...]]:
    """Device files by class, without the `dev_root` below which they are; empty where there are none."""
    classes = {}
    for name, (place, pattern) in _PLACES.items():
        devices = devices_below(host, dev_root, place)
        classes[name] = tuple(one for one in devices if re.fullmatch(pattern, one.path.rpartition("/")[2]))
    return classes


def gds_mounts(host: Host, root: str = "", root_here: str = "") -> tuple[Mount, ...]:
    """udev's data and cuFile's settings, where they are.

    `root` is the driver's as the node calls it, `root_here` where this process sees it.
    """
    there = (path for path in _GDS_FILES if host.exists(f"{root_here}{path}"))
    return tuple(Mount(path, f"{root}{path}") for path in there)


def feature_spec(
    kind: str,
    devices: Mapping[str, Iterable[DeviceNode]],
    mounts: tuple[Mount, ...] = (),
    dev_root: str = "",
) -> Spec:
    """A specification of these device files by name: ``all``, or a channel's number."""
    made = tuple(
        Device(name, replace(device_edits(nodes, dev_root), mounts=mounts)) for name, nodes in devices.items()
    )
    spec = Spec(kind, made, Edits())
    return Spec(kind, made, Edits(), needed(spec))
