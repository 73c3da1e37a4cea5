"""`Host`'s drawer for support bundles: the entries of a tar stream that a stranger made.

The standard library's reader takes minutes for a kilobyte of odd extended headers, and recurses from one to
the next. This one knows what such a bundle is made of (POSIX ustar and pax, GNU's long names), each with a
limit, and refuses all else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_BLOCK = 512
_MOST_HEADER = 64 << 10
_MOST_HEADERS = 4  # extended ones before one entry
_PIECE = 1 << 20
_FILE, _DIRECTORY, _LONG_NAME, _PAX, _PAX_FOR_ALL = b"0", b"5", b"L", b"x", b"g"
_KINDS = {b"1": "a link", b"2": "a link", b"3": "a device", b"4": "a device", b"6": "a device"}


class Refused(Exception):
    """Why this can't be a bundle."""


@dataclass(frozen=True)
class Entry:
    """One file (`directory` is False) or directory. `read` gives the next piece of it, empty at its end; what
    isn't read before the next entry is asked for is passed over."""

    name: str
    directory: bool
    executable: bool
    changed: float
    size: int
    read: Any


class _Reader:
    """Bytes of the stream: as many as asked for, or `Refused`."""

    def __init__(self, stream: Any, most: int) -> None:
        self._stream = stream
        self._left = self._most = most
        self.rest = 0  # of the entry that is being read

    def take(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self._stream.read(min(size - len(data), self._left + 1))
            if not piece:
                raise Refused("it ends in the middle")
            self._left -= len(piece)
            if self._left < 0:
                raise Refused(f"it unpacks to more than {self._most >> 20} MiB")
            data += piece
        return data

    def piece(self) -> bytes:
        data = self.take(min(_PIECE, self.rest))
        self.rest -= len(data)
        return data

    def drain(self) -> None:
        """To the end of the compressed stream, whose check sum is compared there."""
        while piece := self._stream.read(_PIECE):
            self._left -= len(piece)
            if self._left < 0:
                raise Refused(f"it unpacks to more than {self._most >> 20} MiB")


def entries(stream: Any, most_bytes: int, most_file: int, most_entries: int) -> Iterator[Entry]:
    """Each file and directory; `Refused` for anything else, for a damaged one, and beyond these limits."""
    reader = _Reader(stream, most_bytes)
    told: dict[str, str] = {}
    headers = number = 0
    while any(block := reader.take(_BLOCK)):
        kind, size = _kind(block), _number(block[124:136])
        if kind in (_LONG_NAME, _PAX, _PAX_FOR_ALL):
            headers += 1
            if size > _MOST_HEADER or headers > _MOST_HEADERS:
                raise Refused("its headers are too long")
            text = reader.take(_padded(size))[:size]
            if kind != _PAX_FOR_ALL:  # such a one tells of the archive, not of an entry
                told |= _pax(text) if kind == _PAX else {"path": _text(text)}
            continue
        number += 1
        if number > most_entries:
            raise Refused(f"it has more than {most_entries} entries")
        entry = _entry(block, kind, size, told, reader)
        if entry.size > most_file:
            raise Refused(f"{entry.name[:100]!a} is larger than {most_file >> 20} MiB")
        reader.rest = entry.size
        yield entry
        while reader.rest:
            reader.piece()
        reader.take(_padded(entry.size) - entry.size)
        told, headers = {}, 0
    reader.drain()


def _kind(block: bytes) -> bytes:
    """The type of the entry behind this header, whose check sum is compared first."""
    wanted = _number(block[148:156])
    if sum(block) - sum(block[148:156]) + 8 * ord(" ") != wanted:
        raise Refused("it is no tar archive, or damaged")
    return block[156:157]


def _entry(block: bytes, kind: bytes, size: int, told: dict[str, str], reader: _Reader) -> Entry:
    prefix = _text(block[345:500]) if block[257:263] == b"ustar\0" else ""
    name = told.get("path") or (f"{prefix}/" if prefix else "") + _text(block[:100])
    if any(key.startswith("GNU.sparse") for key in told):
        raise Refused(f"{name[:100]!a} is a sparse file, and a bundle holds files and directories only")
    if kind not in (_FILE, b"\0", _DIRECTORY):
        what = _KINDS.get(kind, "of an unknown kind")
        raise Refused(f"{name[:100]!a} is {what}, and a bundle holds files and directories only")
    directory = kind == _DIRECTORY or (kind == b"\0" and name.endswith("/"))
    if "size" in told:
        size = _decimal(told["size"])
    try:
        changed = float(told.get("mtime") or _number(block[136:148]))
    except ValueError as error:
        raise Refused(f"{name[:100]!a} was changed at no time") from error
    executable = _number(block[100:108]) & 0o111 != 0
    return Entry(name, directory, executable, changed, 0 if directory else size, reader.piece)


def _pax(text: bytes) -> dict[str, str]:
    """The records ``LENGTH KEY=VALUE`` of an extended header, as far as anything is done with them."""
    found = {}
    while text:
        length, blank, _ = text[:20].partition(b" ")
        end = _decimal(length.decode("latin-1")) if blank else 0
        record = text[len(length) + 1 : end]
        key, equals, value = record.partition(b"=")
        if not equals or end > len(text) or record[-1:] != b"\n":
            raise Refused("its headers are damaged")
        if key in (b"path", b"size", b"mtime") or key.startswith(b"GNU.sparse"):
            found[_text(key)] = value[:-1].decode("utf-8", "surrogateescape")
        text = text[end:]
    return found


def _decimal(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise Refused("its headers hold a number that is none")
    return int(text)


def _number(field: bytes) -> int:
    """Octal digits, or a binary number behind a first bit that is set; none is negative."""
    if field[0] & 0x80:
        if field[0] != 0x80:
            raise Refused("its headers hold a negative number")
        return int.from_bytes(field[1:], "big")
    digits = field.partition(b"\0")[0].strip()
    if digits.strip(b"01234567"):
        raise Refused("it is no tar archive, or damaged")
    return int(digits or b"0", 8)


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK
