"""Virtual GPUs, as a guest sees them in the PCI configuration space of its devices.

A vGPU has a vendor-specific capability (PCI Local Bus Specification 3.0, appendix H) with the mark ``VF``
followed by records, of which number 0 has the host's driver (read by NVIDIA's GPU feature discovery, too).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpunode.errors import GpunodeError
from gpunode.facts.pci import DEVICES, NVIDIA
from gpunode.host import Host

_WHOLE = 256  # bytes; an unprivileged user can read only the first 64
_STATUS, _HAS_CAPABILITIES, _FIRST_CAPABILITY = 0x06, 0x10, 0x34
_VENDOR_SPECIFIC = 0x09
_MARK, _RECORDS = b"VF", 5
_TEXT = 10  # bytes of the driver's version, and then of its branch


@dataclass(frozen=True)
class VirtualGpu:
    """The host's driver that created it; empty if the capability doesn't contain it."""

    host_driver_version: str = ""
    host_driver_branch: str = ""


def read_vgpus(host: Host) -> tuple[VirtualGpu, ...] | None:
    """The vGPUs of this machine, by PCI address; None if unknown: not root, or no PCI bus."""
    if not host.is_dir(DEVICES):
        return None
    found, hidden = [], False
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
        found += [seen] if seen else []
    return None if hidden and not found else tuple(found)


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
