"""`--listen`: /metrics, /healthz and /readyz beside the plugin, and the web server that serves them.

Off by default. There is no password, and the pages name pods: listen on 127.0.0.1, or where only the
monitoring can reach it. The server takes GET and HEAD, one request per connection.

Any client that reaches the port may be slow or hostile and must not affect the plugin or other clients. Each
connection has one deadline for request and response together, and when all are in use the oldest is closed in
favour of the new one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from socketserver import BaseServer
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from gpunode.errors import PreconditionError, install_command
from gpunode.plugin.logfmt import Log, Rarely

if TYPE_CHECKING:
    import socket
    from io import BufferedIOBase

    from gpunode.plugin.serve import PluginService

MAX_CONNECTIONS = 64
CONNECTION_SECONDS = 10.0
_MAX_REQUEST_BYTES = 16 << 10  # of a request's line and headers
_POLL_SECONDS = 0.5
_SHUT_RDWR = 2  # shutdown(2); `socket` is imported by the host package only


class Page(NamedTuple):
    """A response; `code` is HTTP's."""

    code: int
    content_type: str
    body: bytes


def text(code: int, line: str) -> Page:
    return Page(code, "text/plain; charset=utf-8", f"{line}\n".encode())


Route = Callable[[str], Page]
"""Makes the page, given the request's Accept header."""


class WebServer(ThreadingHTTPServer):
    """Serves `routes` by path on a listening socket, from its own threads, until `close`."""

    block_on_close = False

    def __init__(self, listening: socket.socket, routes: Mapping[str, Route], log: Log) -> None:
        BaseServer.__init__(
            self, listening.getsockname(), _RequestHandler
        )  # HTTPServer's would make a socket
        self.socket = listening
        self.routes = routes
        self._log = log
        self._rarely = Rarely()
        self._lock = Lock()
        self._opened: dict[Any, float] = {}  # connections by age, with the time of accept(2)
        self._busy_threads = 0
        self._thread = Thread(target=self.serve_forever, args=(_POLL_SECONDS,), name="http", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop listening, within half a second. Open connections end by their deadlines."""
        if self._thread.is_alive():
            self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            oldest = next(iter(self._opened)) if len(self._opened) >= MAX_CONNECTIONS else None
            if oldest is not None:
                self._disconnect(oldest)
            # a thread with a closed connection may still be rendering its page
            refuse = self._busy_threads >= 2 * MAX_CONNECTIONS
            if not refuse:
                self._busy_threads += 1
                self._opened[request] = time.monotonic()
        if refuse:
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError as error:  # no thread can be started
            self._thread_ended()
            self.shutdown_request(request)
            self.report(f"a connection was refused: {error}")

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._thread_ended()

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._opened.pop(request, None)
            super().shutdown_request(request)  # under the lock: its number may be another connection's next

    def service_actions(self) -> None:
        """Close what has been open for too long; called after every poll of the listening socket."""
        now = time.monotonic()
        with self._lock:
            expired = [
                identifier for identifier, since in self._opened.items() if now - since > CONNECTION_SECONDS
            ]
            for request in expired:
                self._disconnect(request)

    def _disconnect(self, request: Any) -> None:
        """Wake the connection's thread from recv(2) or send(2); it closes the socket."""
        del self._opened[request]
        with suppress(OSError):  # the client has already gone
            request.shutdown(_SHUT_RDWR)

    def _thread_ended(self) -> None:
        with self._lock:
            self._busy_threads -= 1

    def report(self, reason: str) -> None:
        if times := self._rarely.times(reason):
            self._log.error("serving metrics failed", reason=reason, times=times)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that disconnects is not worth a log line."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            self.report(repr(error))


class _RequestLines:
    """The lines of one request, up to a size. `ConnectionAbortedError` if the request ends too early."""

    def __init__(self, stream: BufferedIOBase) -> None:
        self._stream = stream
        self._bytes_left = _MAX_REQUEST_BYTES

    def readline(self, limit: int = -1) -> bytes:
        line = self._stream.readline(min(limit, self._bytes_left) if limit >= 0 else self._bytes_left)
        self._bytes_left -= len(line)
        if not line.endswith(b"\n"):
            raise ConnectionAbortedError("the request is too long, or the client has gone")
        return line

    def close(self) -> None:
        self._stream.close()


class _RequestHandler(BaseHTTPRequestHandler):
    server_version = "gpunode"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self.rfile = cast(Any, _RequestLines(self.rfile))

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        page = self._page(cast(WebServer, self.server))
        self.send_response(page.code)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if body:
            self.wfile.write(page.body)

    def _page(self, server: WebServer) -> Page:
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
        """Does nothing: requests arrive every few seconds."""


# The pages. A part of the service.

STUCK_SECONDS = 10.0


class Endpoints:
    """Opens the port at once, so that a start without it fails; answers from the first turn on."""

    def __init__(self, service: PluginService) -> None:
        if find_spec("prometheus_client") is None:
            raise PreconditionError(
                "--listen needs the package prometheus-client, which is not installed",
                hint=f"install it beside gpunode: {install_command('metrics', 'prometheus-client')}",
            )
        from gpunode.plugin.observe.metrics import Metrics

        address, port = listen_address(service.settings.listen)
        listening = service.host.listen_tcp(address, port)
        self.port = int(listening.getsockname()[1])
        self._service = service
        self._metrics = Metrics(service)
        self._turn = service.host.monotonic()
        self._settings = service.settings
        self._started = False
        routes = {"/metrics": self.metrics, "/healthz": self.healthz, "/readyz": self.readyz}
        self._server = WebServer(listening, routes, service.log)

    def tick(self, now: float) -> None:
        self._turn = now
        if self._service.settings is not self._settings:
            self._settings, self._metrics.configured = self._service.settings, self._service.host.now()
        if not self._started:
            self._started = True
            self._server.start()
            where = self._service.settings.listen
            self._service.log.info("serving metrics", listen=where, port=self.port)

    def close(self) -> None:
        self._server.close()

    def metrics(self, accept: str) -> Page:
        return Page(200, *self._metrics.page(accept))

    def healthz(self, _accept: str) -> Page:
        """Whether the process does its work; a GPU's health is no reason to restart it."""
        idle = self._service.host.monotonic() - self._turn
        if idle > STUCK_SECONDS:
            return text(503, f"the kubelet's link has not had its turn for {idle:.0f} s")
        return text(200, "ok")

    def readyz(self, _accept: str) -> Page:
        """Whether pods can get GPUs from here."""
        return text(200 if self._service.ready else 503, self._service.status)


def listen_address(address_text: str) -> tuple[str, int]:
    """``127.0.0.1:9400``, ``[::1]:9400`` or ``:9400`` as address and port; an empty address means all."""
    address, _, port = address_text.rpartition(":")
    return address.removeprefix("[").removesuffix("]"), int(port)
