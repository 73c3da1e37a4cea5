"""A small web server for a few pages: GET and HEAD, one request per connection.

Whoever can reach the port may be slow or hostile, and the plugin beside it must not notice: there are few
connections at a time, each has a deadline for its whole request, and when all are taken the one that has
dawdled longest is given up for the new one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from socketserver import BaseServer, TCPServer, ThreadingMixIn
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from gpunode.plugin.logfmt import Log, Rarely

if TYPE_CHECKING:
    import socket

MOST_CONNECTIONS = 16
REQUEST_SECONDS = 5.0
_ANSWER_SECONDS = 10.0
_MOST_BYTES = 16 << 10  # of a request's line and headers
_LOOK_SECONDS = 0.25  # how soon one that is given up ends
_POLL_SECONDS = 0.2


class Page(NamedTuple):
    """An answer; `code` is HTTP's."""

    code: int
    content_type: str
    body: bytes


def text(code: int, line: str) -> Page:
    return Page(code, "text/plain; charset=utf-8", f"{line}\n".encode())


Route = Callable[[str], Page]
"""Makes the page, given the request's Accept header."""


class WebServer:
    """Serves `routes` by path on a listening socket, from threads of its own, until `close`."""

    def __init__(self, listening: socket.socket, routes: Mapping[str, Route], log: Log) -> None:
        self._server = _Server(listening, routes, log)
        self._thread = Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), name="http", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Listen no more; takes a fifth of a second at most. Open connections end by their deadlines."""
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingMixIn, TCPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, listening: socket.socket, routes: Mapping[str, Route], log: Log) -> None:
        BaseServer.__init__(self, listening.getsockname(), _Handler)  # TCPServer's would make a socket
        self.socket = listening
        self.routes = routes
        self._log = log
        self._rarely = Rarely()
        self._lock = Lock()
        self._reading: dict[int, _Request] = {}
        self._busy = 0

    def process_request(self, request: Any, client_address: Any) -> None:
        """At most twice the connections while those that were given up are ending."""
        with self._lock:
            full = self._busy >= MOST_CONNECTIONS
            if full and self._reading:
                next(iter(self._reading.values())).give_up()
            refuse = self._busy >= 2 * MOST_CONNECTIONS
            if not refuse:
                self._busy += 1
        if refuse:
            super().shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError as error:  # no thread can be started
            self._gone()
            super().shutdown_request(request)
            self.report(f"a connection was refused: {error}")

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._gone()

    def _gone(self) -> None:
        with self._lock:
            self._busy -= 1

    def reading(self, request: _Request) -> None:
        with self._lock:
            self._reading[id(request)] = request

    def read(self, request: _Request) -> None:
        with self._lock:
            self._reading.pop(id(request), None)

    def report(self, reason: str) -> None:
        if times := self._rarely.times(reason):
            self._log.error("serving metrics failed", reason=reason, times=times)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is nothing to tell of."""
        import sys

        error = sys.exception() if hasattr(sys, "exception") else sys.exc_info()[1]
        if not isinstance(error, OSError):
            self.report(repr(error))


class _Request:
    """Reads a request's lines, with an end to patience. `TimeoutError` ends the connection without a word."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._deadline = time.monotonic() + REQUEST_SECONDS
        self._data = bytearray()
        self._total = 0
        self._given_up = False

    def give_up(self) -> None:
        self._given_up = True

    def readline(self, limit: int = -1) -> bytes:
        while (end := self._data.find(b"\n") + 1) == 0:
            more = self._receive()
            if not more:
                end = len(self._data)
                break
            self._data += more
        line = bytes(self._data[:end])
        del self._data[:end]
        return line

    def _receive(self) -> bytes:
        while not self._given_up and self._total < _MOST_BYTES:
            left = self._deadline - time.monotonic()
            if left <= 0:
                break
            self._connection.settimeout(min(left, _LOOK_SECONDS))
            try:
                more = self._connection.recv(4096)
            except TimeoutError:
                continue
            self._total += len(more)
            return more
        raise TimeoutError("too slow, too long, or another one's turn")

    def close(self) -> None:
        """The connection is closed by the server."""


class _Handler(BaseHTTPRequestHandler):
    server_version = "gpunode"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self._request = _Request(self.connection)
        self.rfile = cast(Any, self._request)
        cast(_Server, self.server).reading(self._request)

    def finish(self) -> None:
        cast(_Server, self.server).read(self._request)
        super().finish()

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        server = cast(_Server, self.server)
        server.read(self._request)
        page = self._page(server)
        self.connection.settimeout(_ANSWER_SECONDS)
        self.send_response(page.code)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if body:
            self.wfile.write(page.body)

    def _page(self, server: _Server) -> Page:
        path = self.path.partition("?")[0]
        route = server.routes.get(path)
        if route is None:
            return text(404, f"there is no {path[:100]!r} here, only {', '.join(server.routes)}")
        try:
            return route(self.headers.get("Accept", ""))
        except Exception as error:  # noqa: BLE001 - a bug in a page must not look like a dead server
            server.report(f"{path}: {error!r}")
            return text(500, "this page could not be made; the log says why")

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a scrape every few seconds is no news."""
