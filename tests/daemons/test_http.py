"""The HTTP client for daemons' sockets against servers that are slow, endless or not speaking HTTP."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpunode.daemons import http
from gpunode.daemons.http import Response, UnixHttp
from gpunode.errors import DaemonError
from gpunode.host import Host
from tests.cli import gpunode

HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@contextmanager
def serving(path: Path, answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server on a unix socket; each connection is closed when `answer` returns."""

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                try:
                    if not connection.recv(65536):
                        return
                    answer(connection)
                except OSError:
                    pass  # the client closed the connection

    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield str(path)
        finally:
            with socket.socket(socket.AF_UNIX) as last:
                last.connect(str(path))
            thread.join(60)


def fetch(path: str, timeout: float = 30.0) -> Response:
    return UnixHttp(Host(), path, {}, "see its log").response("GET", "/info", timeout=timeout)


def fetched(directory: Path, raw: bytes) -> Response | None:
    """The response to exactly these bytes, None if they are refused."""
    with serving(directory / "s", lambda connection: connection.sendall(raw)) as path:
        try:
            return fetch(path)
        except DaemonError as error:
            assert error.code in ("broken", "daemon", "denied", "not-found", "conflict", "refused-request")
            return None


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("http")


def chunked(parts: list[bytes], extension: bytes = b"", trailer: bytes = b"") -> bytes:
    chunks = b"".join(b"%x%s\r\n%s\r\n" % (len(part), extension, part) for part in parts if part)
    return CHUNKED + chunks + b"0\r\n" + trailer + b"\r\n"


@pytest.mark.parametrize(
    ("start", "drop"),
    [
        (b"", b"H"),
        (HEAD, b"X: y\r\n"),
        (HEAD + b"Content-Length: 99999\r\n\r\n", b" "),
        (HEAD + b"\r\n", b" "),
        (CHUNKED, b"1\r\na\r\n"),
        (CHUNKED + b"0\r\n", b"X: y\r\n"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
    ids=["status", "headers", "body", "to the end", "chunks", "trailers", "100 Continue"],
)
def test_dripping_server_gets_one_deadline_for_the_response(
    directory: Path, start: bytes, drop: bytes
) -> None:
    sent: list[bytes] = []

    def drip(connection: socket.socket) -> None:
        connection.sendall(start)
        while len(sent) < 1000:
            connection.sendall(drop)
            sent.append(drop)
            time.sleep(0.02)

    with serving(directory / "s", drip) as path, pytest.raises(DaemonError) as caught:
        fetch(path, 0.3)
    # a status line has at most 64 KiB and there are 100 headers, which a slow test machine may reach first
    assert caught.value.code in ("timeout", "broken")
    assert caught.value.code == "timeout" or drop == b"X: y\r\n"
    assert len(sent) < 1000


def test_server_that_does_not_read_gets_the_same_deadline(directory: Path) -> None:
    release = threading.Event()

    def hold(_: socket.socket) -> None:
        release.wait(60)

    with serving(directory / "s", hold) as path:
        client = UnixHttp(Host(), path, {}, "")
        with pytest.raises(DaemonError) as caught:
            client.response("POST", "/images/load", b"x" * (8 << 20), timeout=0.3)
        release.set()
    assert caught.value.code == "timeout"


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
        (b"", b"HTTP/1.1 100 Continue\r\nX: y\r\n\r\n" * 1000),
        (HEAD, b"X: " + b"y" * 60_000 + b"\r\n"),
        (b"H" * 100_000, b"H"),
        (HEAD + b"\r\n", b" " * 65536),
        (CHUNKED, b"10000\r\n" + b" " * 65536 + b"\r\n"),
        (CHUNKED + b"0\r\n", b"X: y\r\n" * 1000),
        (HEAD + b"Content-Length: 99999999999999999999\r\n\r\n", b" " * 65536),
    ],
    ids=["100", "100 with headers", "headers", "status", "to the end", "chunks", "trailers", "length"],
)
def test_endless_response_ends_at_a_size_limit(
    directory: Path, monkeypatch: pytest.MonkeyPatch, start: bytes, piece: bytes
) -> None:
    monkeypatch.setattr(http, "MAX_BODY_BYTES", 1 << 20)
    total = [0]

    def flood(connection: socket.socket) -> None:
        connection.sendall(start)
        while True:
            connection.sendall(piece)
            total[0] += len(piece)

    with serving(directory / "s", flood) as path, pytest.raises(DaemonError) as caught:
        fetch(path, 300.0)
    assert caught.value.code == "broken"
    assert total[0] < 4 << 20


