"""The web server by itself: what it refuses, and that nobody who dawdles holds up the others."""

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
from gpunode.plugin.observe.endpoints import listen_address
from gpunode.plugin.observe.http import MOST_CONNECTIONS, Page, WebServer, text
from tests.plugin.nodes import MemoryLog, eventually


def broken(accept: str) -> Page:
    raise KeyError("a bug")


@pytest.fixture
def web() -> Iterator[tuple[int, MemoryLog]]:
    log = MemoryLog()
    listening = Host().listen_tcp("127.0.0.1", 0)
    port = listening.getsockname()[1]
    routes = {"/metrics": lambda accept: text(200, f"m {accept}"), "/broken": broken}
    server = WebServer(listening, routes, log)
    server.start()
    yield port, log
    server.close()


def say(port: int, data: bytes) -> bytes:
    """All that comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(data)
        found = b""
        try:
            while more := connection.recv(65536):
                found += more
        except ConnectionResetError:
            pass  # it closed while something of ours was still unread
        return found


def test_get_and_head_are_answered_and_nothing_else(web) -> None:
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
def test_garbage_is_no_news_and_no_harm(web, garbage: bytes) -> None:
    port, log = web
    assert b" 200 " not in say(port, garbage).partition(b"\r\n")[0]
    assert b"m " in say(port, b"GET /metrics HTTP/1.1\r\n\r\n")
    assert log.lines == []


def test_a_bug_in_a_page_is_logged_and_answered(web) -> None:
    port, log = web
    for _ in range(3):
        assert say(port, b"GET /broken HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.0 500 ")
    assert log.messages("error") == ["serving metrics failed"]
    assert "a bug" in log.reasons()[0]


def test_a_hundred_dawdlers_dont_keep_the_next_one_waiting(web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "REQUEST_SECONDS", 30.0)
    port, log = web
    threads = threading.active_count()
    with ExitStack() as stack:
        for _ in range(100):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            one.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        started = time.monotonic()

        def answered() -> bool:
            try:
                return b"m " in say(port, b"GET /metrics HTTP/1.1\r\n\r\n")
            except OSError:
                return False  # refused while those that were given up are still ending

        assert eventually(answered, 20)
        assert time.monotonic() - started < 20
        assert threading.active_count() - threads <= 2 * MOST_CONNECTIONS
    assert eventually(lambda: threading.active_count() <= threads, 60)
    assert log.lines == []


def test_who_drips_is_cut_off(web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "REQUEST_SECONDS", 0.5)
    port, _ = web
    started = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        with pytest.raises(OSError):
            while time.monotonic() - started < 30:
                connection.sendall(b"G")
                time.sleep(0.02)
    assert time.monotonic() - started < 20


def test_who_goes_away_in_the_middle_is_no_news(web) -> None:
    port, log = web
    for _ in range(20):
        connection = socket.create_connection(("127.0.0.1", port), timeout=10)
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
def test_addresses(given: str, address: str, port: int) -> None:
    assert listen_address(given) == (address, port)


def test_an_ipv6_address_can_be_listened_on() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    try:
        with Host().listen_tcp("::1", 0) as listening:
            assert listening.family == socket.AF_INET6
    except Exception as error:  # noqa: BLE001 - a machine without ::1
        pytest.skip(str(error))


def test_a_service_without_network_is_told_where_it_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*given: object) -> None:
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))

    monkeypatch.setattr("socket.socket", forbidden)
    with pytest.raises(PreconditionError, match="Address family not supported") as refused:
        Host().listen_tcp("127.0.0.1", 0)
    assert "docs/metrics.md" in refused.value.hint
