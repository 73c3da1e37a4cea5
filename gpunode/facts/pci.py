"""NVIDIA GPUs on the PCI bus, from sysfs: available without any driver."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from gpunode.errors import GpunodeError
from gpunode.host import Host

DEVICES = "/sys/bus/pci/devices"
NVIDIA = "0x10de"
_GPU_CLASSES = ("0x0300", "0x0302")  # VGA controller, 3D controller
_AUDIO_CLASS = "0x0403"


class PciGpu(NamedTuple):
    """One display function. `driver` is the kernel driver bound to it, None if there is none; `display` is
    True for a VGA controller, which may drive a screen, False for a GPU without outputs (3D controller)."""

    address: str
    device_id: str
    driver: str | None
    numa: int | None
    display: bool = False

    @property
    def for_vms(self) -> bool:
        """Whether it is reserved for virtual machines: by vfio-pci, a variant of it (nvgrace-gpu-vfio-pci),
        or the stub driver before it."""
        return (self.driver or "").endswith("vfio-pci") or self.driver == "pci-stub"


def read_gpus(host: Host) -> tuple[PciGpu, ...]:
    """Every NVIDIA GPU, ordered by address; a function that vanishes meanwhile is left out, and so are the
    virtual functions that a vGPU host makes of a GPU."""
    gpus = []
    for address in host.listdir(DEVICES):
        place = f"{DEVICES}/{address}"
        if _word(host, f"{place}/vendor") != NVIDIA:
            continue
        kind = _word(host, f"{place}/class")
        if not kind.startswith(_GPU_CLASSES) or host.readlink(f"{place}/physfn") is not None:
            continue
        number, display = _word(host, f"{place}/device"), kind.startswith(_GPU_CLASSES[0])
        gpus.append(PciGpu(address, number, driver_of(host, place), _numa(host, place), display))
    return tuple(gpus)


def driver_of(host: Host, place: str) -> str | None:
    """The kernel driver of the device at this path in sysfs, None if it has none."""
    link = host.readlink(f"{place}/driver")
    return link.rstrip("/").rpartition("/")[2] if link else None


def display_cards(these: tuple[PciGpu, ...], gpus: tuple[PciGpu, ...]) -> bool:
    """Whether these GPUs drive displays, beside others without outputs."""
    return all(gpu.display for gpu in these) and any(not gpu.display for gpu in gpus)


def lone_audio(host: Host) -> tuple[str, ...]:
    """Audio functions of NVIDIA cards whose display function is missing."""
    result = []
    for address in host.listdir(DEVICES):
        place = f"{DEVICES}/{address}"
        if (
            _word(host, f"{place}/class").startswith(_AUDIO_CLASS)
            and _word(host, f"{place}/vendor") == NVIDIA
        ):
            result.append(address)
    return tuple(result)


def _word(host: Host, path: str) -> str:
    return host.text_or_empty(path).strip()  # a device that fell off the bus answers with an I/O error


def _numa(host: Host, place: str) -> int | None:
    text = _word(host, f"{place}/numa_node")
    # -1: the platform doesn't report it
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else None


# PCI Express of the GPUs: address windows, links, errors, bridges, and nearby memory nodes.
#
# All from sysfs (ABI/testing/sysfs-bus-pci); nothing here wakes a device that sleeps. An unreported value is
# None or absent, never zero.

NODES = "/sys/devices/system/node"
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.ASCII)
_WIDTHS = {"1", "2", "4", "8", "12", "16", "32"}  # a device that is off or lost answers 0, 63 or 255
# include/linux/ioport.h
_MEMORY, _UNSET = 0x200, 0x20000000
_BARS = 6  # the first lines of `resource`; the ROM and an SR-IOV function's windows follow
# include/uapi/linux/pci_regs.h
_EXTENDED, _ACS, _ACS_CONTROL = 0x100, 0x000D, 6
_ACS_REDIRECTS = 0x0004 | 0x0008  # request and completion redirect
_CONFIG_BYTES = 4096


class Bar(NamedTuple):
    """One memory window; `size` in bytes. `assigned` is False if the kernel found no address for it."""

    number: int
    size: int
    assigned: bool


class PcieLink(NamedTuple):
    """Lanes in use, lanes of the device, and lanes of the port above it (`port` is its address)."""

    width: int
    most: int
    port: str
    port_most: int


def memory_bars(host: Host, address: str) -> tuple[Bar, ...] | None:
    """The memory windows of a function; None if its `resource` can't be read or is incomplete."""
    lines = host.text_or_empty(f"{DEVICES}/{address}/resource").splitlines()
    if len(lines) < _BARS:
        return None
    bars = []
    for number, line in enumerate(lines[:_BARS]):
        words = line.split()
        if len(words) != 3 or not all(re.fullmatch(r"0x[0-9a-f]{1,16}", word, re.ASCII) for word in words):
            return None
        start, end, flags = (int(word, 16) for word in words)
        if flags & _MEMORY:
            bars.append(Bar(number, end - start + 1, start != 0 and not flags & _UNSET))
    return tuple(bars)