def test_status_runtime_reports_a_socket_that_sends_100_continue_forever(tmp_path: Path) -> None:
    def flood(connection: socket.socket) -> None:
        while True:
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)

    (tmp_path / "daemon.json").write_text("{}")
    with serving(tmp_path / "s", flood) as path:
        named = ("--config", str(tmp_path / "daemon.json"), "--socket", path)
        ran = gpunode("status", "runtime", "--runtime", "docker", *named)
    assert "Traceback" not in ran.err
    assert "closed the connection" in ran.out + ran.err


@pytest.mark.parametrize("extension", [b"", b";a=b"])
@pytest.mark.parametrize("trailer", [b"", b"X-Sum: 1\r\n"])
def test_chunks_are_joined(directory: Path, extension: bytes, trailer: bytes) -> None:
    raw = chunked([b"a" * 3000, b"b"], extension, trailer)
    response = fetched(directory, raw)
    assert response is not None and response.body == b"a" * 3000 + b"b"


@pytest.mark.parametrize("announced", [True, False])
def test_body_ends_at_its_length_or_with_the_connection(directory: Path, announced: bool) -> None:
    length = b"Content-Length: 3\r\n" if announced else b""
    response = fetched(directory, HEAD + length + b"\r\nabc")
    assert response is not None and (response.status, response.body) == (200, b"abc")


@given(parts=st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=4), data=st.data())
def test_incomplete_response_is_refused(directory: Path, parts: list[bytes], data: st.DataObject) -> None:
    body = b"".join(parts)
    announced = HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    for raw, end in ((chunked(parts), len(b"0\r\n\r\n")), (announced, 0)):
        cut = data.draw(st.integers(len(HEAD), len(raw) - end - 1))
        response = fetched(directory, raw[:cut])
        # without the end of the headers the length of the body is unknown
        assert response is None or b"\r\n\r\n" not in raw[:cut]
        assert response is None or response.body == b""


@given(
    raw=st.binary(max_size=80)
    | st.binary(max_size=80).map(lambda rest: HEAD + rest)
    | st.binary(max_size=80).map(lambda rest: CHUNKED + rest)
    | st.binary(max_size=20).map(lambda rest: HEAD + b"Content-Length: " + rest)
)
@example(CHUNKED + b"-5\r\n")
@example(CHUNKED + b"0x10\r\n" + b"a" * 16 + b"\r\n0\r\n\r\n")
@example(CHUNKED + b"f" * 15 + b"\r\nabc")
@example(HEAD + b"Content-Length: -1\r\n\r\nabc")
@example(HEAD + b"Content-Length: 99999999999999999999\r\n\r\n")
@example(b"HTTP/1.1 204 X\r\n\r\nmore")
def test_response_is_never_larger_than_the_received_bytes(directory: Path, raw: bytes) -> None:
    response = fetched(directory, raw)
    assert response is None or (100 <= response.status <= 999 and len(response.body) <= len(raw))


def test_interim_response_is_skipped(directory: Path) -> None:
    raw = b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"Content-Length: 2\r\n\r\nOK"
    response = fetched(directory, raw)
    assert response is not None and response.body == b"OK"


def test_header_names_are_lower_case(directory: Path) -> None:
    response = fetched(directory, HEAD + b"SERVER: Docker/28.5.1 (linux)\r\nContent-Length: 0\r\n\r\n")
    assert response is not None and response.headers["server"] == "Docker/28.5.1 (linux)"


@pytest.mark.parametrize("status", [204, 304])
def test_some_responses_have_no_body(directory: Path, status: int) -> None:
    response = fetched(directory, b"HTTP/1.1 %d X\r\n\r\nmore" % status)
    assert response is not None and response.body == b""


@pytest.mark.parametrize(
    "path", ["/a b", "/a\r\nX: y", "/é", "/\x7f"], ids=["space", "line", "not ASCII", "control"]
)
def test_path_cannot_inject_into_the_request(directory: Path, path: str) -> None:
    with serving(directory / "s", lambda connection: None) as at, pytest.raises(DaemonError) as caught:
        UnixHttp(Host(), at, {}, "").response("GET", path, timeout=5.0)
    assert caught.value.code == "broken"
