"""An image made of this node's own Python and C library, so that a container can run without a registry.

A child interpreter imports what the program needs and reports the files it used; those files, the shared
objects they mapped, and the symlinks to each are the whole image.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
import sys
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from gpunode.errors import GpunodeError, PreconditionError
from gpunode.gpu.vectoradd import MODULE, PROGRAM_FILES
from gpunode.host import Host
from gpunode.host.files import LARGE_BYTES, follow_links
from gpunode.output.result import Progress
from gpunode.runtime.verify.container import STAND_IN, VERIFICATION, GpuAccess, clean_up, labels, maker

# Container images as bytes: a layer from files, an archive as ``docker save`` writes it.
#
# ``docker load`` and ``ctr images import`` both read that format. The same input gives the same bytes: names
# are sorted, every time is zero, every owner is root.


@dataclass(frozen=True)
class LayerEntry:
    """One item in a layer, by its absolute path: a file, a symlink (`target`) or a directory (neither)."""

    data: bytes | None = None
    target: str = ""
    mode: int = 0o755


@dataclass(frozen=True)
class ImageConfig:
    """What a container of the image runs by default, and labels. `architecture` is Go's: amd64, arm64."""

    architecture: str
    entrypoint: tuple[str, ...]
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


def layer(entries: Mapping[str, LayerEntry]) -> bytes:
    """An uncompressed layer tar; parents that aren't in it become directories."""
    above = {str(parent) for path in entries for parent in PurePosixPath(path).parents}
    return _tar(dict(sorted({**{path: LayerEntry() for path in above - {"/"}}, **entries}.items())))


