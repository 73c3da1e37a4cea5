"""The dynamic linker's cache (/etc/ld.so.cache), read here so that a recorded machine needs no ldconfig.

The layout is glibc's elf/cache.c and sysdeps/generic/dl-cache.h: a 48-byte header that starts with
``glibc-ld.so.cache1.1``, entries of 24 bytes, then strings that the entries point to. Old files have another
table before it. Nothing in the file is trusted.
"""

from __future__ import annotations

import struct

from gpunode.dataclass import dataclass

MAGIC = b"glibc-ld.so.cache1.1"
_HEADER = struct.Struct("<20sII")
_HEADER_SIZE = 48
_ENTRY = struct.Struct("<iIIIQ")
_LIB64 = {0x0300, 0x0A00}  # FLAG_X8664_LIB64, FLAG_AARCH64_LIB64: 32-bit copies must not answer
_LONGEST_PATH = 4096


@dataclass(frozen=True)
class CachedLibrary:
    """One entry: the name that programs ask for and the file they get."""

    soname: str
    path: str


def parse_ld_cache(data: bytes) -> tuple[CachedLibrary, ...]:
    """Entries for 64-bit programs in the cache's order; () for anything that isn't such a cache."""
    base = data.find(MAGIC)
    if base < 0 or len(data) - base < _HEADER_SIZE:
        return ()
    _, count, _ = _HEADER.unpack_from(data, base)
    count = min(count, (len(data) - base - _HEADER_SIZE) // _ENTRY.size)
    found = []
    for position in range(count):
        flags, key, value, _, _ = _ENTRY.unpack_from(data, base + _HEADER_SIZE + position * _ENTRY.size)
        if flags & 0xFF00 not in _LIB64:
            continue
        soname, path = _string(data, base + key), _string(data, base + value)
        if soname and path.startswith("/"):
            found.append(CachedLibrary(soname, path))
    return tuple(found)


def _string(data: bytes, start: int) -> str:
    end = data.find(b"\0", start, start + _LONGEST_PATH)
    return data[start:end].decode("utf-8", "surrogateescape") if end >= 0 else ""


def build_ld_cache(libraries: tuple[CachedLibrary, ...]) -> bytes:
    """The inverse, for recorded machines and tests: a cache of 64-bit x86 entries."""
    strings = bytearray()
    start = _HEADER_SIZE + len(libraries) * _ENTRY.size
    entries = b""
    for library in libraries:
        offsets = []
        for text in (library.soname, library.path):
            offsets.append(start + len(strings))
            strings += text.encode("utf-8", "surrogateescape") + b"\0"
        entries += _ENTRY.pack(0x0303, *offsets, 0, 0)
    header = _HEADER.pack(MAGIC, len(libraries), len(strings))
    return header.ljust(_HEADER_SIZE, b"\0") + entries + bytes(strings)
