"""XIDs that happened while nobody listened: between two children, the kernel's log has them.

The log's reader stands where the last child last said something, so all that comes after it is new; no clock
is compared. Lines are taken from the kernel itself only, whatever root's programs write there.
"""

from __future__ import annotations

import re
from contextlib import suppress

from gpunode._files import LogReader
from gpunode.gpu.events import GpuEvent
from gpunode.gpu.model import Inventory
from gpunode.gpu.traces import module
from gpunode.host import Host
from gpunode.plugin.logfmt import Log

_LOG = "/dev/kmsg"
_MOST = 256
# "<prefix>;NVRM: Xid (PCI:0000:3b:00 GPU-I:05 GPU-CI:00): 94, pid=...", kernel_rc.c of NVIDIA's open modules;
# the prefix is priority and facility, sequence number, microseconds, flags
_XID = re.compile(
    r"(?P<level>\d+),[^;]*;NVRM: Xid "
    r"\(PCI:(?P<domain>[0-9a-fA-F]{4,8}):(?P<slot>[0-9a-fA-F]{2}:[0-9a-fA-F]{2})"
    r"(?:\.[0-9])?(?: GPU-I:(?P<gi>\d+))?(?: GPU-CI:(?P<ci>\d+))?\): (?P<xid>\d{1,5}),"
)


class MissedXids:
    """For the thread that listens to the children."""

    def __init__(self, host: Host, log: Log) -> None:
        self._host = host
        self._log = log
        self._reader: LogReader | None = None
        self._reason = ""
        self._module = 0
        self._gap = False  # not before the first child: what was before the plugin is no news

    def open(self) -> None:
        """Begin here."""
        try:
            self._reader = LogReader(self._host.path(_LOG))
        except OSError as error:
            self._reason = error.strerror or str(error)
        self._module = module(self._host)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def heard(self) -> None:
        """A child lives and tells events: up to here nothing was missed."""
        if self._reader is not None:
            with suppress(OSError):
                self._reader.skip()

    def ended(self) -> None:
        """A child has ended."""
        self._gap = True
        self._module = module(self._host)

    def take(self, seen: Inventory) -> list[GpuEvent]:
        """What was missed of these GPUs. Nothing if the driver was loaded anew: that has reset them."""
        gap, self._gap = self._gap, False
        if self._reader is None:
            if gap and self._reason:
                self._log.info(
                    "XIDs while NVML was opened anew can't be looked up", log=_LOG, reason=self._reason
                )
                self._reason = ""
            return []
        if module(self._host) != self._module:
            self.heard()
            return []
        try:
            lines = list(self._reader.news())
        except OSError:
            return []
        gpus = {_place(gpu.pci): gpu.uuid for gpu in seen.gpus if gpu.uuid}
        events = [event for line in lines if (event := _event(line, gpus))]
        return list(dict.fromkeys(events))[:_MOST]


def _event(line: str, gpus: dict[tuple[int, str], str]) -> GpuEvent | None:
    found = _XID.match(line)
    if found is None or int(found["level"]) >> 3:  # a facility other than the kernel
        return None
    uuid = gpus.get((int(found["domain"], 16), found["slot"].lower()))
    if uuid is None:
        return None
    gi, ci = (int(found[name]) if found[name] else None for name in ("gi", "ci"))
    return GpuEvent("xid", uuid, int(found["xid"]), gi, ci)


def _place(pci: str) -> tuple[int, str]:
    """Domain, and bus with device, of an address such as 0000:3b:00.0."""
    domain, _, rest = pci.partition(":")
    try:
        return int(domain, 16), rest.partition(".")[0].lower()
    except ValueError:
        return -1, pci
