"""The reader of HTTP answers beside the standard library's, on well formed answers and on nonsense."""

from __future__ import annotations

import io
from http.client import HTTPException, HTTPResponse

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpunode.daemons.http_answer import Answer, read_answer

MOST = 1 << 20
HEAD = b"HTTP/1.1 200 OK\r\n"


class Connection:
    """As much of a socket as `HTTPResponse` wants."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self.raw)


def librarys(raw: bytes) -> tuple[int, bytes] | None:
    """Status and body as `http.client` reads them, None where it refuses; `HTTPResponse` is its reader."""
    response = HTTPResponse(Connection(raw))  # type: ignore[arg-type]
    try:
        response.begin()
        return response.status, response.read()
    except (HTTPException, ValueError):
        return None


def ours(raw: bytes) -> Answer | None:
    try:
        return read_answer(io.BytesIO(raw), MOST)
    except ValueError:
        return None


def chunked(parts: list[bytes], extension: bytes = b"", trailer: bytes = b"") -> bytes:
    chunks = b"".join(b"%x%s\r\n%s\r\n" % (len(part), extension, part) for part in parts if part)
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n" + trailer + b"\r\n"


@given(
    parts=st.lists(st.binary(max_size=3000), max_size=5),
    extension=st.sampled_from([b"", b";a=b", b" "]),
    trailer=st.sampled_from([b"", b"X-Sum: 1\r\n"]),
)
def test_chunks_are_put_together(parts: list[bytes], extension: bytes, trailer: bytes) -> None:
    raw = chunked(parts, extension, trailer)
    found = ours(raw)
    assert found is not None
    assert (found.status, found.body) == (200, b"".join(parts)) == librarys(raw)


@given(body=st.binary(max_size=3000), status=st.integers(200, 599), announced=st.booleans())
def test_a_body_ends_where_its_length_or_its_connection_does(
    body: bytes, status: int, announced: bool
) -> None:
    length = b"Content-Length: %d\r\n" % len(body) if announced else b""
    raw = b"HTTP/1.1 %d Some Words\r\n%s\r\n%s" % (status, length, body)
    found = ours(raw)
    assert found is not None
    assert (found.status, found.body) == librarys(raw)


@given(parts=st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=4), data=st.data())
def test_an_answer_that_breaks_off_is_never_taken_for_whole(parts: list[bytes], data: st.DataObject) -> None:
    body = b"".join(parts)
    announced = HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    for raw, end in ((chunked(parts), len(b"\r\n")), (announced, 0)):
        cut = data.draw(st.integers(0, len(raw) - end - 1))
        assert ours(raw[:cut]) is None


@given(
    raw=st.binary(max_size=80)
    | st.binary(max_size=80).map(lambda rest: HEAD + rest)
    | st.binary(max_size=80).map(lambda rest: HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + rest)
    | st.binary(max_size=20).map(lambda rest: HEAD + b"Content-Length: " + rest)
)
@example(HEAD + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n")
@example(HEAD + b"Transfer-Encoding: chunked\r\n\r\n0x10\r\n" + b"a" * 16 + b"\r\n0\r\n\r\n")
@example(HEAD + b"Content-Length: -1\r\n\r\nabc")
@example(HEAD + b"Content-Length: 1_0\r\n\r\n0123456789")
@example(HEAD + b"Content-Length: 99999999999999999999\r\n\r\n")
@example(b"HTTP/1.1 100 Continue\r\n\r\n" * 2000)
def test_nonsense_is_refused_and_never_read_as_more_than_is_there(raw: bytes) -> None:
    found = ours(raw)
    assert found is None or (100 <= found.status <= 999 and len(found.body) <= len(raw))


def test_an_interim_answer_is_passed_over() -> None:
    found = ours(b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"Content-Length: 2\r\n\r\nOK")
    assert found is not None and found.body == b"OK"


def test_names_of_headers_are_told_in_lower_case() -> None:
    found = ours(HEAD + b"SERVER: Docker/28.5.1 (linux)\r\nContent-Length: 0\r\n\r\n")
    assert found is not None and found.headers["server"] == "Docker/28.5.1 (linux)"


@pytest.mark.parametrize("status", [204, 304])
def test_some_answers_have_no_body_whatever_follows(status: int) -> None:
    found = ours(b"HTTP/1.1 %d X\r\n\r\nmore" % status)
    assert found is not None and found.body == b""


@pytest.mark.parametrize(
    "raw",
    [
        HEAD + b"Content-Length: 11\r\n\r\n" + b"a" * 11,
        HEAD + b"\r\n" + b"a" * 11,
        chunked([b"a" * 6, b"b" * 5]),
    ],
    ids=["announced", "to the end", "chunked"],
)
def test_a_body_larger_than_allowed_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"bytes"):
        read_answer(io.BytesIO(raw), 10)
    assert len(read_answer(io.BytesIO(raw), 11).body) == 11


def test_endless_headers_are_refused() -> None:
    assert ours(HEAD + b"A: b\r\n" * 1000 + b"\r\n") is None
    assert ours(HEAD + b"A: " + b"b" * 100_000 + b"\r\n\r\n") is None
