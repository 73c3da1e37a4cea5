"""Reads one HTTP/1.1 answer (RFC 9112). `http.client` does, too, but brings e-mail's and TLS's parsers along.

That is 18 ms of imports, a sixth of a whole command, for a status, a few headers and a body.
"""

from __future__ import annotations

import re
from typing import BinaryIO, NamedTuple

_LONGEST_LINE = 65536
_MOST_HEADERS = 100
_WITHOUT_BODY = (204, 304)


class Answer(NamedTuple):
    """The names of `headers` are in lower case; of one that is repeated the last value counts."""

    status: int
    headers: dict[str, str]
    body: bytes


def read_answer(stream: BinaryIO, most: int) -> Answer:
    """The answer on `stream`; `ValueError` if it is none, breaks off or has more than `most` bytes."""
    status, headers = _head(stream)
    while 100 <= status < 200:  # such as 102: the real one is still to come
        status, headers = _head(stream)
    if status in _WITHOUT_BODY:
        return Answer(status, headers, b"")
    if headers.get("transfer-encoding", "").strip().lower() == "chunked":
        return Answer(status, headers, _chunks(stream, most))
    length = headers.get("content-length")
    if length is not None:
        return Answer(status, headers, _exactly(stream, _number(length, 10), most))
    body = stream.read(most + 1)  # HTTP/1.0: the end of the connection ends the body
    if len(body) > most:
        raise ValueError(f"more than {most} bytes")
    return Answer(status, headers, body)


def _head(stream: BinaryIO) -> tuple[int, dict[str, str]]:
    line = _line(stream)
    found = re.match(r"HTTP/1\.[01] ([1-9][0-9]{2})(?: |$)", line)
    if found is None:
        raise ValueError(f"no HTTP status: {line[:80]!r}" if line else "no answer")
    headers: dict[str, str] = {}
    for _ in range(_MOST_HEADERS):
        line = _line(stream)
        if not line:
            return int(found[1]), headers
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    raise ValueError(f"more than {_MOST_HEADERS} headers")


def _line(stream: BinaryIO) -> str:
    """One line without its end; HTTP's are Latin-1."""
    raw = stream.readline(_LONGEST_LINE)
    if raw and not raw.endswith(b"\n"):
        raise ValueError("a line without an end")
    if not raw:
        raise ValueError("no whole answer")
    return raw.rstrip(b"\r\n").decode("latin-1")


def _chunks(stream: BinaryIO, most: int) -> bytes:
    found = b""
    while size := _number(_line(stream).partition(";")[0], 16):
        found += _exactly(stream, size, most - len(found))
        if _line(stream):
            raise ValueError("a chunk longer than announced")
    return found


def _exactly(stream: BinaryIO, size: int, most: int) -> bytes:
    if size > most:
        raise ValueError(f"{size} bytes where {most} are allowed")
    data = stream.read(size)
    if len(data) < size:
        raise ValueError(f"{size - len(data)} bytes are missing")
    return data


def _number(text: str, base: int) -> int:
    """Python's own `int` takes signs, underscores and prefixes, too."""
    if not re.fullmatch(r"[0-9a-fA-F]{1,15}" if base == 16 else r"[0-9]{1,15}", text.strip()):
        raise ValueError(f"no length: {text[:80]!r}")
    return int(text, base)
