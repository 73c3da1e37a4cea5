"""The way to a running simulated plugin: a unix socket, one JSON line for each fault, one for each answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpunode.errors import DaemonError, GpunodeError, PreconditionError
from gpunode.host import Host
from gpunode.plugin.simulate.faults import Fault, parse_fault

if TYPE_CHECKING:
    import socket

_LONGEST = 4096
_CLIENT_SECONDS = 1.0
_ANSWER_SECONDS = 10.0


def socket_path(state_dir: str) -> str:
    """Where a simulated plugin listens for faults."""
    return f"{state_dir.rstrip('/')}/simulated.sock"


class Control:
    """The listening end, one thread's own. `apply` lets a fault happen."""

    def __init__(self, host: Host, state_dir: str, apply: Callable[[Fault], None]) -> None:
        self._host = host
        self._apply = apply
        self.path = socket_path(state_dir)
        host.make_dirs(state_dir, 0o755)
        self._listening = host.listen_unix(self.path)

    def serve(self, seconds: float) -> None:
        """Wait at most so long for a client, and do all that it asks."""
        self._listening.settimeout(seconds)
        try:
            client, _ = self._listening.accept()
        except TimeoutError:
            return
        with client:
            client.settimeout(_CLIENT_SECONDS)
            try:
                self._answer_all(client)
            except OSError:
                return  # it is gone, or says nothing: the next one may have more to say

    def _answer_all(self, client: socket.socket) -> None:
        with client.makefile("rwb") as lines:
            while line := lines.readline(_LONGEST):
                lines.write(json.dumps(self._answer(line)).encode() + b"\n")
                lines.flush()

    def _answer(self, line: bytes) -> dict[str, str]:
        try:
            self._apply(parse_fault(line.decode("utf-8", "replace")))
        except GpunodeError as error:
            return {"error": error.message, "hint": error.hint}
        return {}

    def close(self) -> None:
        self._listening.close()
        self._host.remove(self.path)


class Client:
    """The asking end. `PreconditionError` if no simulated plugin listens there."""

    def __init__(self, host: Host, state_dir: str) -> None:
        path = socket_path(state_dir)
        try:
            self._connection = host.connect_unix(path, _ANSWER_SECONDS)
        except DaemonError as error:
            raise PreconditionError(
                f"no simulated plugin takes faults: {error.message}",
                hint="start one with: gpunode plugin serve --simulate h100:8; with the same --state-dir",
            ) from error
        self._lines = self._connection.makefile("rwb")

    def send(self, fault: Fault) -> None:
        """Let it happen; back when it has. `DaemonError` if the plugin refuses it, with its words."""
        try:
            self._lines.write(fault.line.encode() + b"\n")
            self._lines.flush()
            answer: Any = json.loads(self._lines.readline(_LONGEST) or b"{}")
        except (OSError, ValueError) as error:
            raise DaemonError(f"the simulated plugin did not answer: {error}") from error
        if answer.get("error"):
            raise DaemonError(str(answer["error"]), hint=str(answer.get("hint", "")), code="refused")

    def close(self) -> None:
        self._lines.close()
        self._connection.close()
