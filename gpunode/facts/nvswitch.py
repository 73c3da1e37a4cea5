"""NVSwitches, and whether this node's fabric manager has any to look after.

Up to Hopper they are PCI bridges of NVIDIA's own (class 0680). On the Blackwell baseboards their management
hangs on network cards whose vital product data names it (SW_MNG); the racks (GB200, GB300) have theirs in
trays of their own, whose fabric manager isn't the compute node's.
"""

from __future__ import annotations

from gpunode.dataclass import dataclass
from gpunode.errors import GpunodeError
from gpunode.facts.pci import DEVICES, NVIDIA, PciGpu
from gpunode.host import Host

_BRIDGE = "0x0680"
_INFINIBAND = "/sys/class/infiniband"
_MANAGEMENT = b"SW_MNG"
_BLACKWELL = (
    "0x29",
    "0x31",
)  # device ids of B100, B200 and B300: only these need a look at slow product data


@dataclass(frozen=True)
class NvSwitch:
    """A switch on the PCI bus, or the network card that manages one. `driver` is the kernel's, if any."""

    address: str
    driver: str | None


def read_switches(host: Host, gpus: tuple[PciGpu, ...]) -> tuple[NvSwitch, ...]:
    """Those that a fabric manager of this node would look after; ones kept for a virtual machine are not."""
    if not gpus:
        return ()
    found = [switch for address in host.listdir(DEVICES) if (switch := _bridge(host, address)) is not None]
    if not found and any(gpu.device_id.startswith(_BLACKWELL) for gpu in gpus):
        found = [NvSwitch(name, "mlx5_core") for name in host.listdir(_INFINIBAND) if _manages(host, name)]
    return tuple(switch for switch in found if switch.driver != "vfio-pci")


def _bridge(host: Host, address: str) -> NvSwitch | None:
    place = f"{DEVICES}/{address}"
    try:
        if not (host.read_text(f"{place}/class") or "").startswith(_BRIDGE):
            return None
        if (host.read_text(f"{place}/vendor") or "").strip() != NVIDIA:
            return None
        driver = host.readlink(f"{place}/driver")
    except GpunodeError:
        return None
    return NvSwitch(address, driver.rstrip("/").rpartition("/")[2] if driver else None)


def _manages(host: Host, name: str) -> bool:
    """`Unreadable` without root: only root may read a card's product data."""
    return _MANAGEMENT in (host.read_bytes(f"{_INFINIBAND}/{name}/device/vpd") or b"")
