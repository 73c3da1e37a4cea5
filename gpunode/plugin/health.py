"""Health by NVML events: which of them condemn a GPU, and the thread that waits for them.

The thread calls NVML in this process, as events are of no use elsewhere; should NVML hang, only this thread
does.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from threading import Event

from gpunode.gpu.events import GpuEvent
from gpunode.gpu.nvml import Nvml, NvmlError
from gpunode.plugin.devices import DeviceTable
from gpunode.plugin.discovery import log_changes
from gpunode.plugin.logfmt import Log, OnChange

# Faults of the application that ran, not of the GPU; the NVIDIA device plugin leaves out the same six.
APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})
_MEANINGS = {  # from NVIDIA's XID catalogue
    48: "double-bit ECC error",
    63: "row remapping or page retirement recorded",
    64: "row remapping or page retirement failed",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "the GPU's system processor does not answer",
    120: "error in the GPU's system processor",
}
_WAIT_SECONDS = 1.0
_RETRY_SECONDS = 5.0
_TRY_FAILED_AFTER = 60  # waits, after which a GPU that could not be watched is tried again


def condemning(event: GpuEvent) -> str:
    """Why this event makes its GPU unhealthy; empty if it doesn't."""
    if event.kind == "ecc-double":
        return "double-bit ECC error"
    if event.kind != "xid" or event.xid is None or event.xid in APPLICATION_XIDS:
        return ""
    meaning = _MEANINGS.get(event.xid, "")
    return f"XID {event.xid}: {meaning}" if meaning else f"XID {event.xid}"


class HealthMonitor:
    """Feeds the table with events. `hurry` asks for a rediscovery when NVML itself misbehaves."""

    def __init__(
        self,
        table: DeviceTable,
        log: Log,
        hurry: Callable[[], None],
        open_nvml: Callable[[], Nvml] = Nvml.open,
        retry_seconds: float = _RETRY_SECONDS,
    ) -> None:
        self._table = table
        self._log = log
        self._say = OnChange(log)
        self._hurry = hurry
        self._open = open_nvml
        self._retry_seconds = retry_seconds

    def run(self, stop: Event) -> None:
        """Watch until `stop`. An error of NVML marks nothing: everything is opened again, after a while."""
        while not stop.is_set():
            if not self._watchable():
                stop.wait(_WAIT_SECONDS)
                continue
            try:
                with self._open() as nvml:
                    self._watch(nvml, stop)
            except NvmlError as error:
                self._say.warning("health events can't be watched, trying again", reason=str(error))
                self._hurry()
                stop.wait(self._retry_seconds)

    def _watch(self, nvml: Nvml, stop: Event) -> None:
        watched = self._watchable()
        events = nvml.watch_events(watched)
        try:
            for device_id in events.unsupported:
                self._log.warning("this GPU reports no health events", device=device_id)
            self._log.info(
                "watching health events", count=len(watched) - len(events.unsupported) - len(events.failed)
            )
            for device_id, error in events.failed.items():
                self._log.warning("this GPU's events can't be watched", device=device_id, reason=str(error))
                self._hurry()
            self._say.reset()
            for _ in range(_TRY_FAILED_AFTER) if events.failed else count():
                if stop.is_set() or self._watchable() != watched:
                    return
                event = events.wait(_WAIT_SECONDS)
                if event is not None:
                    self.take(event)
        finally:
            events.close()

    def take(self, event: GpuEvent) -> None:
        """Judge one event. One whose GPU can't be told condemns none; discovery is asked to look instead."""
        reason = condemning(event)
        if not reason:
            self._log.info("ignored GPU event", kind=event.kind, device=event.uuid, xid=event.xid or 0)
        elif self._table.snapshot().find(event.uuid) is None:
            self._log.error("health event of an unknown GPU", device=event.uuid or "unknown", reason=reason)
            self._hurry()
        else:
            log_changes(self._log, self._table.event(event.uuid, reason))

    def _watchable(self) -> tuple[str, ...]:
        """Every GPU that NVML lists; a missing one would make registering for its events fail."""
        return tuple(device.id for device in self._table.snapshot().devices if not device.missing)
