"""The fabric manager: its version, what it lacks, its log since its last start, and its NVSwitches."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import NamedTuple

from gpunode.errors import GpunodeError
from gpunode.facts.gpudirect import INFINIBAND
from gpunode.facts.packages import Packages
from gpunode.facts.pci import DEVICES, NVIDIA, PciGpu, driver_of
from gpunode.host import Host

LOG = "/var/log/fabricmanager.log"
UNIT = "nvidia-fabricmanager.service"
PROGRAM = "nv-fabricmanager"
IB_UMAD = "ib_umad"
_SUBNET_MANAGER = "/opt/nvidia/nvlsm/sbin/nvlsm"  # which the fabric manager starts itself
_PACKAGES = ("nvidia-fabricmanager", "nvidia-fabric-manager")
_NOT_IT = "-dev"
_START = "is running with the following configuration options"
_TAIL_BYTES = 1 << 20  # its log may grow to a gigabyte
_NUMBER = r"(\d+(?:\.\d+)+)"
_VERSIONS = rf"driver interface version {_NUMBER}\s+don't match with driver version {_NUMBER}"
_TOPOLOGY = "detected number of NVSwitches don't match"
_SWITCH_ERROR = r"detected NVSwitch (non-)?fatal error (\d+)"


class LogFinding(NamedTuple):
    """A relevant line of the log. `kind`: version, topology, fatal or non-fatal; `text` without its time."""

    kind: str
    line: int | None
    text: str


def package_version(packages: Packages) -> tuple[str, str] | None:
    """Name and upstream version of the installed fabric manager; None if no package contains one."""
    for package in packages.starting(*_PACKAGES):
        if _NOT_IT not in package.name and re.fullmatch(r"[\d.]+", package.upstream):
            return package.name, package.upstream
    return None


class Requirement(NamedTuple):
    """Something that the fabric manager needs: its path, its present state, and the package or module that
    contains it."""

    path: str
    state: str
    need: str


def missing_requirements(host: Host) -> tuple[Requirement, ...]:
    """What the fabric manager of a Blackwell baseboard needs (its user guide) and the node doesn't have."""
    result = []
    if not host.is_file(_SUBNET_MANAGER):
        result.append(Requirement(_SUBNET_MANAGER, "not installed", "nvlsm"))
    if host.which("ibstat") is None:
        place, state = host.unsafe_program("ibstat") or ("ibstat", "not installed")
        result.append(Requirement(place, state, "infiniband-diags"))
    if not host.is_dir(f"/sys/module/{IB_UMAD}"):
        result.append(Requirement(f"/sys/module/{IB_UMAD}", "not loaded", IB_UMAD))
    return tuple(result)


def read_log(host: Host) -> tuple[LogFinding, ...]:
    """Its log since its last start, each kind once, the last line of it. () without a log.

    The start is the line that it writes then: its times are local ones, which don't identify a boot.
    """
    text = host.read_tail(LOG, _TAIL_BYTES)
    status = host.stat(LOG) if text else None
    return parse_log(text, whole=status is not None and status.st_size <= _TAIL_BYTES)


def parse_log(text: str, *, whole: bool = True) -> tuple[LogFinding, ...]:
    """The findings of a log; if only its end was read, the line numbers are unknown."""
    lines = text.splitlines()
    start = max((number for number, line in enumerate(lines) if _START in line), default=0)
    result: dict[str, LogFinding] = {}
    for number, line in enumerate(lines[start:], start + 1):
        kind = _kind(line)
        if kind:
            message = re.sub(r"^(?:\[[^\]]*\]\s*)+", "", line)[:300]
            result[kind] = LogFinding(kind, number if whole else None, message)
    return tuple(result.values())


def _kind(line: str) -> str:
    if _TOPOLOGY in line:
        return "topology"
    if "driver version" in line and re.search(_VERSIONS, line):
        return "version"
    match = re.search(_SWITCH_ERROR, line) if "NVSwitch" in line else None
    return ("non-fatal" if match[1] else "fatal") if match else ""


def versions_in(text: str) -> tuple[str, str] | None:
    """The fabric manager's version and the driver's, from the line in which it refuses the driver."""
    match = re.search(_VERSIONS, text)
    return (match[1], match[2]) if match else None


# NVSwitches, and whether this node's fabric manager manages any.
#
# Up to Hopper they are PCI bridges of NVIDIA's own (class 0680). On the Blackwell baseboards they are managed
# through network cards whose vital product data names it (SW_MNG); the racks (GB200, GB300) have theirs in
# separate trays, whose fabric manager isn't the compute node's.

_BRIDGE = "0x0680"
_MANAGEMENT = b"SW_MNG"
# device ids of B100, B200 and B300: only for these is the slow product data read
_BLACKWELL = ("0x29", "0x31")


class NvSwitch(NamedTuple):
    """A switch on the PCI bus, or the network card that manages one. `driver` is the kernel's, if any."""

    address: str
    driver: str | None


def read_switches(host: Host, gpus: tuple[PciGpu, ...]) -> tuple[NvSwitch, ...]:
    """Those that this node's fabric manager configures; ones reserved for a virtual machine are left out."""
    if not gpus:
        return ()
    switches = []
    for address in host.listdir(DEVICES):
        place = f"{DEVICES}/{address}"
        with suppress(GpunodeError):
            is_bridge = (host.read_text(f"{place}/class") or "").startswith(_BRIDGE)
            if is_bridge and (host.read_text(f"{place}/vendor") or "").strip() == NVIDIA:
                switches.append(NvSwitch(address, driver_of(host, place)))
    if not switches and any(gpu.device_id.startswith(_BLACKWELL) for gpu in gpus):
        for name in host.listdir(INFINIBAND):
            # `Unreadable` without root: only root may read a card's product data
            if _MANAGEMENT in (host.read_bytes(f"{INFINIBAND}/{name}/device/vpd") or b""):
                switches.append(NvSwitch(name, "mlx5_core"))
    return tuple(switch for switch in switches if switch.driver != "vfio-pci")
