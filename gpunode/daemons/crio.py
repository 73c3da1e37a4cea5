"""CRI-O's running configuration, over HTTP on its socket."""

from __future__ import annotations

from typing import Any

from gpunode.daemons.http import UnixHttp
from gpunode.errors import DaemonError
from gpunode.host import Host
from gpunode.output.typed import toml

ANSWER_SECONDS = 10.0
_HINTS = {
    "absent": "start CRI-O: systemctl start crio",
    "refused": "no process listens on the socket: systemctl restart crio",
    "denied": "run as root, for example with sudo",
    "timeout": "the daemon hangs: journalctl -u crio -n 50",
}


def running_config(host: Host, socket: str, timeout: float = ANSWER_SECONDS) -> dict[str, Any]:
    """The running daemon's configuration, its files and flags merged; `DaemonError` if it doesn't report it.

    CRI-O serves it as TOML over HTTP at ``/config``, beside the CRI's gRPC on one socket (server/inspect.go;
    ``crio status`` requests the same).
    """
    http = UnixHttp(host, socket, _HINTS, "journalctl -u crio -n 50")
    if host.live:
        text = http.response("GET", "/config", timeout=timeout).body.decode("utf-8", "replace")
        host.heard("daemons", socket, {"config": text})
    else:
        text = http.recall("config", str)
    try:
        return toml(text)
    except (ValueError, RecursionError) as error:
        raise DaemonError(
            f"{socket} returned invalid TOML for /config: {error}",
            hint=f"find the process that listens on it: ss -xlp src {socket}",
            code="malformed",
        ) from error
