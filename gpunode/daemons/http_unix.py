"""HTTP over a daemon's unix socket: one request, one answer, and every failure as a `DaemonError`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpunode.errors import DaemonError
from gpunode.host import Host

if TYPE_CHECKING:
    from http.client import HTTPResponse

_MAX_ANSWER_BYTES = 64 << 20
_CODES = {400: "refused-request", 403: "denied", 404: "not-found", 409: "conflict"}


@dataclass(frozen=True)
class UnixHttp:
    """One daemon behind its socket. Every call opens a connection of its own and closes it again.

    `hints` says by error code (absent, refused, denied, timeout) what to do, `log` for every other.
    """

    host: Host
    socket: str
    hints: Mapping[str, str]
    log: str

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        timeout: float,
    ) -> bytes:
        """The body of the answer. `DaemonError` if there is none, or its status is 400 or more."""
        from http.client import HTTPConnection, HTTPException

        connection = HTTPConnection("localhost")
        try:
            # http.client connects by itself only where there is no socket yet
            connection.sock = self.host.connect_unix(self.socket, timeout)
            # a daemon may refuse a body before it has read all of it; then its answer says why
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, path, body, dict(headers or {}))
            response = connection.getresponse()
            data = response.read(_MAX_ANSWER_BYTES)
            if response.length:  # what is missing of the announced length
                raise HTTPException(f"{response.length} bytes are missing")
        except TimeoutError as error:
            raise self.failed("timeout", f"{self.socket} did not answer {method} {path} in time") from error
        except DaemonError as error:
            raise self.failed(error.code, error.message) from error
        except (HTTPException, OSError) as error:
            raise self.failed("broken", f"{self.socket} broke off {method} {path}: {error!r}") from error
        finally:
            connection.close()
        return self._accepted(response, path, data)

    def recall(self, what: str, kind: type) -> Any:
        """What a recorded machine says that the daemon answers; `DaemonError` if nothing was recorded."""
        recorded = self.host.recorded("daemons", self.socket)
        answer = recorded.get(what) if isinstance(recorded, dict) else None
        if not isinstance(answer, kind):
            state = self.host.socket_state(self.socket)
            code = state if state in self.hints else "absent"
            raise DaemonError(f"no answer from {self.socket} ({state})", hint=self.hints[code], code=code)
        return answer

    def not_an_object(self, path: str) -> DaemonError:
        """The error for an answer that is no JSON object."""
        return DaemonError(
            f"{self.socket} answered {path} with something that is no JSON object",
            hint=f"see what listens there: ss -xlp src {self.socket}",
            code="malformed",
        )

    def failed(self, code: str, message: str) -> DaemonError:
        """A `DaemonError` with the hint for its code."""
        return DaemonError(message, hint=self.hints.get(code, self.log), code=code)

    def _accepted(self, response: HTTPResponse, path: str, data: bytes) -> bytes:
        # 304: it is in that state already
        if response.status < 400:
            return data
        answer = decoded(data)
        told = answer.get("message") if isinstance(answer, dict) else None
        message = told if isinstance(told, str) else data[:200].decode("utf-8", "replace")
        raise self.failed(
            _CODES.get(response.status, "daemon"),
            message.strip() or f"HTTP status {response.status} for {path}",
        )


def decoded(data: bytes) -> Any:
    """JSON, or None where it is none (nested beyond what the parser takes included)."""
    from json import loads

    try:
        return loads(data)
    except (ValueError, RecursionError):
        return None
