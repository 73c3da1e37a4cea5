"""Which GPUs there are, asked again and again, in a child process: NVML may hang, and must hang nobody else.

A failure of NVML that it names itself (driver not loaded, library mismatch) makes every GPU unhealthy at
once, as no new container could start. A probe that ends without an answer may be this node's bad moment, so
that takes two running; after time-outs the next question comes later and later, as a child stuck in the
driver can't even be killed. What stays missing is looked for more and more rarely, down to the regular pace.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event

from gpunode.gpu.isolated import NvmlProbe
from gpunode.gpu.model import Inventory
from gpunode.host import Host
from gpunode.plugin.devices import Device, DeviceTable, HealthChange
from gpunode.plugin.logfmt import Log, OnChange
from gpunode.plugin.settings import Settings

_UNSURE_SECONDS = 5.0  # while there is no GPU, or one is missing
_LOOK_SECONDS = 2.0  # how soon a driver that was just loaded is noticed
_LONGEST_SECONDS = 600.0


class Discovery:
    """Feeds the table. `probe` is `gpunode.gpu.isolated.probe`, which also answers from recordings."""

    def __init__(
        self,
        host: Host,
        settings: Settings,
        table: DeviceTable,
        log: Log,
        probe: Callable[[Host, float], NvmlProbe],
    ) -> None:
        self._host = host
        self._settings = settings
        self._table = table
        self._log = log
        self._say = OnChange(log)
        self._probe = probe
        self._unanswered = 0
        self._timeouts = 0
        self._soon = Event()
        self._known = 0
        self._unchanged = 0
        self._left_out: dict[int, str] = {}
        self.waiting = "waiting for the NVIDIA driver"

    def run(self, stop: Event) -> None:
        """Look until `stop`."""
        while not stop.is_set():
            self._soon.clear()
            before = self._traces()
            self.look()
            self._pause(stop, before)

    def hurry(self) -> None:
        """Look again now: something happened that may concern a GPU."""
        self._soon.set()

    def look(self) -> None:
        """Ask NVML once and feed the table."""
        before = (self.waiting, self._table.snapshot().devices)
        seen = self._probe(self._host, self._settings.probe_seconds)
        self._timeouts = self._timeouts + 1 if seen.timed_out else 0
        if seen.inventory is not None:
            self._unanswered = 0
            changes = self._table.sighting(seen.inventory)
            reason = self._leave_out(seen.inventory)
        else:
            self._unanswered += 1
            reason = _why(seen)
            sure = seen.code is not None or self._unanswered > 1
            changes = self._table.all_missing(reason) if sure else ()
        log_changes(self._log, changes)
        self._report(reason)
        same = (self.waiting, self._table.snapshot().devices) == before
        self._unchanged = self._unchanged + 1 if same else 0

    def _leave_out(self, inventory: Inventory) -> str:
        """Tell of GPUs that can't be advertised; why there is none at all, empty if there is one."""
        devices = self._table.snapshot().devices
        found = left_out(inventory, devices)
        for index, why in found.items():
            if self._left_out.get(index) != why:
                self._log.error("GPU is not advertised", index=index, reason=why)
        self._left_out = found
        if devices:
            return ""
        return "; ".join(f"GPU {index}: {why}" for index, why in found.items()) or "NVML lists no GPU"

    def _report(self, reason: str) -> None:
        devices = self._table.snapshot().devices
        if reason:
            what = "NVML is broken" if devices else "waiting for the NVIDIA driver"
            self.waiting = f"{what}: {reason}"
            self._say.warning(self.waiting, hint="gpunode doctor")
            return
        self.waiting = ""
        self._say.reset()
        if len(devices) != self._known:
            self._known = len(devices)
            self._log.info("GPUs found", count=len(devices), healthy=sum(item.healthy for item in devices))

    def _pause(self, stop: Event, before: object) -> None:
        """Wait for the next time to look; cut short by `hurry`, `stop`, or a driver that comes or goes."""
        deadline = self._host.monotonic() + self._interval()
        while not stop.is_set() and not self._soon.is_set():
            left = deadline - self._host.monotonic()
            if left <= 0 or self._soon.wait(min(left, _LOOK_SECONDS)):
                return
            if not self._timeouts and self._traces() != before:
                return

    def _interval(self) -> float:
        regular = self._settings.rediscover_seconds
        if self._timeouts:
            return min(max(regular, _UNSURE_SECONDS) * 2.0**self._timeouts, _LONGEST_SECONDS)
        devices = self._table.snapshot().devices
        if self.waiting or any(device.missing for device in devices):
            return min(regular, _UNSURE_SECONDS * 2.0 ** min(self._unchanged, 20))
        return regular

    def _traces(self) -> object:
        """What a loaded driver leaves in /dev and /proc; cheap to read and no question to the driver."""
        nodes = [name for name in self._host.listdir("/dev") if name.startswith("nvidia")]
        return (nodes, self._host.listdir("/proc/driver/nvidia/gpus"))


def left_out(inventory: Inventory, devices: tuple[Device, ...]) -> dict[int, str]:
    """By index, why a GPU that NVML lists is none of `devices`: it told no UUID, or that of another one."""
    known = {device.index for device in devices}
    addresses = {device.pci for device in devices}
    first: dict[str, int] = {}
    found = {}
    for gpu in inventory.gpus:
        if not gpu.uuid:
            if gpu.index not in known and gpu.pci not in addresses:
                found[gpu.index] = gpu.error or "NVML tells no UUID"
        elif first.setdefault(gpu.uuid, gpu.index) != gpu.index:
            found[gpu.index] = f"NVML gives it the UUID of GPU {first[gpu.uuid]}, {gpu.uuid}"
    return found


def log_changes(log: Log, changes: tuple[HealthChange, ...]) -> None:
    """One line for each GPU that failed or healed."""
    for change in changes:
        if change.problem:
            log.error(
                "GPU is unhealthy", device=change.device.id, index=change.device.index, reason=change.problem
            )
        else:
            log.info("GPU is healthy again", device=change.device.id, index=change.device.index)


def _why(seen: NvmlProbe) -> str:
    if seen.timed_out:
        return f"NVML did not answer within {seen.seconds:.0f} s"
    return seen.message or "NVML gave no answer"
