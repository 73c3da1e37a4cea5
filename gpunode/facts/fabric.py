"""The fabric manager: whether it runs, its version, and its log since its last start."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from gpunode.errors import GpunodeError
from gpunode.facts.driver import has_module_file, modules_dep, version_numbers
from gpunode.facts.packages import Packages
from gpunode.facts.pci import DEVICES, NVIDIA, PciGpu, driver_of
from gpunode.host import Host

LOG = "/var/log/fabricmanager.log"
UNIT = "nvidia-fabricmanager.service"
PROGRAM = "nv-fabricmanager"
IB_UMAD = "ib_umad"
INFINIBAND = "/sys/class/infiniband"  # adapters for RDMA, InfiniBand and RoCE alike
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


def lacking(host: Host) -> tuple[tuple[str, str, str], ...]:
    """Requirements of the fabric manager of a Blackwell baseboard (its user guide) that are missing: path,
    its present state, and the package or module that fixes it."""
    result = []
    if not host.is_file(_SUBNET_MANAGER):
        result.append((_SUBNET_MANAGER, "not installed", "nvlsm"))
    if host.which("ibstat") is None:
        place, value = host.unsafe_program("ibstat") or ("ibstat", "not installed")
        result.append((place, value, "infiniband-diags"))
    if not host.is_dir(f"/sys/module/{IB_UMAD}"):
        result.append((f"/sys/module/{IB_UMAD}", "not loaded", IB_UMAD))
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


# Modules that let other devices access GPU memory: nvidia_peermem or DMA-BUF, nvidia_fs, gdrdrv.

_MODULES_LOAD = (
    "/etc/modules-load.d",
    "/run/modules-load.d",
    "/usr/lib/modules-load.d",
    "/lib/modules-load.d",
)
_DMABUF_KERNEL = (5, 12)  # CUDA's GPUDirect RDMA guide
_EXTRAS = (("GPUDirect Storage", "nvidia_fs", "nvidia-fs"), ("GDRCopy", "gdrdrv"))


def infiniband_cards(host: Host) -> tuple[str, ...]:
    """RDMA devices of mlx5_core's, such as ``mlx5_0``."""
    cards = []
    for name in host.listdir(INFINIBAND):
        with suppress(GpunodeError):
            if driver_of(host, f"{INFINIBAND}/{name}/device") == "mlx5_core":
                cards.append(name)
    return tuple(cards)


def infiniband_ports(host: Host, cards: tuple[str, ...]) -> tuple[str, ...]:
    """Active InfiniBand ports; an Ethernet port is often just the node's network."""
    ports = (port for card in cards for port in host.glob(f"{INFINIBAND}/{card}/ports", "*"))
    return tuple(
        port
        for port in ports
        if (host.read_text(f"{port}/link_layer") or "").strip() == "InfiniBand"
        and "ACTIVE" in (host.read_text(f"{port}/state") or "")
    )


def loaded_at_boot(host: Host, module: str) -> tuple[str, int] | None:
    """The file and line that makes systemd load it at boot (modules-load.d(5))."""
    spelled = (module, module.replace("-", "_"))
    for directory in _MODULES_LOAD:
        for path in host.glob(directory, "*.conf"):
            for number, line in enumerate((host.read_text(path) or "").splitlines(), 1):
                if line.strip() in spelled:
                    return path, number
    return None


def by_dmabuf(open_module: bool | None, kernel: str) -> bool:
    """Whether open modules and this kernel share GPU memory without nvidia_peermem. Unknown counts as yes."""
    numbers = tuple(version_numbers(kernel.partition("-")[0]))[:2]
    return open_module is not False and (not numbers or numbers >= _DMABUF_KERNEL)


def installed_extras(host: Host, kernel: str) -> Iterator[tuple[str, str, str]]:
    """What is installed for the running kernel: its name, its module, and the file that shows it."""
    for name, *files in _EXTRAS:
        if has_module_file(host, kernel, *files):
            yield name, files[0], modules_dep(kernel)


# Network adapters for RDMA, and how much memory a process may lock for them.


def rdma_adapters(host: Host) -> tuple[str, ...]:
    """Names such as mlx5_0."""
    return tuple(host.listdir(INFINIBAND))


def locked_memory(host: Host, pid: int) -> int | None:
    """Bytes that a process may lock (proc_pid_limits(5)); -1 without limit, None if unknown."""
    for line in (host.read_text(f"/proc/{pid}/limits") or "").splitlines():
        if line.startswith("Max locked memory"):
            soft = line.removeprefix("Max locked memory").split()[0:1]
            if soft == ["unlimited"]:
                return -1
            return int(soft[0]) if soft and soft[0].isdecimal() and len(soft[0]) < 21 else None
    return None
