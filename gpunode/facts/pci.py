"""NVIDIA GPUs on the PCI bus, from sysfs: there before any driver is."""

from __future__ import annotations

from gpunode.dataclass import dataclass
from gpunode.errors import GpunodeError
from gpunode.host import Host

DEVICES = "/sys/bus/pci/devices"
NVIDIA = "0x10de"
_GPU_CLASSES = ("0x0300", "0x0302")  # VGA controller, 3D controller
_AUDIO_CLASS = "0x0403"


@dataclass(frozen=True)
class PciGpu:
    """One display function. `driver` is the kernel driver that owns it, None if nobody does."""

    address: str
    device_id: str
    driver: str | None
    numa: int | None


def read_gpus(host: Host) -> tuple[PciGpu, ...]:
    """Every NVIDIA GPU, ordered by address; a function that vanishes meanwhile is left out."""
    found = []
    for address in host.listdir(DEVICES):
        place = f"{DEVICES}/{address}"
        if _word(host, f"{place}/vendor") != NVIDIA:
            continue
        if not _word(host, f"{place}/class").startswith(_GPU_CLASSES):
            continue
        driver = host.readlink(f"{place}/driver")
        name = driver.rstrip("/").rpartition("/")[2] if driver else None
        found.append(PciGpu(address, _word(host, f"{place}/device"), name, _numa(host, place)))
    return tuple(found)


def lone_audio(host: Host) -> tuple[str, ...]:
    """Audio functions of NVIDIA cards whose display function is not there."""
    found = []
    for address in host.listdir(DEVICES):
        place = f"{DEVICES}/{address}"
        if (
            _word(host, f"{place}/class").startswith(_AUDIO_CLASS)
            and _word(host, f"{place}/vendor") == NVIDIA
        ):
            found.append(address)
    return tuple(found)


def _word(host: Host, path: str) -> str:
    try:
        return (host.read_text(path) or "").strip()
    except GpunodeError:
        return ""  # a device that fell off the bus answers with an I/O error


def _numa(host: Host, place: str) -> int | None:
    text = _word(host, f"{place}/numa_node")
    # -1: the platform doesn't say
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else None
