"""Fingerprints and armor of the OpenPGP public keys in a repository's key file (RFC 4880).

It verifies no signature and no expiry: apt, dnf and zypper do that. The fingerprint identifies a key before
one of them is configured to trust it. gpg isn't used, because Debian's and Ubuntu's minimal installations
lack it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator

from gpunode.errors import ConfigError

_BEGIN = "-----BEGIN PGP PUBLIC KEY BLOCK-----"
_END = "-----END PGP PUBLIC KEY BLOCK-----"
_PUBLIC_KEY = 6
_MAX_BYTES = 1 << 20  # keyrings of whole distributions have some hundred KiB


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
    """The key as text, as apt and rpm read it. Always the same for the same key."""
    packets = binary(data)
    encoded = base64.b64encode(packets).decode()
    lines = [encoded[start : start + 64] for start in range(0, len(encoded), 64)]
    total = base64.b64encode(_crc24(packets).to_bytes(3, "big")).decode()
    return "\n".join([_BEGIN, "", *lines, f"={total}", _END, ""]).encode()


def fingerprints(data: bytes) -> tuple[str, ...]:
    """The fingerprints of the primary keys in a file: 40 hex digits in capitals each.

    `ConfigError` if it is damaged, or has no key of version 4.
    """
    import hashlib

    try:
        keys = [body for tag, body in _packets(binary(data)) if tag == _PUBLIC_KEY and body[0] == 4]
    except (IndexError, ValueError) as error:
        raise ConfigError("the OpenPGP key is damaged", hint="fetch it again") from error
    if not keys:
        raise ConfigError("there is no OpenPGP key of version 4 in it", hint="give the repository's own key")
    # SHA-1 by definition (RFC 4880, 12.2)
    hashes = (
        hashlib.sha1(b"\x99" + len(key).to_bytes(2, "big") + key, usedforsecurity=False) for key in keys
    )
    return tuple(one.hexdigest().upper() for one in hashes)


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
    """The checksum of an armor (RFC 4880, 6.1)."""
    total = 0xB704CE
    for byte in data:
        total ^= byte << 16
        for _ in range(8):
            total = (total << 1) ^ (0x1864CFB if total & 0x800000 else 0)
    return total
