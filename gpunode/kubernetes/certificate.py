"""Who a client certificate speaks for, and until when (X.509, RFC 5280; DER, X.690).

Only what a message needs is read, and nothing is verified: that is the server's part.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.DOTALL)
_VERSION, _UTC_TIME, _OID = 0xA0, 0x17, 0x06
_COMMON_NAME = bytes((0x55, 0x04, 0x03))  # 2.5.4.3
_NODE = "system:node:"


@dataclass(frozen=True)
class Certificate:
    """`name` is the user to Kubernetes (the common name), `ends` in seconds since the epoch."""

    name: str
    ends: float

    @property
    def node(self) -> str:
        """The node whose kubelet this is; empty for any other user."""
        return self.name.removeprefix(_NODE) if self.name.startswith(_NODE) else ""


def first_in(pem: str) -> Certificate | None:
    """Of the first certificate in a text in PEM, which is the client's own; None where there is none."""
    found = _PEM.search(pem)
    if found is None:
        return None
    try:
        ((_, certificate),) = _parts(base64.b64decode(found[1]))
        body = [part for part in _parts(next(_parts(certificate))[1]) if part[0] != _VERSION]
        _serial, _algorithm, _issuer, validity, subject = body[:5]
        return Certificate(_common_name(subject[1]), _time(*list(_parts(validity[1]))[1]))
    except (ValueError, IndexError, StopIteration):
        return None


def _parts(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Tag and content of each value in a row. `IndexError`, `ValueError` for what isn't DER."""
    at = 0
    while at < len(data):
        tag, length, at = data[at], data[at + 1], at + 2
        if length & 0x80:
            count = length & 0x7F
            length, at = int.from_bytes(data[at : at + count], "big"), at + count
        if at + length > len(data):
            raise ValueError("a value that is longer than its certificate")
        yield tag, data[at : at + length]
        at += length


def _common_name(subject: bytes) -> str:
    for _, relative in _parts(subject):
        for _, pair in _parts(relative):
            kind, value = list(_parts(pair))[:2]
            if kind == (_OID, _COMMON_NAME):
                return value[1].decode(errors="replace")
    return ""


def _time(tag: int, content: bytes) -> float:
    """RFC 5280, 4.1.2.5: two digits of a year stand for 1950 to 2049."""
    text = content.decode("ascii")
    if tag == _UTC_TIME:
        text = f"{'19' if text[:2] >= '50' else '20'}{text}"
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
