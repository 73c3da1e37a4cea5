"""The driver's userspace libraries, found as the dynamic linker would find them."""

from __future__ import annotations

import re

from gpunode.dataclass import dataclass
from gpunode.facts.ld_cache import CachedLibrary, parse_ld_cache
from gpunode.host import Host

NVML = "libnvidia-ml.so.1"
CUDA = "libcuda.so.1"
# ld.so looks into these without a cache entry (ld.so(8), and Debian's multiarch paths)
_TRUSTED = (
    "/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu", "/lib64", "/usr/lib64",
)  # fmt: skip
# where drivers put libraries that only work once ldconfig or an rpath knows them
_ELSEWHERE = ("/usr/lib/wsl/lib", "/run/opengl-driver/lib", "/usr/lib/nvidia", "/opt/nvidia/lib64")
_LINKED_ELSEWHERE = ("/usr/lib/wsl/lib", "/run/opengl-driver/lib")
_VERSION = re.compile(r"\.so\.(\d+\.\d+(?:\.\d+)*)$")


@dataclass(frozen=True)
class Library:
    """Where a soname leads. `version` is the driver version in the real file's name, None if it has none.

    `linked` is False for a file that exists but that ld.so wouldn't find: ldconfig hasn't seen it.
    """

    soname: str
    path: str
    real: str
    version: str | None
    linked: bool


def linked_libraries(host: Host) -> tuple[CachedLibrary, ...]:
    """What the dynamic linker's cache holds for 64-bit programs."""
    return parse_ld_cache(host.read_bytes("/etc/ld.so.cache") or b"")


def find_library(host: Host, soname: str, cache: tuple[CachedLibrary, ...] | None = None) -> Library | None:
    """The file that ``dlopen(soname)`` would open on this node, else a file nobody links to, else None.
    `cache` is `linked_libraries`, if it has been read already."""
    for entry in linked_libraries(host) if cache is None else cache:
        if entry.soname == soname and host.is_file(entry.path):
            return _library(host, soname, entry.path, linked=True)
    for directory in (*_TRUSTED, *_ELSEWHERE):
        if host.is_file(f"{directory}/{soname}"):
            linked = directory in _TRUSTED or directory in _LINKED_ELSEWHERE
            return _library(host, soname, f"{directory}/{soname}", linked=linked)
    return None


def is_compat(path: str) -> bool:
    """Whether a library is one of cuda-compat: it stands in for the driver's own and has another version."""
    return "compat" in path.split("/")[:-1] or "/cuda-compat" in path


def _library(host: Host, soname: str, path: str, *, linked: bool) -> Library:
    real = host.realpath(path)
    version = _VERSION.search(real)
    return Library(soname, path, real, version[1] if version else None, linked)
