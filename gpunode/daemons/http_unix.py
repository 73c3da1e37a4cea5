"""HTTP over a daemon's unix socket: one request, one answer, and every failure as a `DaemonError`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from gpunode.daemons.http_answer import Answer, read_answer
from gpunode.dataclass import dataclass
from gpunode.errors import DaemonError
from gpunode.host import Host

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
        return self.answer(method, path, body, headers, timeout=timeout).body

    def answer(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        timeout: float,
    ) -> Answer:
        """The whole answer; errors as for `request`."""
        try:
            with self.host.connect_unix(self.socket, timeout) as connection:
                # a daemon may refuse a body before it has read all of it; then its answer says why
                with suppress(BrokenPipeError, ConnectionResetError):
                    connection.sendall(_request(method, path, body, headers or {}))
                with connection.makefile("rb") as stream:
                    found = read_answer(stream, _MAX_ANSWER_BYTES)
        except TimeoutError as error:
            raise self.failed("timeout", f"{self.socket} did not answer {method} {path} in time") from error
        except DaemonError as error:
            raise self.failed(error.code, error.message) from error
        except (ValueError, OSError) as error:
            raise self.failed("broken", f"{self.socket} broke off {method} {path}: {error}") from error
        return self._accepted(found, path)

    def recall(self, what: str, kind: type) -> Any:
        """What a recorded machine says that the daemon answers; `DaemonError` if nothing was recorded."""
        recorded = self.host.recorded("daemons", self.socket)
        answer = recorded.get(what) if isinstance(recorded, dict) else None
        if not isinstance(answer, kind):
            problem = recorded.get("problem") if isinstance(recorded, dict) else None
            if isinstance(problem, dict):
                raise self.failed(str(problem.get("code", "")), str(problem.get("message", "")))
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
        self.host.heard("daemons", self.socket, {"problem": {"code": code, "message": message}})
        return DaemonError(message, hint=self.hints.get(code, self.log), code=code)

    def _accepted(self, found: Answer, path: str) -> Answer:
        # 304: it is in that state already
        if found.status < 400:
            return found
        answer = decoded(found.body)
        told = answer.get("message") if isinstance(answer, dict) else None
        message = told if isinstance(told, str) else found.body[:200].decode("utf-8", "replace")
        raise self.failed(
            _CODES.get(found.status, "daemon"),
            message.strip() or f"HTTP status {found.status} for {path}",
        )


def _request(method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> bytes:
    """Head and body; `ValueError` for a path that would end its line early."""
    if not path.isascii() or not path.isprintable() or " " in path:
        raise ValueError(f"no path of a request: {path!r}")
    fields = {"Host": "localhost", "Accept-Encoding": "identity", "Connection": "close", **headers}
    if body is not None or method == "POST":
        fields["Content-Length"] = str(len(body or b""))
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode("ascii") + (body or b"")


def decoded(data: bytes) -> Any:
    """JSON, or None where it is none (nested beyond what the parser takes included)."""
    from json import loads

    try:
        return loads(data)
    except (ValueError, RecursionError):
        return None
