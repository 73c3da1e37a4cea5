"""GPUs that are kept for virtual machines: no driver of NVIDIA's knows them, the PCI bus does."""

from __future__ import annotations

from gpunode.errors import GpunodeError
from gpunode.facts.pci import DEVICES, PciGpu, read_gpus
from gpunode.gpu.model import Gpu, Inventory
from gpunode.host import Host
from gpunode.plugin.labels.model import UNKNOWN_DRIVER

_VENDOR = "10de"
_IDS = tuple(f"/usr/{place}/pci.ids" for place in ("share/hwdata", "share/misc", "local/share", "share"))
_BARS, _IS_MEMORY = 6, 0x200  # IORESOURCE_MEM of linux/ioport.h


def vfio_inventory(host: Host) -> Inventory:
    """The GPUs that vfio-pci, or a variant of it, holds. They tell no UUID: the address stands for it."""
    gpus = [gpu for gpu in read_gpus(host) if gpu.for_vms] if host.is_dir(DEVICES) else []
    names = _names(host) if gpus else {}
    return Inventory(
        UNKNOWN_DRIVER, gpus=tuple(_gpu(host, number, gpu, names) for number, gpu in enumerate(gpus))
    )


def _gpu(host: Host, index: int, gpu: PciGpu, names: dict[str, str]) -> Gpu:
    number = gpu.device_id.removeprefix("0x").lower()
    return Gpu(
        index,
        gpu.address,
        names.get(number, f"NVIDIA device {number}"),
        gpu.address,
        memory_bytes=_addressable(_text(host, f"{DEVICES}/{gpu.address}/resource")),
        numa=gpu.numa,
    )


def _addressable(text: str) -> int:
    """Bytes behind the device's windows in memory: lines of ``first last flags``, hexadecimal (sysfs-pci)."""
    total = 0
    for line in text.splitlines()[:_BARS]:
        try:
            first, last, flags = (int(word, 16) for word in line.split())
        except ValueError:
            continue
        if last > first and flags & _IS_MEMORY:
            total += last - first + 1
    return total


def _names(host: Host) -> dict[str, str]:
    """NVIDIA's devices in the list of PCI ids: its section is indented by one tab, subsystems by two."""
    for path in _IDS:
        lines = iter(_text(host, path).splitlines())
        if not any(line.startswith(_VENDOR) for line in lines):
            continue
        found = {}
        for line in lines:
            if line[:1] not in ("\t", "#", ""):
                break
            if line[:1] == "\t" and line[1:2] != "\t":
                number, _, name = line.strip().partition("  ")
                found[number] = name
        return found
    return {}


def _text(host: Host, path: str) -> str:
    try:
        return host.read_text(path) or ""
    except GpunodeError:
        return ""