def _tar(entries: Mapping[str, LayerEntry]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, entry in entries.items():
            info = tarfile.TarInfo(path.lstrip("/"))
            info.mode = entry.mode
            if entry.target:
                info.type, info.linkname, info.mode = tarfile.SYMTYPE, entry.target, 0o777
            elif entry.data is None:
                info.type = tarfile.DIRTYPE
            else:
                info.size = len(entry.data)
            tar.addfile(info, io.BytesIO(entry.data or b""))
    return buffer.getvalue()


def archive(reference: str, content: bytes, config: ImageConfig, also: Sequence[str] = ()) -> bytes:
    """One image of one layer, as ``docker save`` would write it; `also` are more names for it."""
    digest = sha256(content)
    document = json.dumps(_config(config, digest), sort_keys=True).encode()
    config_name = f"{sha256(document)}.json"
    manifest: list[dict[str, Any]] = [
        {"Config": config_name, "RepoTags": [reference, *also], "Layers": [f"{digest}/layer.tar"]}
    ]
    files = {
        config_name: document,
        f"{digest}/layer.tar": content,
        "manifest.json": json.dumps(manifest).encode(),
    }
    return _tar({name: LayerEntry(data, mode=0o644) for name, data in files.items()})


def _config(config: ImageConfig, digest: str) -> dict[str, Any]:
    return {
        "architecture": config.architecture,
        "os": "linux",
        "created": "1970-01-01T00:00:00Z",
        "config": {
            "Env": [f"{name}={value}" for name, value in config.env.items()],
            "Entrypoint": list(config.entrypoint),
            "Cmd": list(config.command),
            "WorkingDir": "/",
            **({"Labels": dict(config.labels)} if config.labels else {}),
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        "history": [{"created": "1970-01-01T00:00:00Z", "created_by": "gpunode"}],
    }


def sha256(data: bytes) -> str:
    """Hexadecimal digest."""
    return hashlib.sha256(data).hexdigest()


_PACKAGE = Path(__file__).parent.parent.parent
_PROGRAM_ROOT = "/opt/gpunode"
_ELF = b"\x7fELF"
_PROBE_SECONDS = 20.0
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64le", "s390x": "s390x"}
# NVIDIA's libraries are linked against these names, empty since glibc 2.34 but still looked up
_BESIDE_LIBC = ("libdl.so.2", "libgcc_s.so.1", "libm.so.6", "libpthread.so.0", "librt.so.1")
# ld.so's own search path, by distribution. These stay out of LD_LIBRARY_PATH: a driver that is found only
# through that variable, which users' images don't have, would make a broken installation pass.
_SEARCHED = ("/lib", "/usr/lib", "/lib64", "/usr/lib64")
_MULTIARCH = ("x86_64-linux-gnu", "aarch64-linux-gnu", "powerpc64le-linux-gnu", "s390x-linux-gnu")
_WRITABLE = ("/dev", "/etc", "/proc", "/run", "/sys", "/tmp", "/var")  # noqa: S108 - of the image
# Imports the program and exercises what makes Python import more as it runs: its help, a usage error, a
# traceback. It uses no GPU. A module may be an alias of another one (collections.abc from Python 3.13 on)
# while the import system still needs its own file.
_PROBE = """\
import contextlib, importlib, io, json, os, sys
sys.path.append(sys.argv[1])
program = importlib.import_module(sys.argv[2])
for name in sys.argv[3:]:
    importlib.import_module(name)
for argument in ("--help", "--no-such-option"):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        with contextlib.suppress(SystemExit):
            program.main([argument])
try:
    raise ValueError
except ValueError:
    importlib.import_module("traceback").format_exc()
modules = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
for name in list(sys.modules):
    above, _, last = name.rpartition(".")
    for directory in getattr(sys.modules.get(above), "__path__", ()):
        modules.append(os.path.join(directory, last + ".py"))
with open("/proc/self/maps") as maps:
    mapped = sorted({line.split(None, 5)[5].strip() for line in maps if "/" in line})
print(json.dumps({"modules": sorted(filter(None, modules)), "mapped": mapped,
                  "machine": os.uname().machine}))
"""
_ALSO = ("ctypes", "encodings.ascii", "encodings.latin_1", "encodings.utf_8", "runpy", "signal")
_PAUSE_PATH = "/pause"  # CRI-O starts this path in a sandbox, regardless of the image
_PAUSE = """\
#!{python} -SsB
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
while True:
    signal.pause()
"""


@dataclass(frozen=True)
class HostFiles:
    """The assembled layer. `python` is the interpreter's path in it, `libraries` its libraries' paths."""

    content: bytes
    python: str
    libraries: tuple[str, ...]
    architecture: str

    @property
    def digest(self) -> str:
        return sha256(self.content)[:12]


@dataclass(frozen=True)
class _FileCollector:
    """Collects files by real path and the symlinks that lead to them."""

    host: Host
    entries: dict[str, LayerEntry] = field(default_factory=dict)

    def add(self, path: str) -> str | None:
        """Add `path` with every symlink to it; return its real path, None if it doesn't exist."""
        try:
            real = follow_links(path, self._target)
        except OSError:  # a loop
            return None
        if real not in self.entries:
            data = self.host.read_bytes(real, LARGE_BYTES) if self.host.is_file(real) else None
            if data is None:
                return None
            self.entries[real] = LayerEntry(data, mode=0o755 if data.startswith(_ELF) else 0o644)
        return real

    def _target(self, step: str, _last: bool) -> str:
        target = self.host.readlink(step)
        if target is None:
            return ""
        self.entries[step] = LayerEntry(target=target)
        return target


def assemble(host: Host) -> HostFiles:
    """Collect interpreter, libraries and program. `PreconditionError` if this Python can't be copied."""
    python = host.realpath(sys.executable)
    seen = _query_interpreter(host, python)
    tree = _FileCollector(host)
    for path in (*seen["modules"], python):
        if not path.startswith(f"{_PACKAGE}/"):
            tree.add(path)
    libraries = {
        str(PurePosixPath(path).parent)
        for path in _with_links(host, seen["mapped"])
        if _add_library(tree, path)
    }
    loader = elf_interpreter(tree.entries[python].data or b"") if python in tree.entries else None
    if loader:
        _refuse_musl(python, loader)
        tree.add(loader)
    tree.entries.update(_program(host))
    tree.entries.update({path: LayerEntry(mode=0o1777 if path == "/tmp" else 0o755) for path in _WRITABLE})  # noqa: S108
    tree.entries.update(_loader_files(host))
    tree.entries[_PAUSE_PATH] = LayerEntry(_PAUSE.format(python=python).encode())
    machine = seen["machine"]
    return HostFiles(
        layer(tree.entries), python, tuple(sorted(libraries)), _ARCHITECTURES.get(machine, machine)
    )


def _query_interpreter(host: Host, python: str) -> dict[str, Any]:
    argv = (python, "-I", "-S", "-B", "-c", _PROBE, str(_PACKAGE.parent), MODULE, *_ALSO)
    done = host.run(argv, timeout=_PROBE_SECONDS)
    try:
        seen = json.loads(done.stdout) if done.ok else None
    except ValueError:
        seen = None
    if not isinstance(seen, dict):
        raise PreconditionError(
            f"{python} can't report which files it consists of: {done.stderr.strip()[-300:] or 'no answer'}",
            hint="use an image that holds a vectoradd: gpunode verify --image REF",
        )
    return seen


def _with_links(host: Host, mapped: Iterable[str]) -> list[str]:
    """Mapped objects, the other names that lead to each (its soname is one), and what NVIDIA's need."""
    paths = []
    for path in mapped:
        directory, _, name = path.rpartition("/")
        stem = name.partition(".so")[0]
        paths.append(path)
        paths += [link for link in host.glob(directory, f"{stem}.so*") if host.is_symlink(link)]
        if stem == "libc":
            paths += [f"{directory}/{library}" for library in _BESIDE_LIBC]
    return paths


def _add_library(tree: _FileCollector, path: str) -> bool:
    """Whether `path` is a shared object of the loader's search path, and not a Python extension module."""
    if ".so" not in path or not tree.host.is_file(path):
        return False
    real = tree.add(path)
    data = tree.entries[real].data if real is not None else None
    return data is not None and data.startswith(_ELF) and "/lib-dynload/" not in path


def elf_interpreter(data: bytes) -> str | None:
    """PT_INTERP of a 64-bit little-endian ELF file (elf(5)): the dynamic loader's path."""
    if data[:6] != _ELF + b"\x02\x01":
        return None
    try:
        (offset,) = struct.unpack_from("<Q", data, 32)
        size, count = struct.unpack_from("<HH", data, 54)
        for number in range(count):
            kind, _, start, _, _, length = struct.unpack_from("<IIQQQQ", data, offset + number * size)
            if kind == 3:
                return data[start : start + length].rstrip(b"\0").decode()
    except (struct.error, OverflowError, UnicodeDecodeError):
        return None
    return None


def _refuse_musl(python: str, loader: str) -> None:
    if PurePosixPath(loader).name.startswith("ld-musl"):
        raise PreconditionError(
            f"{python} is linked against musl ({loader}), and NVIDIA's libraries need the GNU C library",
            hint="run gpunode with a Python of the distribution, or use an image: gpunode verify --image REF",
        )


def _program(host: Host) -> dict[str, LayerEntry]:
    entries: dict[str, LayerEntry] = {}
    for name in PROGRAM_FILES:
        data = host.read_bytes(str(_PACKAGE / name))
        if data is None:
            raise GpunodeError(f"gpunode's own file {_PACKAGE / name} is gone", hint="install gpunode again")
        entries[f"{_PROGRAM_ROOT}/gpunode/{name}"] = LayerEntry(data, mode=0o644)
    return entries


def _loader_files(host: Host) -> dict[str, LayerEntry]:
    """Files of distributions' images that the hooks of NVIDIA's tools look for.

    They run ldconfig in a container only if a cache exists already; an empty one is ignored by ld.so(8).
    libnvidia-container uses Debian's library directory if the image looks like Debian.
    """
    entries = {
        "/etc/ld.so.cache": LayerEntry(b"", mode=0o644),
        "/etc/ld.so.conf": LayerEntry(b"include /etc/ld.so.conf.d/*.conf\n", mode=0o644),
        "/etc/ld.so.conf.d": LayerEntry(),
    }
    for place in _SEARCHED:  # if one is a link to another, files mounted below either must be found
        target = host.readlink(place)
        entries |= {place: LayerEntry(target=target)} if target is not None else {}
    debian = host.read_bytes("/etc/debian_version")
    return entries if debian is None else {**entries, "/etc/debian_version": LayerEntry(debian, mode=0o644)}


@dataclass(frozen=True)
class Names:
    """Names of this run's images: `tag` in their names, `labels` in their configuration."""

    tag: str
    labels: Mapping[str, str] = field(default_factory=dict)


def verification_image(files: HostFiles, names: Names, *, by_handler: bool = True) -> tuple[str, bytes]:
    """Name and archive of the image: its entry point is the interpreter, its command the program.

    A runtime handler gives GPUs to containers that set NVIDIA_VISIBLE_DEVICES. To verify CDI the image
    doesn't set it, so that an engine with NVIDIA's handler as default can't inject them.
    """
    env = {
        **_environment(files),
        "PYTHONPATH": _PROGRAM_ROOT,
        "NVIDIA_VISIBLE_DEVICES": "all" if by_handler else "void",
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
    }
    entry = (files.python, "-S", "-s", "-B")
    config = ImageConfig(files.architecture, entry, ("-m", MODULE), env, names.labels)
    reference = f"{VERIFICATION}:{files.digest}-{names.tag}"
    return reference, archive(reference, files.content, config)


def make_image(
    host: Host,
    way: GpuAccess,
    token: str,
    progress: Progress,
    cleanup: ExitStack,
    load: Callable[[bytes], None],
    remove: Callable[[str], None],
) -> str:
    """Load an image from this node into an engine, for this run; `cleanup` removes it."""
    with progress.step("make an image from this node's own files"):
        names = Names(f"{maker(host)}-{token}", labels(host))
        reference, data = verification_image(assemble(host), names, by_handler=not way.devices)
        cleanup.callback(clean_up, progress, f"image {reference}", partial(remove, reference))
        load(data)
    return reference


def pause_image(files: HostFiles, reference: str, names: Names) -> bytes:
    """A substitute for a sandbox image: it sleeps until it is stopped, and requests no GPU.

    Its second name is only gpunode's, and contains its maker.
    """
    env = {**_environment(files), "NVIDIA_VISIBLE_DEVICES": "void"}
    config = ImageConfig(files.architecture, (_PAUSE_PATH,), (), env, names.labels)
    return archive(reference, files.content, config, also=(f"{STAND_IN}:{names.tag}",))


def _environment(files: HostFiles) -> Mapping[str, str]:
    searched = {*_SEARCHED, *(f"{top}/{name}" for top in ("/lib", "/usr/lib") for name in _MULTIARCH)}
    elsewhere = [directory for directory in files.libraries if directory not in searched]
    path = {"LD_LIBRARY_PATH": ":".join(elsewhere)} if elsewhere else {}
    return {
        "PATH": f"{PurePosixPath(files.python).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin",
        "PYTHONUTF8": "1",
        **path,
    }
