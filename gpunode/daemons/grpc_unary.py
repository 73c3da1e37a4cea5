"""One unary gRPC call over a unix socket without the gRPC library, which takes longer to import than to call.

It speaks just enough HTTP/2 (RFC 9113) for one request on one connection, and looks at no response header: a
call that brings a whole message and ends in order has succeeded, for a Go server sends none with an error.
For anything else `None` is given, and the caller asks again with the library, which knows the error.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from gpunode.errors import DaemonError
from gpunode.host import Host

if TYPE_CHECKING:
    import socket

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 4, 6, 8
_END_STREAM, _ACK, _END_HEADERS, _PADDED = 1, 1, 4, 8
_INITIAL_WINDOW = 4  # the identifier of that setting
_STREAM = 1
_LARGEST = 16 << 20  # bytes of an answer; it is also the window that the server may fill
# names of HPACK's static table (RFC 7541, appendix A), as literals that are put into no table
_PATH, _AUTHORITY, _CONTENT_TYPE, _NEW_NAME = b"\x04", b"\x01", b"\x0f\x10", b"\x00"
_POST_OVER_HTTP = b"\x83\x86"


def unary_call(host: Host, path: str, method: str, request: bytes, timeout: float) -> bytes | None:
    """The answer to a gRPC `method` (``/package.Service/Method``) at a socket, both as protobuf's bytes.

    None if there was no whole answer within about `timeout` seconds, whatever the reason.
    """
    try:
        with host.connect_unix(path, timeout) as connection:
            read = functools.partial(_read, connection, host, host.monotonic() + timeout)
            connection.sendall(_opening(method, request))
            return _message(_answer(read, connection.sendall))
    except (DaemonError, OSError, ValueError):
        return None


def _opening(method: str, request: bytes) -> bytes:
    """Everything that the client has to say: preface, settings, a wide window, headers and the message."""
    headers = b"".join(
        [
            _POST_OVER_HTTP,
            _PATH + _string(method),
            _AUTHORITY + _string("localhost"),
            _CONTENT_TYPE + _string("application/grpc"),
            _NEW_NAME + _string("te") + _string("trailers"),
        ]
    )
    return b"".join(
        [
            _PREFACE,
            _frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW, _LARGEST)),
            _frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", _LARGEST)),
            _frame(_HEADERS, _END_HEADERS, _STREAM, headers),
            _frame(_DATA, _END_STREAM, _STREAM, struct.pack(">BI", 0, len(request)) + request),
        ]
    )


def _string(text: str) -> bytes:
    """A literal of less than 127 bytes, not Huffman coded."""
    data = text.encode()
    return bytes([len(data)]) + data


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _answer(read: Callable[[int], bytes], send: Callable[[bytes], None]) -> bytes:
    """What the server sends on the stream until it ends it; `ValueError` if it resets or goes away."""
    found = b""
    while len(found) <= _LARGEST:
        length, kind, flags, stream = _header(read(9))
        payload = read(length)
        if kind == _SETTINGS and not flags & _ACK:
            send(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            send(_frame(_PING, _ACK, 0, payload))
        elif stream == _STREAM and kind == _DATA:
            found += _unpadded(payload) if flags & _PADDED else payload
        elif kind not in (_HEADERS, _SETTINGS, _PING, _WINDOW_UPDATE):
            raise ValueError("the server ended the stream or the connection")
        if stream == _STREAM and kind in (_DATA, _HEADERS) and flags & _END_STREAM:
            return found
    raise ValueError("no end of the answer")


def _unpadded(payload: bytes) -> bytes:
    """The first byte says how many at the end are padding."""
    if not payload or payload[0] >= len(payload):
        raise ValueError("more padding than there is payload")
    return payload[1 : len(payload) - payload[0]]


def _header(data: bytes) -> tuple[int, int, int, int]:
    """Length, type, flags and stream of a frame."""
    kind, flags, stream = struct.unpack(">BBI", data[3:])
    length = int.from_bytes(data[:3], "big")
    if length > _LARGEST:
        raise ValueError("a frame larger than any that was allowed")
    return length, kind, flags, stream & 0x7FFFFFFF


def _read(connection: socket.socket, host: Host, deadline: float, length: int) -> bytes:
    """Exactly `length` bytes, however slowly they drip; `TimeoutError` after the deadline."""
    data = bytearray()
    while len(data) < length:
        left = deadline - host.monotonic()
        if left <= 0:
            raise TimeoutError("no whole answer in time")
        connection.settimeout(left)
        more = connection.recv(length - len(data))
        if not more:
            raise ValueError("the server closed the connection")
        data += more
    return bytes(data)


def _message(data: bytes) -> bytes | None:
    """The one message of an answer; None if there is none, as for every error, or it is compressed."""
    if len(data) < 5 or data[0] != 0 or len(data) - 5 != int.from_bytes(data[1:5], "big"):
        return None
    return data[5:]


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of a protobuf message; `ValueError` if it is broken."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        if not key >> 3:
            raise ValueError("a field without a number")
        if key & 7 == 0:
            value, position = _varint(data, position)
            yield key >> 3, value
            continue
        if key & 7 != 2:
            raise ValueError("a field of fixed width, which the CRI's status has none of")
        size, position = _varint(data, position)
        if position + size > len(data):
            raise ValueError("a field longer than its message")
        yield key >> 3, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(data) and shift < 70:
        byte = data[position]
        value, shift, position = value | (byte & 0x7F) << shift, shift + 7, position + 1
        if byte < 0x80:
            return value, position
    raise ValueError("a number that does not end")
