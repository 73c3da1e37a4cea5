"""The driver's files that a container needs: libraries of the running version, programs, firmware."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from gpunode.errors import PreconditionError
from gpunode.facts.driver import firmware_directories
from gpunode.facts.libraries import parse_ld_cache
from gpunode.facts.system import kernel_release
from gpunode.gpu.library_paths import PROGRAM_DIRECTORIES, library_directories
from gpunode.host import Host

PROGRAMS = (
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
    "nvidia-imex",
    "nvidia-imex-ctl",
)
SOCKETS = ("/run/nvidia-persistenced/socket", "/run/nvidia-fabricmanager/socket")
_MPS = "/tmp/nvidia-mps"  # noqa: S108 - where CUDA itself looks for the MPS daemon
_ARCHITECTURES = {"/lib/ld-linux-aarch64.so.1": "aarch64"}
# modules of Vulkan, GBM and VDPAU that belong to the driver without its version in their names
_UNVERSIONED = re.compile(
    r"libnvidia-egl-(gbm|wayland|wayland2|xcb|xlib)\.so\.\d+\.\d+|libnvidia-nvvm70\.so\.\d+"
)
_BESIDE = ("gbm", "vdpau")
# Names that the toolkit gives these libraries in every container, also where the host lacks the link (its
# symlinks.go and graphics.go): programs load libcuda.so, GLVND an indirect library, GBM a backend
_ALWAYS_LINKED = {
    "libcuda": "libcuda.so",
    "libGLX_nvidia": "libGLX_indirect.so.0",
    "libnvidia-opticalflow": "libnvidia-opticalflow.so",
    "libnvidia-allocator": "gbm/nvidia-drm_gbm.so",
    "libnvidia-vulkan-producer": "libnvidia-vulkan-producer.so",
}
_ALIASES = ("libGLX_indirect",)
# Files that OpenGL, Vulkan, OpenCL and Xorg look up by a fixed path; all are optional. EGL and GLVND read
# /usr/share, Vulkan and OpenCL /etc too: both are searched for all of them
_GRAPHICS_ROOTS = ("/etc", "/usr/share")
_GRAPHICS_FILES = (
    "OpenCL/vendors/nvidia.icd",
    "X11/xorg.conf.d/10-nvidia.conf",
    "X11/xorg.conf.d/nvidia-drm-outputclass.conf",
    "egl/egl_external_platform.d/09_nvidia_wayland2.json",
    "egl/egl_external_platform.d/10_nvidia_wayland.json",
    "egl/egl_external_platform.d/15_nvidia_gbm.json",
    "egl/egl_external_platform.d/20_nvidia_xcb.json",
    "egl/egl_external_platform.d/20_nvidia_xlib.json",
    "glvnd/egl_vendor.d/10_nvidia.json",
    "nvidia/nvoptix.bin",
    "vulkan/icd.d/nvidia_icd.json",
    "vulkan/icd.d/nvidia_layers.json",
    "vulkan/implicit_layer.d/nvidia_layers.json",
)
_XORG = ("/usr/lib/xorg/modules", "/usr/lib64/xorg/modules")
_MODULES = ("drivers", "extensions", "updates/drivers", "updates/extensions")


class Library(NamedTuple):
    """One shared object. `path` is its real path, `directory` the library directory that contains it or a
    link to it.

    `links` are other names that lead to it, relative to such a directory: ``libcuda.so.1``,
    ``gbm/nvidia-drm_gbm.so``. A container gets them all, the host need not have them.
    """

    path: str
    directory: str
    links: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


class DriverFiles(NamedTuple):
    """Paths on the node, without `root`, which is their root directory; `root` is "" for the node's own
    files.

    `links` of the libraries are relative to their directory, such as ``gbm/nvidia-drm_gbm.so``. `files` are
    mounted at the same path. `sockets` are unix sockets and the directory of MPS: the container's path, and
    the path on the node, including `root`.
    """

    version: str
    architecture: str
    libraries: tuple[Library, ...]
    files: tuple[tuple[str, str], ...] = ()
    sockets: tuple[tuple[str, str], ...] = ()
    root: str = ""


def read_driver_files(host: Host, version: str, root: str = "", search: tuple[str, ...] = ()) -> DriverFiles:
    """Search below `root` for the driver `version`; `search` are additional library directories, which come
    first.

    `PreconditionError` if libcuda of this version is missing: no container could use CUDA.
    """
    there = Host(host.path(root), environ={}) if root else host
    architecture = next((name for path, name in _ARCHITECTURES.items() if there.exists(path)), "x86_64")
    directories = tuple(_directories(there, architecture, search))
    libraries = tuple(_libraries(there, directories, version))
    if not any(library.name.startswith("libcuda.so.") for library in libraries):
        searched = ", ".join(root + place for place in directories) or "the library directories"
        raise PreconditionError(
            f"libcuda.so.{version} of the running driver is in none of {searched}",
            hint="name its directory with --library-path, or find out why it is missing: "
            "gpunode doctor --only driver-lib-mismatch --only libcuda-missing",
            code="no-libcuda",
        )
    files = (
        *_programs(there),
        *_firmware(there, host, version),
        *_graphics_files(there, directories, architecture, version),
    )
    # the daemons run in the driver's container, or on the node itself
    sockets = dict(daemon_sockets(host)) | dict(daemon_sockets(there, root))
    return DriverFiles(version, architecture, libraries, files, tuple(sockets.items()), root)


def _directories(host: Host, architecture: str, search: tuple[str, ...]) -> Iterator[str]:
    """Directories of 64-bit libraries, real and each once; those of 32-bit programs are separate on all
    systems.

    Debian keeps some in a directory behind its alternatives; ld.so's cache lists those and any other.
    """
    cache = parse_ld_cache(host.read_bytes("/etc/ld.so.cache") or b"")
    cached = [entry.path for entry in cache if entry.soname.startswith(("libcuda.so", "libnvidia-ml.so"))]
    resolved = [host.realpath(path) for path in cached]
    places = [
        *search,
        *library_directories(architecture),
        *(path.rpartition("/")[0] for path in (*cached, *resolved)),
    ]
    real = (host.realpath(place.rstrip("/") or "/") for place in places if host.is_dir(place))
    yield from dict.fromkeys(real)


def _libraries(host: Host, directories: tuple[str, ...], version: str) -> Iterator[Library]:
    """Every library of this version, each once, with the names that lead to it."""
    owners: dict[str, str] = {}
    links: dict[str, set[str]] = {}
    listed = {
        place: host.listdir(place) for directory in directories for place in (directory, *_beside(directory))
    }
    stems = {
        name.partition(".so")[0] for names in listed.values() for name in names if _is_driver(name, version)
    }
    for directory in directories:
        for place in (directory, *_beside(directory)):
            for name in listed[place]:
                # resolving every library of a distribution would take longer than everything else
                known = place != directory or name.partition(".so")[0] in {*stems, *_ALIASES}
                if not known or ".so" not in name or not name.isascii():
                    continue
                real = host.realpath(f"{place}/{name}")
                if _is_driver(real.rpartition("/")[2], version) and host.is_file(real):
                    owners.setdefault(real, directory)
                    links.setdefault(real, set()).add(f"{place}/{name}".removeprefix(f"{directory}/"))
    names: set[str] = set()
    for real, directory in owners.items():
        name = real.rpartition("/")[2]
        if name not in names:  # the first directory's copy counts, as for the loader
            names.add(name)
            links[real] |= {_ALWAYS_LINKED.get(name.partition(".so.")[0], name)}
            yield Library(real, directory, tuple(sorted(links[real] - {name})))


def _beside(directory: str) -> Iterator[str]:
    return (f"{directory}/{part}" for part in _BESIDE)


def _is_driver(name: str, version: str) -> bool:
    return name.endswith(f".so.{version}") or _UNVERSIONED.match(name) is not None


def _programs(host: Host) -> Iterator[tuple[str, str]]:
    """Container path and real path of each program; Debian's are links through its alternatives directory."""
    for name in PROGRAMS:
        paths = (f"{place}/{name}" for place in PROGRAM_DIRECTORIES)
        path = next((path for path in paths if host.executable(path)), None)
        if path is not None:
            yield path, host.realpath(path)