def without_window(host: Host, address: str) -> bool:
    """Whether the kernel found no address for one of a function's memory windows."""
    return any(not bar.assigned for bar in memory_bars(host, address) or ())


def bridges(host: Host, address: str) -> tuple[str, ...]:
    """Addresses of the ports above a function, the nearest first; () if sysfs doesn't show them."""
    parts = host.realpath(f"{DEVICES}/{address}").split("/")
    return tuple(part for part in reversed(parts[:-1]) if _ADDRESS.fullmatch(part))


def read_link(host: Host, address: str) -> PcieLink | None:
    """None unless both ends report their widths."""
    port = next(iter(bridges(host, address)), "")
    place = f"{DEVICES}/{address}"
    words = [_word(host, f"{place}/{name}") for name in ("current_link_width", "max_link_width")]
    words.append(_word(host, f"{_place(host, address, port)}/max_link_width") if port else "")
    if not set(words) <= _WIDTHS:
        return None
    width, most, port_most = (int(word) for word in words)
    return PcieLink(width, most, port, port_most)


def _place(host: Host, address: str, port: str) -> str:
    """The port's own directory, above that of the function."""
    real = host.realpath(f"{DEVICES}/{address}")
    return f"{real.partition(f'/{port}/')[0]}/{port}"


def error_counters(host: Host, address: str, kind: str) -> dict[str, int]:
    """Advanced error reporting since the boot, by error: `kind` is correctable, nonfatal or fatal. {} if the
    function or the kernel doesn't count (ABI/testing/sysfs-bus-pci-devices-aer_stats)."""
    counters = {}
    for line in host.text_or_empty(f"{DEVICES}/{address}/aer_dev_{kind}").splitlines():
        name, _, number = line.rpartition(" ")
        if name and number.isascii() and number.isdigit() and len(number) < 20:
            counters[name.strip()] = int(number)
    return counters


def redirecting_bridges(host: Host, address: str) -> tuple[str, ...]:
    """Ports above a function whose Access Control Services redirect traffic between devices to the root.

    Only root may read the extended configuration space; () where it can't be read.
    """
    return tuple(port for port in bridges(host, address) if _redirects(_config(host, address, port)))


def _config(host: Host, address: str, port: str) -> bytes:
    try:
        return host.read_bytes(f"{_place(host, address, port)}/config") or b""
    except GpunodeError:
        return b""


def _redirects(config: bytes) -> bool:
    position, seen = _EXTENDED, set()
    while len(config) >= _CONFIG_BYTES and _EXTENDED <= position <= len(config) - 8 and position not in seen:
        seen.add(position)
        header = int.from_bytes(config[position : position + 4], "little")
        if header & 0xFFFF == _ACS:
            control = config[position + _ACS_CONTROL : position + _ACS_CONTROL + 2]
            return bool(int.from_bytes(control, "little") & _ACS_REDIRECTS)
        position = header >> 20
    return False


