"""READY, STATUS and the watchdog, as sd_notify(3) and sd_watchdog_enabled(3) have them."""

from __future__ import annotations

import os

from gpunode.host import Host
from gpunode.plugin.logfmt import Log, OnChange


class Systemd:
    """The service manager, if there is one."""

    def __init__(self, host: Host, log: Log) -> None:
        self._host = host
        self._say = OnChange(log)
        self._status = ""
        self._next_sign = 0.0
        mine = host.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        limit = host.environ.get("WATCHDOG_USEC", "")
        self._interval = int(limit) / 2e6 if mine and limit.isdecimal() else 0.0

    def report(self, status: str) -> None:
        """Called often; tells a new status, and that we live when it is time to."""
        if status != self._status:
            self._status = status
            self.tell(f"STATUS={status}")
        if self._interval and self._host.monotonic() >= self._next_sign:
            self._next_sign = self._host.monotonic() + self._interval
            self.tell("WATCHDOG=1")

    def tell(self, message: str) -> None:
        try:
            self._host.notify(message)
        except OSError as error:
            self._say.warning("systemd can't be told", reason=error.strerror or str(error))
