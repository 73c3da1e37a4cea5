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
    """One display function. `driver` is the kernel driver that owns it, None if nobody does; `display` is
    True for a VGA controller, which may drive a screen, False for a GPU without outputs (3D controller)."""

    address: str
    device_id: str
    driver: str | None
    numa: int | None
    display: bool = False

    @property
    def for_vms(self) -> bool:
        """Whether it is kept for virtual machines: by vfio-pci, a variant of it (nvgrace-gpu-vfio-pci), or
        the stub that comes before it."""
        return (self.driver or "").endswith("vfio-pci") or self.driver == "pci-stub"


def read_gpus(host: Host) -> tuple[PciGpu, ...]:
    """Every NVIDIA GPU, ordered by address; a function that vanishes meanwhile is left out, and so are the
    virtual functions that a vGPU host makes of a GPU."""
    found = []
    for address in host.listdir(DEVICES):
        place = f"{DEVICES}/{address}"
        if _word(host, f"{place}/vendor") != NVIDIA:
            continue
        kind = _word(host, f"{place}/class")
        if not kind.startswith(_GPU_CLASSES) or host.readlink(f"{place}/physfn") is not None:
            continue
        driver = host.readlink(f"{place}/driver")
        name = driver.rstrip("/").rpartition("/")[2] if driver else None
        number, display = _word(host, f"{place}/device"), kind.startswith(_GPU_CLASSES[0])
        found.append(PciGpu(address, number, name, _numa(host, place), display))
    return tuple(found)


def display_cards(these: tuple[PciGpu, ...], gpus: tuple[PciGpu, ...]) -> bool:
    """Whether these GPUs are there for a screen, beside others that have no outputs."""
    return all(gpu.display for gpu in these) and any(not gpu.display for gpu in gpus)


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
