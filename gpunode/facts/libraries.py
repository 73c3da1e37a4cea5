"""The driver's userspace libraries, found as the dynamic linker or a platform's GPU containers find them."""

from __future__ import annotations

import re

from gpunode.dataclass import dataclass
from gpunode.errors import GpunodeError
from gpunode.facts.ld_cache import CachedLibrary, parse_ld_cache
from gpunode.gpu.library_paths import CUDA, DRIVER_ROOT, NVML, PLATFORM, STRAY, SYSTEM
from gpunode.host import Host

__all__ = ["CUDA", "NVML", "Library", "find_library", "is_compat", "library_in", "linked_libraries"]

_VERSION = re.compile(r"\.so\.(\d+\.\d+(?:\.\d+)*)$")


@dataclass(frozen=True)
class Library:
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
    """What the dynamic linker's cache holds for 64-bit programs."""
    return parse_ld_cache(host.read_bytes("/etc/ld.so.cache") or b"")


def find_library(host: Host, soname: str, cache: tuple[CachedLibrary, ...] | None = None) -> Library | None:
    """The file that ``dlopen(soname)`` opens on this node, else the one that the platform or the GPU operator
    gives to containers, else one that ldconfig hasn't seen, else None.

    `cache` is `linked_libraries`, if it has been read already.
    """
    for entry in linked_libraries(host) if cache is None else cache:
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
    if it isn't there or can't be looked for."""
    for directory in (*first, *SYSTEM):
        path = f"{root}{directory.rstrip('/')}/{soname}"
        try:
            if host.is_file(path):
                return path
        except GpunodeError:
            continue
    return ""


def is_compat(path: str) -> bool:
    """Whether a library is one of cuda-compat: it stands in for the driver's own and has another version."""
    return "compat" in path.split("/")[:-1] or "/cuda-compat" in path


def _library(host: Host, soname: str, path: str, *, linked: bool = True, root: str = "") -> Library:
    real = host.realpath(path)
    version = _VERSION.search(real)
    return Library(soname, path, real, version[1] if version else None, linked, root)
