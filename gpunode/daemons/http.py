"""HTTP over a daemon's unix socket: one request, one response, and every failure as a `DaemonError`."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from gpunode.errors import DaemonError
from gpunode.host import Host
from gpunode.output.typed import as_dict

if TYPE_CHECKING:
    import socket

MAX_BODY_BYTES = 64 << 20
_MAX_HEAD_BYTES = 256 << 10  # status line and headers; every `100 Continue` before them counts
_PIECE = 1 << 20
_CODES = {400: "refused-request", 403: "denied", 404: "not-found", 409: "conflict"}


class Response(NamedTuple):
    """The names of `headers` are in lower case; of a repeated header the last value counts."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class UnixHttp:
    """One daemon behind its socket. Every call opens its own connection and closes it.

    `hints` has the hint for an error code (absent, refused, denied, timeout), `log` the one for every other
    code. `timeout` is the limit for the whole call, regardless of how the daemon spreads its bytes.
    """

    host: Host
    socket: str
    hints: Mapping[str, str]
    log: str

    def response(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        timeout: float,
    ) -> Response:
        """The whole response. `DaemonError` if there is none, or its status is 400 or more."""
        from http.client import HTTPException  # 15 ms, which a recorded machine doesn't need

        deadline = self.host.monotonic() + timeout
        try:
            with self.host.connect_unix(self.socket, timeout) as connected:
                stream = _BoundedSocket(connected, lambda: deadline - self.host.monotonic())
                result = _exchange(stream, method, path, body, headers or {})
        except TimeoutError as error:
            raise self.failed(
                "timeout", f"{self.socket} did not respond to {method} {path} in time"
            ) from error
        except DaemonError as error:
            raise self.failed(error.code, error.message) from error
        except (HTTPException, ValueError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise self.failed(
                "broken", f"{self.socket} closed the connection during {method} {path}: {reason}"
            ) from error
        return self._accepted(result, path)

    def recall(self, what: str, kind: type) -> Any:
        """The recorded answer of the daemon on a recorded machine; `DaemonError` if nothing was recorded."""
        recorded = as_dict(self.host.recorded("daemons", self.socket))
        answer, problem = recorded.get(what), recorded.get("problem")
        if not isinstance(answer, kind):
            if isinstance(problem, dict):
                raise self.failed(str(problem.get("code", "")), str(problem.get("message", "")))
            state = self.host.socket_state(self.socket)
            code = state if state in self.hints else "absent"
            raise DaemonError(f"no response from {self.socket} ({state})", hint=self.hints[code], code=code)
        return answer

    def failed(self, code: str, message: str) -> DaemonError:
        """A `DaemonError` with the hint for its code."""
        self.host.heard("daemons", self.socket, {"problem": {"code": code, "message": message}})
        return DaemonError(message, hint=self.hints.get(code, self.log), code=code)

    def _accepted(self, response: Response, path: str) -> Response:
        # 304: the object already has that state
        if response.status < 400:
            return response
        content = decoded(response.body)
        text = content.get("message") if isinstance(content, dict) else None
        message = text if isinstance(text, str) else response.body[:200].decode("utf-8", "replace")
        raise self.failed(
            _CODES.get(response.status, "daemon"),
            message.strip() or f"HTTP status {response.status} for {path}",
        )


class _BoundedReader(io.RawIOBase):
    """Reads a socket up to a deadline and a number of bytes; http.client's own limit is per recv(2)."""

    def __init__(self, connected: socket.socket, seconds_left: Callable[[], float]) -> None:
        self._connected = connected
        self._seconds_left = seconds_left
        self.bytes_left = _MAX_HEAD_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        _set_timeout(self._connected, self._seconds_left())
        count = self._connected.recv_into(buffer)
        self.bytes_left -= count
        if self.bytes_left < 0:
            raise ValueError("the response is too large")
        return count


class _BoundedSocket:
    """The methods of a socket that http.client uses. The caller that opened the connection closes it."""

    def __init__(self, connected: socket.socket, seconds_left: Callable[[], float]) -> None:
        self._connected = connected
        self._seconds_left = seconds_left
        self.reader = _BoundedReader(connected, seconds_left)

    def sendall(self, data: bytes) -> None:
        _set_timeout(self._connected, self._seconds_left())
        self._connected.sendall(data)  # the timeout of a socket is sendall's limit for all of the data

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self.reader)

    def close(self) -> None:
        """Does nothing: http.client calls it as soon as it has the headers."""


def _set_timeout(connected: socket.socket, seconds: float) -> None:
    """`TimeoutError` if no time is left; a timeout of 0 would make the socket non-blocking."""
    if seconds <= 0:
        raise TimeoutError("timed out")
    connected.settimeout(seconds)


def _exchange(
    stream: _BoundedSocket, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
) -> Response:
    """Send one request and read its response. HTTPException, ValueError, OSError."""
    from http.client import HTTPConnection

    connection = HTTPConnection("localhost")
    connection.sock = stream
    # a daemon may refuse a body before it has read all of it; its response has the reason
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.request(method, path, body, {"Connection": "close", **headers})
    response = connection.getresponse()
    stream.reader.bytes_left = MAX_BODY_BYTES
    pieces = []
    while piece := response.read(_PIECE):
        pieces.append(piece)
    if response.length:
        raise ValueError(f"{response.length} bytes are missing")
    fields = {name.lower(): value for name, value in response.getheaders()}
    return Response(response.status, fields, b"".join(pieces))


def decoded(data: bytes | str) -> Any:
    """Parsed JSON; None if it is not JSON, or nested more deeply than the parser accepts."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None
