"""Reader for an untrusted tar archive: `tarfile` with limits.

tarfile alone takes minutes for a kilobyte of crafted extended headers: its cost grows with the square of a
header's size, it recurses from one header to the next, and it reads the map of a sparse file into memory.
So every header is checked before tarfile reads what belongs to it. Nothing is extracted by tarfile: the
caller decides about each path, which is stricter than tarfile's filter "data".
"""

from __future__ import annotations

import re
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, cast

_MAX_HEADER_BYTES = 4 << 10  # of one extended header; a path takes up to 2 KiB
_LONG_NUMBER = re.compile(rb"[0-9]{256}")  # longer than any file name
_MAX_EXTENDED_HEADERS = 4  # before one member
_CHUNK_BYTES = 1 << 20
_EXTENDED = (tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_REFUSED = (tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_SPARSE)
_ACCEPTED = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE)
_KINDS = {
    tarfile.LNKTYPE: "a link",
    tarfile.SYMTYPE: "a link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a device",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
    tarfile.XGLTYPE: "a header for the whole archive",
}


class Refused(Exception):
    """The reason why an archive is refused."""


@dataclass(frozen=True)
class Limits:
    """Limits of an archive: bytes and members in total, bytes of one file, seconds to read it."""

    total_bytes: int
    file_bytes: int
    members: int
    seconds: float


def members(stream: IO[bytes], limits: Limits) -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
    """Each file with its content, and each directory with None. Content is read before the next member.

    `Refused` or `tarfile.TarError` for any other kind of member, a damaged archive, and beyond `limits`.
    """
    source = _Stream(stream, limits)

    class Member(tarfile.TarInfo):
        """A header that is checked before tarfile acts on it."""

        @classmethod
        def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Member:
            member = _parsed(super().frombuf, buf, encoding, errors)
            source.check(member)
            return cast("Member", member)

    with _damaged():  # which reads the first member
        archive = tarfile.TarFile(
            fileobj=cast("IO[bytes]", source), tarinfo=Member, encoding="utf-8", errors="surrogateescape"
        )
    number = 0
    while True:
        with _damaged():
            member = archive.next()
        if member is None:
            break
        cast("Any", archive).members.clear()  # each keeps its extended headers
        number += 1
        if number > limits.members:
            raise Refused(f"it has more than {limits.members} entries")
        if member.type not in _ACCEPTED:
            raise _unwanted(member)
        if member.isreg() and not 0 <= member.size <= limits.file_bytes:
            raise Refused(f"{member.name[:100]!a} is larger than {limits.file_bytes >> 20} MiB")
        yield member, archive.extractfile(member)
    while source.read(_CHUNK_BYTES):  # to the end of the compressed stream, where its check sum is compared
        continue


@contextmanager
def _damaged() -> Iterator[None]:
    """tarfile doesn't catch every error that int() and re raise for a crafted number in a header."""
    try:
        yield
    except (ArithmeticError, LookupError, ValueError) as error:
        raise Refused("its headers are damaged") from error


def _parsed(parse: Any, block: bytes | bytearray, encoding: str, errors: str) -> tarfile.TarInfo:
    """`TarInfo.frombuf`, where tarfile would take a damaged header for the end of the archive."""
    if len(block) != tarfile.BLOCKSIZE:
        raise Refused("it is truncated")
    try:
        return cast("tarfile.TarInfo", parse(block, encoding, errors))
    except tarfile.HeaderError as error:
        if any(block):
            raise Refused("it is not a tar archive, or is damaged") from error
        raise


def _unwanted(member: tarfile.TarInfo) -> Refused:
    what = _KINDS.get(member.type, "of an unknown kind")
    return Refused(f"{member.name[:100]!a} is {what}, but a bundle contains only files and directories")


class _Stream:
    """The decompressed archive as a file that is read forward only, within `limits`."""

    def __init__(self, stream: IO[bytes], limits: Limits) -> None:
        self._stream = stream
        self._limits = limits
        self._deadline = time.monotonic() + limits.seconds
        self._position = 0
        self._extended = 0  # headers since the last member
        self._pax = False  # the next bytes are a PAX header

    def check(self, member: tarfile.TarInfo) -> None:
        """`Refused` for a header of which tarfile must not read the content."""
        self._pax = member.type == tarfile.XHDTYPE
        if member.size < 0:
            raise Refused("its headers contain a negative number")
        if member.type in _REFUSED:
            raise _unwanted(member)
        if member.type in _EXTENDED:
            self._extended += 1
            if member.size > _MAX_HEADER_BYTES or self._extended > _MAX_EXTENDED_HEADERS:
                raise Refused("its headers are too long")
        else:
            self._extended = 0

    def read(self, size: int) -> bytes:
        if time.monotonic() > self._deadline:
            raise Refused(f"reading it takes more than {self._limits.seconds:g} s")
        data = self._stream.read(min(size, self._limits.total_bytes - self._position + 1))
        self._position += len(data)
        if self._position > self._limits.total_bytes:
            raise Refused(f"it unpacks to more than {self._limits.total_bytes >> 20} MiB")
        if self._pax:
            self._pax = False
            if b"GNU.sparse" in data:
                raise Refused("it contains a sparse file, but a bundle contains only files and directories")
            if _LONG_NUMBER.search(data):
                raise Refused("its headers contain a number that is too long")
        return data

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> None:
        if position < self._position:
            raise Refused("its headers point backwards")
        while self._position < position:
            if not self.read(min(_CHUNK_BYTES, position - self._position)):
                raise Refused("it is truncated")
