"""`gpunode plugin serve`: the device plugin in the foreground, until SIGTERM, Ctrl-C or `stop`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from threading import Event, current_thread, main_thread
from types import FrameType
from typing import TYPE_CHECKING

from gpunode.host import Host
from gpunode.result import Progress, Result, Text

if TYPE_CHECKING:
    from gpunode.plugin.model import Device

_POLL_SECONDS = 0.25


@dataclass(frozen=True)
class Options:
    """See `gpunode.plugin.settings.Settings` for what the fields mean."""

    kubelet_socket: str = "/var/lib/kubelet/device-plugins/kubelet.sock"
    resource_name: str = "nvidia.com/gpu"
    rediscover_seconds: float = 30.0


def run(host: Host, options: Options, progress: Progress, stop: Event | None = None) -> Result:
    """Serve until told to stop. Logs go to stderr, one logfmt line each; `progress` has nothing to add.

    `PreconditionError` if it can't serve at all: not root, or another plugin is on the same socket. A missing
    driver, GPU or kubelet is waited for.
    """
    from gpunode.plugin.compose import make_service
    from gpunode.plugin.logfmt import LogfmtLog
    from gpunode.plugin.settings import Settings

    log = LogfmtLog(sys.stderr, host.environ)
    service = make_service(host, Settings(**asdict(options)), log)
    with _until_signal() as asked:
        service.start()
        while service.running and not asked and not (stop is not None and stop.is_set()):
            (stop or asked.never).wait(_POLL_SECONDS)
        service.stop()
        service.join()
    for name in asked:
        log.info("stopped", signal=name)
    snapshots = service.snapshots
    return Result(
        "PluginRun",
        {
            "resource": options.resource_name,
            "devices": [_told(device) for one in snapshots.values() for device in one.devices],
            "resources": [
                {"name": name, "devices": [_told(device) for device in one.devices]}
                for name, one in snapshots.items()
            ],
            "registrations": service.registrations,
        },
        blocks=tuple(Text(f"served {len(one.devices)} {name}") for name, one in snapshots.items()),
    )


def _told(device: Device) -> dict[str, object]:
    return {
        "id": device.id,
        "index": device.unit.index,
        "healthy": device.healthy,
        "problem": device.problem.reason if device.problem else "",
    }


class _Asked(list[str]):
    """The signals that came. A handler that set an Event the main thread waits for could deadlock."""

    def __init__(self) -> None:
        super().__init__()
        self.never = Event()


@contextmanager
def _until_signal() -> Iterator[_Asked]:
    """Collect SIGTERM and SIGINT instead of dying of them; only the main thread can."""
    asked = _Asked()
    if current_thread() is not main_thread():
        yield asked
        return

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(signal.Signals(number).name)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
