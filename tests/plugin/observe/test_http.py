"""The web server alone: refused requests, and slow clients that must not delay others."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from gpunode.errors import PreconditionError
from gpunode.host import Host
from gpunode.plugin.observe import http
from gpunode.plugin.observe.http import MAX_CONNECTIONS, Page, WebServer, listen_address, text
from tests.plugin.nodes import MemoryLog, eventually


def large(accept: str) -> Page:
    return Page(200, "text/plain", b"x" * (64 << 20))  # more than the socket's buffers hold


def broken(accept: str) -> Page:
    raise KeyError("a bug")


@pytest.fixture
def web() -> Iterator[tuple[int, MemoryLog]]:
    log = MemoryLog()
    listening = Host().listen_tcp("127.0.0.1", 0)
    port = listening.getsockname()[1]
    routes = {"/metrics": lambda accept: text(200, f"m {accept}"), "/broken": broken, "/large": large}
    server = WebServer(listening, routes, log)
    server.start()
    yield port, log
    server.close()


def say(port: int, data: bytes) -> bytes:
    """The whole response until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(data)
        found = b""
        try:
            while more := connection.recv(65536):
                found += more
        except ConnectionResetError:
            pass  # it closed while some of our bytes were still unread
        return found


def test_only_get_and_head_are_answered(web) -> None:
    port, _ = web
    got = say(port, b"GET /metrics?x=1 HTTP/1.1\r\nHost: a\r\nAccept: b\r\n\r\n")
    head, _, body = got.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 200 ") and b"Content-Length: 4" in head
    assert body == b"m b\n"
    assert b"Python" not in head
    got = say(port, b"HEAD /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
    assert got.startswith(b"HTTP/1.0 200 ") and got.endswith(b"\r\n\r\n")
    assert say(port, b"GET /../etc/passwd HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.0 404 ")
    for method in (b"POST", b"PUT", b"DELETE", b"TRACE"):
        assert b" 501 " in say(port, method + b" /metrics HTTP/1.1\r\nContent-Length: 0\r\n\r\n")


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64 + b"\n",
        b"\n",
        b"GET\r\n\r\n",
        b"GET /metrics HTTP/9.9\r\n\r\n",
        b"GET " + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 50_000 + b"\r\n",
        b"GET / HTTP/1.1\r\n" + b"\xff: \xfe\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    ids=lambda data: repr(data[:14]),
)
def test_invalid_requests_are_refused_without_a_log_entry(web, garbage: bytes) -> None:
    port, log = web
    assert b" 200 " not in say(port, garbage).partition(b"\r\n")[0]
    assert b"m " in say(port, b"GET /metrics HTTP/1.1\r\n\r\n")
    assert log.lines == []


def test_bug_in_a_page_is_logged_and_answered(web) -> None:
    port, log = web
    for _ in range(3):
        assert say(port, b"GET /broken HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.0 500 ")
    assert log.messages("error") == ["serving metrics failed"]
    assert "a bug" in log.reasons()[0]


def slow_clients(stack: ExitStack, port: int, count: int) -> None:
    for _ in range(count):
        client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
        client.sendall(b"GET /metrics HTTP/1.1\r\nX: ")


@pytest.mark.full
@pytest.mark.parametrize("count", [40, 200])
def test_slow_clients_do_not_delay_the_next_request(web, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(http, "CONNECTION_SECONDS", 300.0)
    port, log = web
    threads = threading.active_count()
    with ExitStack() as stack:
        for _ in range(5):
            slow_clients(stack, port, count)
            # the first attempt counts: a liveness probe that is refused three times restarts the plugin
            assert b"m " in say(port, b"GET /metrics HTTP/1.1\r\n\r\n")
        assert threading.active_count() - threads <= 2 * MAX_CONNECTIONS
        assert eventually(lambda: threading.active_count() - threads <= MAX_CONNECTIONS, 60)
    assert eventually(lambda: threading.active_count() <= threads, 60)
    assert log.lines == []


def test_requests_are_answered_while_slow_clients_reconnect(web) -> None:
    port, _ = web
    stop = threading.Event()

    def come_back() -> None:
        while not stop.is_set():
            with ExitStack() as stack:
                slow_clients(stack, port, 50)

    threads = [threading.Thread(target=come_back) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(30):
            assert b"m " in say(port, b"GET /metrics HTTP/1.1\r\n\r\n")
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)


def test_dripping_client_is_disconnected(web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "CONNECTION_SECONDS", 0.5)
    port, _ = web
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        with pytest.raises(OSError):
            for _ in range(3000):
                connection.sendall(b"G")
                time.sleep(0.02)


def test_client_that_does_not_read_its_response_is_disconnected(web, monkeypatch: pytest.MonkeyPatch) -> None:
    port, log = web
    before = set(threading.enumerate())
    with ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60)) for _ in range(5)
        ]
        for client in clients:
            client.sendall(b"GET /large HTTP/1.1\r\n\r\n")
        for client in clients:
            assert client.recv(1) == b"H"  # it is served
        monkeypatch.setattr(http, "CONNECTION_SECONDS", 0.0)
        assert eventually(lambda: before.issuperset(threading.enumerate()), 60)
        for client in clients:
            assert rest_of(client) < 64 << 20
    assert log.lines == []


def rest_of(connection: socket.socket) -> int:
    """Number of bytes before the server closes its end of the connection."""
    count = 0
    try:
        while more := connection.recv(1 << 20):
            count += len(more)
    except ConnectionResetError:
        pass
    return count


def test_client_that_disconnects_early_is_not_logged(web) -> None:
    port, log = web
    for _ in range(20):
        connection = socket.create_connection(("127.0.0.1", port), timeout=60)
        connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        connection.close()
    assert b"m " in say(port, b"GET /metrics HTTP/1.1\r\n\r\n")
    assert log.lines == []


@pytest.mark.parametrize(
    ("given", "address", "port"),
    [
        ("127.0.0.1:9400", "127.0.0.1", 9400),
        (":9400", "", 9400),
        ("[::1]:9400", "::1", 9400),
        ("localhost:1", "localhost", 1),
    ],
)
def test_listen_addresses(given: str, address: str, port: int) -> None:
    assert listen_address(given) == (address, port)


def test_ipv6_address_can_be_listened_on() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    try:
        with Host().listen_tcp("::1", 0) as listening:
            assert listening.family == socket.AF_INET6
    except Exception as error:  # noqa: BLE001 - a machine without ::1
        pytest.skip(str(error))


def test_service_without_network_gets_a_hint_to_allow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*given: object) -> None:
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))

    monkeypatch.setattr("socket.socket", forbidden)
    with pytest.raises(PreconditionError, match="Address family not supported") as refused:
        Host().listen_tcp("127.0.0.1", 0)
    assert "docs/metrics.md" in refused.value.hint
