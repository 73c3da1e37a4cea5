"""OpenPGP public keys as a repository's key file has them (RFC 4880): armour, fingerprints, expiry.

No signature is verified here; that is apt's, dnf's and zypper's. A fingerprint is what tells one key from
another before any of them is told to trust it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from dataclasses import dataclass

from gpunode.errors import ConfigError

_BEGIN = "-----BEGIN PGP PUBLIC KEY BLOCK-----"
_END = "-----END PGP PUBLIC KEY BLOCK-----"
_SIGNATURE, _PUBLIC_KEY = 2, 6
_SELF_SIGNATURES = (0x10, 0x11, 0x12, 0x13, 0x1F)
_MAX_BYTES = 1 << 20  # keyrings of whole distributions have some hundred KiB
_CREATED, _EXPIRES = 2, 9  # subpackets of a signature


@dataclass(frozen=True)
class Key:
    """A primary key: its fingerprint, 40 hex digits in capitals, and when it expires, in seconds since the
    epoch; None if it never does."""

    fingerprint: str
    expires: float | None = None


def binary(data: bytes) -> bytes:
    """The packets of a key file, armored or not. `ConfigError` for anything else."""
    if len(data) > _MAX_BYTES:
        raise ConfigError(
            f"this is no repository's key: it is larger than {_MAX_BYTES >> 20} MiB",
            hint="give the repository's key, armored or binary",
        )
    if data[:1] and data[0] & 0x80:
        return data
    text = data.decode("ascii", "replace")
    if _BEGIN not in text or _END not in text:
        raise ConfigError(
            "this is no OpenPGP public key", hint="give the repository's key, armored or binary"
        )
    body = text.partition(_BEGIN)[2].partition(_END)[0].strip("\r\n").splitlines()
    blank = next((number for number, line in enumerate(body) if not line.strip()), -1)
    lines = [line.strip() for line in body[blank + 1 :] if line.strip() and not line.startswith("=")]
    try:
        return base64.b64decode("".join(lines), validate=True)
    except binascii.Error as error:
        raise ConfigError(f"the OpenPGP key is damaged: {error}", hint="fetch it again") from error


def armored(data: bytes) -> bytes:
    """The key as text, which apt, rpm and people read. Always the same for the same key."""
    packets = binary(data)
    encoded = base64.b64encode(packets).decode()
    lines = [encoded[start : start + 64] for start in range(0, len(encoded), 64)]
    total = base64.b64encode(_crc24(packets).to_bytes(3, "big")).decode()
    return "\n".join([_BEGIN, "", *lines, f"={total}", _END, ""]).encode()


def read_keys(data: bytes) -> tuple[Key, ...]:
    """The primary keys of a file, with the expiry that their newest own signature gives them.

    `ConfigError` if it is damaged, or has none of version 4.
    """
    import hashlib

    found: list[tuple[str, int, tuple[int, float | None]]] = []
    try:
        for tag, body in _packets(binary(data)):
            if tag == _PUBLIC_KEY and body[0] == 4:
                # the fingerprint is by its definition SHA-1 (RFC 4880, 12.2)
                sha1 = hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body, usedforsecurity=False)
                found.append((sha1.hexdigest().upper(), int.from_bytes(body[1:5], "big"), (-1, None)))
            elif tag == _SIGNATURE and found and body[0] == 4 and body[1] in _SELF_SIGNATURES:
                name, made, newest = found[-1]
                found[-1] = (name, made, max(newest, _validity(body, made), key=lambda one: one[0]))
    except (IndexError, ValueError) as error:
        raise ConfigError("the OpenPGP key is damaged", hint="fetch it again") from error
    if not found:
        raise ConfigError("there is no OpenPGP key of version 4 in it", hint="give the repository's own key")
    return tuple(Key(name, expires) for name, _, (_, expires) in found)


def _validity(signature: bytes, key_made: int) -> tuple[int, float | None]:
    """When the signature was made, and until when it says that the key is valid."""
    length = int.from_bytes(signature[4:6], "big")
    subpackets = dict(_subpackets(signature[6 : 6 + length]))
    created = int.from_bytes(subpackets.get(_CREATED, b""), "big")
    seconds = int.from_bytes(subpackets.get(_EXPIRES, b""), "big")
    return created, float(key_made + seconds) if seconds else None


def _packets(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(data):
        head = data[at]
        if not head & 0x80:
            raise ValueError("no packet")
        if head & 0x40:
            tag, (length, at) = head & 0x3F, _new_length(data, at + 1)
        else:
            tag, size = (head >> 2) & 0xF, 1 << (head & 3)
            if size == 8:
                raise ValueError("a packet without a length")
            length, at = int.from_bytes(data[at + 1 : at + 1 + size], "big"), at + 1 + size
        if at + length > len(data):
            raise ValueError("cut off")
        yield tag, data[at : at + length]
        at += length


def _subpackets(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(data):
        length, at = _new_length(data, at)
        yield data[at] & 0x7F, data[at + 1 : at + length]
        at += max(1, length)


def _new_length(data: bytes, at: int) -> tuple[int, int]:
    """A length of one, two or five bytes (RFC 4880, 4.2.2), and where it ends."""
    first = data[at]
    if first < 192:
        return first, at + 1
    if first < 224:
        return ((first - 192) << 8) + data[at + 1] + 192, at + 2
    if first != 255:
        raise ValueError("a length in parts")
    return int.from_bytes(data[at + 1 : at + 5], "big"), at + 5


def _crc24(data: bytes) -> int:
    """The checksum of armour (RFC 4880, 6.1)."""
    total = 0xB704CE
    for byte in data:
        total ^= byte << 16
        for _ in range(8):
            total = (total << 1) ^ (0x1864CFB if total & 0x800000 else 0)
    return total
