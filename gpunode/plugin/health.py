"""Health by NVML events: which of them condemn a GPU, and the thread that waits for them.

The thread calls NVML in this process, as events are of no use elsewhere; should NVML hang, only this thread
does.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from threading import Event

from gpunode.errors import GpunodeError
from gpunode.gpu.events import EventSet, GpuEvent
from gpunode.gpu.nvml import Nvml, NvmlError
from gpunode.gpu.nvml_errors import VERSION_MISMATCH
from gpunode.plugin.devices import DeviceTable
from gpunode.plugin.discovery import log_changes
from gpunode.plugin.logfmt import Log, OnChange, Rarely

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
_LONGEST_RETRY_SECONDS = 60.0
_STEADY_WAITS = 60  # after which earlier failures are forgotten
_MISMATCHES = 3  # in a row, while the GPUs are seen by a fresh process: it must be the library in this one
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
        self._failures = 0
        self._mismatches = 0
        self._told: object = None
        self._rarely = Rarely()

    def run(self, stop: Event) -> None:
        """Watch until `stop`. An error of NVML marks nothing: everything is opened again, after a while.

        `GpunodeError` if the driver was replaced: a loaded library can't be exchanged within a process.
        """
        while not stop.is_set():
            if not self._watchable():
                self._mismatches = 0
                stop.wait(_WAIT_SECONDS)
                continue
            try:
                with self._open() as nvml:
                    self._watch(nvml, stop)
            except NvmlError as error:
                self._say.warning("health events can't be watched, trying again", reason=str(error))
                self._hurry()
                stop.wait(self._pause_after(error))

    def _pause_after(self, error: NvmlError) -> float:
        """Seconds until the next try, ever longer."""
        self._mismatches = self._mismatches + 1 if error.code == VERSION_MISMATCH else 0
        if self._mismatches >= _MISMATCHES:
            raise GpunodeError(
                "the driver was replaced while the plugin ran, and the plugin still holds the old library",
                hint="start the plugin again (systemd does it by itself)",
                code="driver-replaced",
            )
        self._failures = min(self._failures + 1, 10)
        return min(self._retry_seconds * 2.0 ** (self._failures - 1), _LONGEST_RETRY_SECONDS)

    def _watch(self, nvml: Nvml, stop: Event) -> None:
        watched = self._watchable()
        events = nvml.watch_events(watched)
        try:
            self._mismatches = 0
            self._tell(watched, events)
            if events.failed:
                self._hurry()
            for number in range(_TRY_FAILED_AFTER) if events.failed else count():
                if number == _STEADY_WAITS:
                    self._recovered()
                if stop.is_set() or self._watchable() != watched:
                    return
                event = events.wait(_WAIT_SECONDS)
                if event is not None:
                    self.take(event)
        finally:
            events.close()

    def _recovered(self) -> None:
        if self._failures:
            self._log.info("health events are watched again")
        self._failures = 0
        self._say.reset()

    def _tell(self, watched: tuple[str, ...], events: EventSet) -> None:
        """Which GPUs are watched and which can't be; not again while that stays so."""
        failed = {device_id: str(error) for device_id, error in events.failed.items()}
        state = (watched, events.unsupported, failed)
        if state == self._told:
            return
        self._told = state
        for device_id in events.unsupported:
            self._log.warning("this GPU reports no health events", device=device_id)
        self._log.info("watching health events", count=len(watched) - len(events.unsupported) - len(failed))
        for device_id, reason in failed.items():
            self._log.warning("this GPU's events can't be watched", device=device_id, reason=reason)

    def take(self, event: GpuEvent) -> None:
        """Judge one event. One whose GPU can't be told condemns none; discovery is asked to look instead."""
        reason = condemning(event)
        if reason and self._table.snapshot().find(event.uuid) is not None:
            log_changes(self._log, self._table.event(event.uuid, reason))
            return
        times = self._rarely.times((event.kind, event.uuid, event.xid))
        if not times:
            return
        if reason:
            device = event.uuid or "unknown"
            self._log.error("health event of an unknown GPU", device=device, reason=reason, times=times)
            self._hurry()
        else:
            xid = event.xid or 0
            self._log.info("ignored GPU event", kind=event.kind, device=event.uuid, xid=xid, times=times)

    def _watchable(self) -> tuple[str, ...]:
        """Every GPU that NVML lists; a missing one would make registering for its events fail."""
        return tuple(device.id for device in self._table.snapshot().devices if not device.missing)