def processor_nodes(host: Host) -> tuple[int, ...]:
    """NUMA nodes that have processors; () if the kernel doesn't report them."""
    return _numbers(_word(host, f"{NODES}/has_cpu"))


def memory_only_nodes(host: Host) -> tuple[int, ...]:
    """NUMA nodes with memory and without processors: a coherent GPU's memory, or memory behind CXL."""
    processors = set(processor_nodes(host))
    memory = _numbers(_word(host, f"{NODES}/has_memory"))
    return tuple(node for node in memory if node not in processors) if processors else ()


def _numbers(text: str) -> tuple[int, ...]:
    """``0-1,4`` as numbers."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if all(word.isascii() and word.isdigit() and len(word) < 5 for word in (first, last or first)):
            numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)


# Virtual GPUs, as a guest sees them in the PCI configuration space of its devices.
#
# A vGPU has a vendor-specific capability (PCI Local Bus Specification 3.0, appendix H) with the mark ``VF``
# followed by records, of which number 0 has the host's driver (read by NVIDIA's GPU feature discovery, too).

_WHOLE = 256  # bytes; an unprivileged user can read only the first 64
_STATUS, _HAS_CAPABILITIES, _FIRST_CAPABILITY = 0x06, 0x10, 0x34
_VENDOR_SPECIFIC = 0x09
_MARK, _RECORDS = b"VF", 5
_TEXT = 10  # bytes of the driver's version, and then of its branch


class VirtualGpu(NamedTuple):
    """The host's driver that created it; empty if the capability doesn't contain it."""

    host_driver_version: str = ""
    host_driver_branch: str = ""


def read_vgpus(host: Host) -> tuple[VirtualGpu, ...] | None:
    """The vGPUs of this machine, by PCI address; None if unknown: not root, or no PCI bus."""
    if not host.is_dir(DEVICES):
        return None
    vgpus, hidden = [], False
    for address in sorted(host.listdir(DEVICES)):
        place = f"{DEVICES}/{address}"
        try:
            if (host.read_text(f"{place}/vendor") or "").strip() != NVIDIA:
                continue
            data = host.read_bytes(f"{place}/config") or b""
        except GpunodeError:
            data = b""
        hidden = hidden or len(data) < _WHOLE
        seen = parse_config_space(data)
        vgpus += [seen] if seen else []
    return None if hidden and not vgpus else tuple(vgpus)


def parse_config_space(data: bytes) -> VirtualGpu | None:
    """A device's configuration space: the vGPU that it is, None for any other device. Pure."""
    data = data[:_WHOLE]
    for start in _capabilities(data):
        capability = data[start : start + data[start + 2]] if start + 2 < len(data) else b""
        if capability[3:_RECORDS] == _MARK:
            return _host_driver(capability)
    return None


def _capabilities(data: bytes) -> Iterator[int]:
    """Offsets of the vendor-specific ones; a circular list ends."""
    if len(data) < _WHOLE or not data[_STATUS] & _HAS_CAPABILITIES:
        return
    seen: set[int] = set()
    at = data[_FIRST_CAPABILITY] & 0xFC
    while at and at not in seen and at + 1 < len(data):
        seen.add(at)
        if data[at] == _VENDOR_SPECIFIC:
            yield at
        at = data[at + 1] & 0xFC


def _host_driver(capability: bytes) -> VirtualGpu:
    at = _RECORDS
    while at + 1 < len(capability) and capability[at]:  # a record is its number, its length, its data
        if capability[at + 1] < 2:
            return VirtualGpu()
        at += capability[at + 1]
    texts = capability[at + 2 : at + 2 + 2 * _TEXT]
    if len(texts) < 2 * _TEXT:
        return VirtualGpu()
    return VirtualGpu(*(_text(part) for part in (texts[:_TEXT], texts[_TEXT:])))


def _text(data: bytes) -> str:
    return data.strip(b"\0").decode("ascii", "replace").strip()
