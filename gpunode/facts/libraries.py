"""The driver's userspace libraries, found as the dynamic linker or a platform's GPU containers find them."""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

from gpunode.errors import GpunodeError
from gpunode.gpu.library_paths import CUDA, DRIVER_ROOT, NVML, PLATFORM, STRAY, SYSTEM
from gpunode.host import Host

# The dynamic linker's cache (/etc/ld.so.cache), read here so that a recorded machine needs no ldconfig.
#
# The layout is glibc's elf/cache.c and sysdeps/generic/dl-cache.h: a 48-byte header that starts with
# ``glibc-ld.so.cache1.1``, entries of 24 bytes, then strings that the entries point to. Old files have
# another table before it. Nothing in the file is trusted.

MAGIC = b"glibc-ld.so.cache1.1"
_HEADER = struct.Struct("<20sII")
_HEADER_SIZE = 48
_ENTRY = struct.Struct("<iIIIQ")
_LIB64 = {0x0300, 0x0A00}  # FLAG_X8664_LIB64, FLAG_AARCH64_LIB64: 32-bit copies must not match
_LONGEST_PATH = 4096


class CachedLibrary(NamedTuple):
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
    result = []
    for position in range(count):
        flags, key, value, _, _ = _ENTRY.unpack_from(data, base + _HEADER_SIZE + position * _ENTRY.size)
        if flags & 0xFF00 not in _LIB64:
            continue
        soname, path = _string(data, base + key), _string(data, base + value)
        if soname and path.startswith("/"):
            result.append(CachedLibrary(soname, path))
    return tuple(result)


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


__all__ = ["CUDA", "NVML", "DriverLibrary", "find_library", "is_compat", "library_in", "linked_libraries"]

_VERSION = re.compile(r"\.so\.(\d+\.\d+(?:\.\d+)*)$")


class DriverLibrary(NamedTuple):
    """The file behind a soname. `version` is the driver version in the real file's name, None if it has none.

    `linked` is False for a file that neither ld.so nor a GPU container finds: ldconfig hasn't run. `root` is
    the root of the driver container that has it, "" for one of the node's own.
    """

    soname: str
    path: str
    real: str
    version: str | None
    linked: bool
    root: str = ""


def linked_libraries(host: Host) -> tuple[CachedLibrary, ...]:
    """64-bit entries of the dynamic linker's cache."""
    return parse_ld_cache(host.read_bytes("/etc/ld.so.cache") or b"")


def find_library(host: Host, soname: str, cache: tuple[CachedLibrary, ...]) -> DriverLibrary | None:
    """The file that ``dlopen(soname)`` opens on this node, else the one that the platform or the GPU operator
    gives to containers, else one that ldconfig hasn't seen, else None. `cache` is `linked_libraries`.
    """
    for entry in cache:
        if entry.soname == soname and host.is_file(entry.path):
            return _library(host, soname, entry.path)
    for directory in (*SYSTEM, *PLATFORM):
        if host.is_file(f"{directory}/{soname}"):
            return _library(host, soname, f"{directory}/{soname}")
    path = library_in(host, DRIVER_ROOT, soname)
    if path:
        return _library(host, soname, path, root=DRIVER_ROOT)
    for directory in STRAY:
        if host.is_file(f"{directory}/{soname}"):
            return _library(host, soname, f"{directory}/{soname}", linked=False)
    return None


def library_in(host: Host, root: str, soname: str, first: tuple[str, ...] = ()) -> str:
    """Path of a library below another root directory, in the directories `first` and then in the system's; ""
    if it isn't there or can't be searched."""
    for directory in (*first, *SYSTEM):
        path = f"{root}{directory.rstrip('/')}/{soname}"
        try:
            if host.is_file(path):
                return path
        except GpunodeError:
            continue
    return ""


def is_compat(path: str) -> bool:
    """Whether a library belongs to cuda-compat: it replaces the driver's own and has another version."""
    return "compat" in path.split("/")[:-1] or "/cuda-compat" in path


def _library(host: Host, soname: str, path: str, *, linked: bool = True, root: str = "") -> DriverLibrary:
    real = host.realpath(path)
    version = _VERSION.search(real)
    return DriverLibrary(soname, path, real, version[1] if version else None, linked, root)