def _firmware(there: Host, host: Host, version: str) -> Iterator[tuple[str, str]]:
    """gsp*.bin in the first directory that has it."""
    for place in firmware_directories(host, kernel_release(host)):
        files = there.glob(f"{place}/nvidia/{version}", "gsp*.bin")
        if files:
            yield from ((path, there.realpath(path)) for path in files)
            return


def _graphics_files(
    host: Host, libraries: Iterable[str], architecture: str, version: str
) -> Iterator[tuple[str, str]]:
    """Container path and real path of each existing file; `libraries` are the library directories."""
    icd = f"vulkan/icd.d/nvidia_icd.{architecture}.json"
    fixed = (f"{root}/{name}" for root in _GRAPHICS_ROOTS for name in (*_GRAPHICS_FILES, icd))
    for path in (*fixed, "/usr/bin/nvidia-xconfig"):
        if host.is_file(path):
            yield path, host.realpath(path)
    yield from _xorg_modules(host, libraries, version)


def _xorg_modules(host: Host, libraries: Iterable[str], version: str) -> Iterator[tuple[str, str]]:
    """Xorg's driver and its GLX module, in the first directory that has it; the module also by the name that
    Xorg loads, which the host may lack.
    """
    directories = tuple(
        directory for place in libraries for directory in (f"{place}/nvidia/xorg", f"{place}/xorg/modules")
    )
    places = [f"{place}/{part}" for place in (*directories, *_XORG) for part in ("", *_MODULES)]
    for name in ("nvidia_drv.so", f"libglxserver_nvidia.so.{version}"):
        paths = (f"{place.rstrip('/')}/{name}" for place in places)
        path = next((path for path in paths if host.is_file(path)), None)
        if path is not None:
            yield path, host.realpath(path)
            if path.endswith(f".{version}"):
                yield path.removesuffix(f".{version}"), host.realpath(path)


def daemon_sockets(host: Host, root: str = "") -> Iterator[tuple[str, str]]:
    """Sockets of NVIDIA's daemons: the container's path, and the node's, where `host` is below `root`.

    MPS's directory is in /tmp, where any user could have made one: only root's counts.
    """
    yield from ((path, f"{root}{path}") for path in SOCKETS if host.exists(path))
    mps = host.stat(_MPS)
    if mps is not None and mps.st_uid == 0 and not host.is_symlink(_MPS):
        yield _MPS, f"{root}{_MPS}"
