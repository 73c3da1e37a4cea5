"""What one answer of an API server may take: so many bytes, and so long in all.

The client library's own limit of time is for each piece that is read, so whoever sends a byte now and then is
waited for without end; and an answer that has no end fills the memory.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterable
from typing import Any

import httpcore2

MAX_BYTES = 64 << 20  # 2000 nodes with their lists of images come to some 40 MiB
_WHOLE = 3  # times the limit for a piece
_Options = Iterable[Any]


class Endless(ValueError):
    """More than an API server's answer ever is, or in a form that hides how much it is."""


class Allowance:
    """What is left for the answer that is read now; `begin` starts another one. One request at a time."""

    def __init__(self) -> None:
        self._bytes = MAX_BYTES
        self._deadline = float("inf")

    def begin(self, seconds: float | None) -> None:
        self._bytes = MAX_BYTES
        self._deadline = time.monotonic() + seconds * _WHOLE if seconds else float("inf")

    def seconds(self, asked: float | None) -> float | None:
        """At most `asked`. ReadTimeout if nothing is left."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise httpcore2.ReadTimeout("the answer took too long")
        return left if asked is None or left < asked else asked

    def take(self, data: bytes) -> bytes:
        """`Endless` where it is too much."""
        self._bytes -= len(data)
        if self._bytes < 0:
            raise Endless(f"larger than {MAX_BYTES >> 20} MiB")
        return data


def bound(transport: Any, allowance: Allowance) -> None:
    """Have each connection of an httpx2.HTTPTransport read no more than `allowance` has."""
    pool = transport._pool  # httpx2 has no other way to give it a backend
    pool._network_backend = _Backend(pool._network_backend, allowance)


class _Backend(httpcore2.NetworkBackend):
    def __init__(self, inner: httpcore2.NetworkBackend, allowance: Allowance) -> None:
        self._inner = inner
        self._allowance = allowance

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: _Options | None = None,
    ) -> httpcore2.NetworkStream:
        opened = self._inner.connect_tcp(host, port, timeout, local_address, socket_options)
        return _Stream(opened, self._allowance)


class _Stream(httpcore2.NetworkStream):
    def __init__(self, inner: httpcore2.NetworkStream, allowance: Allowance) -> None:
        self._inner = inner
        self._allowance = allowance

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._allowance.take(self._inner.read(max_bytes, self._allowance.seconds(timeout)))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, timeout)

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore2.NetworkStream:
        return _Stream(self._inner.start_tls(ssl_context, server_hostname, timeout), self._allowance)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)
