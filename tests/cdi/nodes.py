"""Synthetic nodes: inventories, device files and driver files as the builder takes them."""

from gpunode.cdi.driver_files import DriverFiles, Library
from gpunode.cdi.nodes import CONTROL, NodeFacts
from gpunode.gpu.model import Gpu, Inventory, MigDevice
from gpunode.host.reading import DeviceNode

VERSION = "550.54.15"
DIRECTORY = "/usr/lib/x86_64-linux-gnu"


def gpu(index, *, minor=None, pci=None, **more):
    """GPU `index`; its minor number is the index by default."""
    place = pci or f"0000:{index:02x}:00.0"
    return Gpu(index, f"GPU-{index}", "NVIDIA", place, index if minor is None else minor, **more)


def mig(gpu_index, index, gi, ci=0, profile="1g.10gb"):
    return MigDevice(index, f"MIG-{gpu_index}-{index}", profile, gi, ci, 0)


def inventory(*gpus):
    return Inventory(VERSION, "12.4", tuple(gpus))


def facts(*paths, control=CONTROL, **more):
    """These device files and the control nodes, with arbitrary numbers."""
    return NodeFacts(
        {path: DeviceNode(path, 195, number, 0o666) for number, path in enumerate((*control, *paths))}, **more
    )


def driver(*more, **fields):
    """A driver of two libraries."""
    libraries = (
        Library(f"{DIRECTORY}/libcuda.so.{VERSION}", DIRECTORY, ("libcuda.so", "libcuda.so.1")),
        Library(f"{DIRECTORY}/libnvidia-ml.so.{VERSION}", DIRECTORY, ("libnvidia-ml.so.1",)),
        *more,
    )
    return DriverFiles(VERSION, "x86_64", libraries, **fields)
