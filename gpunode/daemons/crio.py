"""CRI-O's own request over HTTP on the CRI socket: its running configuration.

CRI-O serves it beside the CRI's gRPC on one socket (server/inspect.go; ``crio status`` requests the same):
``/config`` is the daemon's configuration with its files and flags merged, as TOML.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpunode.daemons.http import UnixHttp
from gpunode.errors import DaemonError
from gpunode.host import Host
from gpunode.host.documents import toml

DEFAULT_SOCKET = "/var/run/crio/crio.sock"
_ANSWER_SECONDS = 10.0
_HINTS = {
    "absent": "start CRI-O: systemctl start crio",
    "refused": "no process listens on the socket: systemctl restart crio",
    "denied": "run as root, for example with sudo",
    "timeout": "the daemon hangs: journalctl -u crio -n 50",
}


@dataclass(frozen=True)
class CrioApi:
    """One CRI-O behind its socket."""

    host: Host
    socket: str = DEFAULT_SOCKET
    timeout: float = _ANSWER_SECONDS

    def config(self) -> dict[str, Any]:
        """The running configuration as a tree; `DaemonError` if the answer isn't TOML."""
        http = UnixHttp(self.host, self.socket, _HINTS, "journalctl -u crio -n 50")
        if self.host.live:
            text = http.response("GET", "/config", timeout=self.timeout).body.decode("utf-8", "replace")
            self.host.heard("daemons", self.socket, {"config": text})
        else:
            text = http.recall("config", str)
        try:
            return toml(text)
        except (ValueError, RecursionError) as error:
            raise DaemonError(
                f"{self.socket} returned invalid TOML for /config: {error}",
                hint=f"find the process that listens on it: ss -xlp src {self.socket}",
                code="malformed",
            ) from error
