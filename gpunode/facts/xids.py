"""XIDs, the NVIDIA driver's reports of GPU errors: their lines in the kernel log, and each code's meaning."""

from __future__ import annotations

import re
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

from gpunode.facts.kernel_log import KernelLine
from gpunode.facts.tables import table

# The lines of the kernel's log.

_MARK = "NVRM: Xid ("
_LOST = "fallen off the bus"
# NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.
_XID = r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]{5,16})\)[^:]*: (\d{1,5})(?!\d)"
_PLACE = r"NVRM: GPU (?:at )?(?:PCI:)?((?:[0-9a-fA-F]{4,8}:)[0-9a-fA-F]{2}:[0-9a-fA-F]{2})"
_XID_LOST = 79


class XidLine(NamedTuple):
    """One XID. `address` is the GPU's as sysfs spells it, `text` the whole line, `seconds` since the boot."""

    seconds: float
    address: str
    number: int
    text: str


def xid_lines(log: tuple[KernelLine, ...]) -> tuple[XidLine, ...]:
    """Oldest first. Such a line contains a program's name, so only its beginning is trusted."""
    lines = []
    for line in log:
        if not line.text.startswith(_MARK):
            continue
        match = re.match(_XID, line.text)
        if match is not None:
            lines.append(XidLine(line.seconds, address_of(match[1]), int(match[2]), line.text.strip()))
    return tuple(lines)


def fallen_off(log: tuple[KernelLine, ...]) -> tuple[XidLine, ...]:
    """Lines that report that a GPU fell off the bus, including XID 79."""
    lines = [line for line in xid_lines(log) if line.number == _XID_LOST]
    for line in log:
        if line.text.startswith("NVRM: GPU ") and _LOST in line.text:
            match = re.match(_PLACE, line.text)
            if match is not None:
                lines.append(XidLine(line.seconds, address_of(match[1]), _XID_LOST, line.text.strip()))
    return tuple(lines)


def address_of(text: str) -> str:
    """``0000:3b:00.0`` from what the driver writes: ``0000:3B:00``, ``00000000:3b:00.0``, ``3b:00``."""
    parts = text.lower().partition(".")[0].split(":")
    domain = parts[0] if len(parts) == 3 else "0000"
    short = domain[-4:] if len(domain) == 8 and domain.startswith("0000") else domain
    return f"{short}:{':'.join(parts[-2:])}.0"


# NVIDIA's XIDs: the meaning of each, and what restores a GPU after it.
#
# After the XID catalogue in NVIDIA's "Xid Errors" (docs.nvidia.com/deploy/xid-errors, "Analyzing Xid Errors
# with the Xid Catalog", October 2025: Ampere and newer), whose resolution buckets became classes:
#
# - RESTART_APP -> application; RESTART_APP of a contained memory error -> restart-app; IGNORE -> ignore
# - RESET_GPU -> reset; RESTART_BM and RESTART_VM -> reboot; CHECK_MECHANICALS -> hardware
# - CONTACT_SUPPORT, the workflows, UPDATE_SWFW, CHECK_UVM and none -> by-driver: the driver's recovery action
# decides, as NVIDIA asks for. The codes that newer GPUs don't use have their older meaning.
#
# The codes are in tables/xids.json. docs/health.md lists the differences to NVIDIA's device plugin, which
# counts every XID but 13, 31, 43, 45, 68 and 109.

APPLICATION, IGNORE, RESTART_APP = "application", "ignore", "restart-app"
BY_DRIVER, RESET, REBOOT, HARDWARE = "by-driver", "reset", "reboot", "hardware"

NOT_COUNTED = frozenset({109})
"""Beside application and ignore. 109 needs a reset by the catalogue, but mostly a program has caused it and
NVIDIA's plugin ignores it; where the driver does ask for a reset, the recovery action tells."""


class Xid(NamedTuple):
    """One code. With `whole` it concerns the GPU, whichever MIG instance the line names."""

    number: int
    meaning: str
    kind: str
    whole: bool = False

    @property
    def counts(self) -> bool:
        """Whether it makes a device unhealthy unless the settings say otherwise."""
        return self.kind not in (APPLICATION, IGNORE) and self.number not in NOT_COUNTED

    @property
    def text(self) -> str:
        """Text for users: ``XID 79: the GPU has fallen off the bus``."""
        return f"XID {self.number}: {self.meaning}" if self.meaning else f"XID {self.number}"


def xid(number: int) -> Xid:
    """The catalogue's entry; an unknown code counts, and ends when the driver's recovery action says so."""
    return catalogue().get(number) or Xid(number, "", BY_DRIVER)


@cache
def catalogue() -> MappingProxyType[int, Xid]:
    """Every documented code."""
    result = {}
    for number, kind, extent, meaning in table("xids").rows:
        result[number] = Xid(number, meaning, kind, extent == "gpu")
    return MappingProxyType(result)
