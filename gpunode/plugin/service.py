"""systemd and the services: what they report to it, and the unit file of `plugin serve`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpunode.cdi.refresh import program
from gpunode.host import Host
from gpunode.plugin.logfmt import Log, OnChange


class Systemd:
    """The service manager, if there is one: READY, STATUS and the watchdog, as in sd_notify(3) and
    sd_watchdog_enabled(3)."""

    def __init__(self, host: Host, log: Log) -> None:
        self._host = host
        self._say = OnChange(log)
        self._status = ""
        self._next_sign = 0.0
        is_watched = host.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        limit = host.environ.get("WATCHDOG_USEC", "")
        self._interval = int(limit) / 2e6 if is_watched and limit.isdecimal() else 0.0

    def report(self, status: str) -> None:
        """Called often; sends a new status to systemd, and the watchdog ping when it is due."""
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
            self._say.warning("systemd can't be notified", reason=error.strerror or str(error))


# The plugin's systemd unit as written to a node: the packaged one with that node's program.

UNIT = "gpunode-device-plugin.service"
UNIT_FILE = f"/etc/systemd/system/{UNIT}"
MARKER = "# Made by gpunode (gpunode setup --kubernetes). Settings go into /etc/gpunode/env, not in here."
_PACKAGED = Path(__file__).parent / UNIT
_START = "ExecStart=/usr/local/bin/gpunode plugin serve\n"
# what ProtectHome=yes hides from a service (systemd.exec(5))
_HIDDEN = ("/home/", "/root/", "/run/user/")


@dataclass(frozen=True)
class UnitFile:
    """The unit's file on a node: None if there is none. `ours` if gpunode wrote it."""

    content: bytes | None

    @property
    def ours(self) -> bool:
        return self.content is not None and self.content.startswith(MARKER.encode())


def find_unit(host: Host) -> UnitFile:
    """The file in /etc/systemd/system, also if gpunode didn't write it."""
    return UnitFile(host.read_bytes(UNIT_FILE))


def unit_text(host: Host, arguments: Sequence[str] = ()) -> str:
    """The whole unit; `arguments` are options of `plugin serve`, words that systemd reads unchanged."""
    _, _, body = _PACKAGED.read_text().partition("\n\n")  # the comment before it explains copying
    words = " ".join((program(host), "plugin", "serve", *arguments))
    before, marker, after = body.partition(_START)
    assert marker, "the packaged unit starts something else"
    return f"{MARKER}\n\n{before}ExecStart={words}\n{after}"


def hidden_program(host: Host) -> str:
    """This gpunode's directory if the service couldn't see it; else empty."""
    if not host.live:
        return ""
    own = (sys.executable, str(Path(sys.executable).resolve()), sys.prefix + "/")
    return next((path for path in own if re.match("|".join(_HIDDEN), path)), "")
