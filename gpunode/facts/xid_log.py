"""XIDs in the kernel's log: the driver's own account of what went wrong with which GPU."""

from __future__ import annotations

import re

from gpunode.dataclass import dataclass
from gpunode.facts.kernel_log import KernelLine

_MARK = "NVRM: Xid ("
_LOADING = "NVRM: loading NVIDIA UNIX"  # proprietary and open modules alike
_LOST = "fallen off the bus"
# NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.
_XID = r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]{5,16})\)[^:]*: (\d{1,5})(?!\d)"
_PLACE = r"NVRM: GPU (?:at )?(?:PCI:)?((?:[0-9a-fA-F]{4,8}:)[0-9a-fA-F]{2}:[0-9a-fA-F]{2})"
_XID_LOST = 79


@dataclass(frozen=True)
class XidLine:
    """One XID. `address` is the GPU's as sysfs spells it, `text` the whole line, `seconds` since the boot."""

    seconds: float
    address: str
    number: int
    text: str


def xid_lines(log: tuple[KernelLine, ...]) -> tuple[XidLine, ...]:
    """Oldest first. A program's name stands in such a line, so that only its beginning is believed."""
    found = []
    for line in log:
        if not line.text.startswith(_MARK):
            continue
        match = re.match(_XID, line.text)
        if match is not None:
            found.append(XidLine(line.seconds, address_of(match[1]), int(match[2]), line.text.strip()))
    return tuple(found)


def fallen_off(log: tuple[KernelLine, ...]) -> tuple[XidLine, ...]:
    """The lines that say of a GPU that it has fallen off the bus, XID 79 among them."""
    found = [line for line in xid_lines(log) if line.number == _XID_LOST]
    for line in log:
        if line.text.startswith("NVRM: GPU ") and _LOST in line.text:
            match = re.match(_PLACE, line.text)
            if match is not None:
                found.append(XidLine(line.seconds, address_of(match[1]), _XID_LOST, line.text.strip()))
    return tuple(found)


def last_load(log: tuple[KernelLine, ...]) -> float:
    """When the driver was last loaded, in seconds since the boot; 0 if the log doesn't go back that far."""
    return max((line.seconds for line in log if line.text.startswith(_LOADING)), default=0.0)


def address_of(text: str) -> str:
    """``0000:3b:00.0`` from what the driver writes: ``0000:3B:00``, ``00000000:3b:00.0``, ``3b:00``."""
    parts = text.lower().partition(".")[0].split(":")
    domain = parts[0] if len(parts) == 3 else "0000"
    short = domain[-4:] if len(domain) == 8 and domain.startswith("0000") else domain
    return f"{short}:{':'.join(parts[-2:])}.0"
