"""`Host`'s drawer for support bundles: a .tar.gz that `gpunode report` made on another machine, unpacked.

A bundle is untrusted: whoever sends one may have built it by hand. So it holds files and directories only,
below one directory; symlinks of the recorded machine stand in links.json, and are made after all else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from gpunode.errors import ConfigError, Unreadable

if TYPE_CHECKING:
    import tarfile

MACHINE, LINKS, REPORT = "machine", "links.json", "report.json"
MOST_BYTES = 256 << 20
MOST_ENTRIES = 50_000
_MOST_DEPTH = 64
_MOST_NAME = 2048
_LATEST = 1 << 33  # the year 2242; beyond it some file systems refuse a time


class _Refused(Exception):
    """Why this can't be a bundle."""


@contextmanager
def unpacked(archive: Path) -> Iterator[Path]:
    """The recorded machine of a bundle as a directory, as long as the context lasts; else `ConfigError`."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="gpunode-bundle-") as name:
        root = Path(name) / MACHINE
        root.mkdir()
        links: dict[str, str] = {}
        for parts, member, stream in _entries(archive):
            with _refusing(archive):
                if parts[:1] == (MACHINE,):
                    _write(root.joinpath(*parts[1:]), member, stream)
                elif parts == (LINKS,):
                    links = _links(stream.read() if stream else b"")
        with _refusing(archive):
            for path, target in links.items():
                _link(root, path, target)
            if not any(root.iterdir()):
                raise _Refused(f"it has no {MACHINE}/")
        yield root


def report_in(archive: Path) -> bytes:
    """The DoctorReport that a bundle carries, as JSON; `ConfigError` if it has none."""
    found = None
    for parts, _, stream in _entries(archive):
        if parts == (REPORT,) and stream is not None:
            with _refusing(archive):
                found = stream.read()
    if found is None:
        raise ConfigError(f"{archive} is no support bundle: it has no {REPORT}", hint="see gpunode report")
    return found


@contextmanager
def _refusing(archive: Path) -> Iterator[None]:
    """Whatever goes wrong while a bundle is read, by the bundle's name."""
    import tarfile
    import zlib

    try:
        yield
    except PermissionError as error:
        raise Unreadable(f"can't read {archive}: {error.strerror}", hint="run as root") from error
    except (_Refused, tarfile.TarError, zlib.error, EOFError, OSError, ValueError, LookupError) as error:
        raise ConfigError(
            f"{archive} is no support bundle: {error}", hint="one is made by gpunode report"
        ) from error


Entry = tuple[tuple[str, ...], "tarfile.TarInfo", "IO[bytes] | None"]


def _entries(archive: Path) -> Iterator[Entry]:
    """Each entry's path below the bundle's one directory, and its bytes unless it is a directory."""
    import gzip
    import tarfile

    with (
        _refusing(archive),
        gzip.open(archive) as packed,
        tarfile.open(fileobj=_Limited(packed), mode="r|") as bundle,  # type: ignore[call-overload]
    ):
        for number, member in enumerate(bundle):
            if number >= MOST_ENTRIES:
                raise _Refused(f"it has more than {MOST_ENTRIES} entries")
            parts = _parts(member)
            yield parts, member, None if member.isdir() else bundle.extractfile(member)


class _Limited:
    """A stream that ends with `_Refused` when more comes out of it than any bundle holds."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._left = MOST_BYTES

    def read(self, size: int) -> bytes:
        data: bytes = self._stream.read(min(size, self._left + 1))
        self._left -= len(data)
        if self._left < 0:
            raise _Refused(f"it unpacks to more than {MOST_BYTES >> 20} MiB")
        return data


def _parts(member: tarfile.TarInfo) -> tuple[str, ...]:
    """The path below the first directory; `_Refused` for what isn't a plain file or directory inside it."""
    name = member.name
    shown = ascii(name[:100])
    if not (member.isreg() or member.isdir()) or member.issparse():
        raise _Refused(f"{shown} is {_kind(member)}, and a bundle holds files and directories only")
    if member.size > MOST_BYTES:
        raise _Refused(f"{shown} is larger than {MOST_BYTES >> 20} MiB")
    return _inside(name.removesuffix("/"), shown)[1:]


def _inside(name: str, shown: str) -> tuple[str, ...]:
    parts = tuple(name.split("/"))
    if len(name) > _MOST_NAME or len(parts) > _MOST_DEPTH:
        raise _Refused(f"{shown} is too long a path")
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise _Refused(f"{shown} leads out of it")
    return parts


def _kind(member: tarfile.TarInfo) -> str:
    if member.issym() or member.islnk():
        return "a link"
    return "a sparse file" if member.issparse() else "a device" if member.isdev() else "of an unknown kind"


def _write(target: Path, member: tarfile.TarInfo, stream: IO[bytes] | None) -> None:
    """No link was made yet, so that nothing is written through one; a second file of a name is refused."""
    if stream is None:
        target.mkdir(parents=True, exist_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("xb") as out:
        while piece := stream.read(1 << 20):
            out.write(piece)
    target.chmod(0o755 if member.mode & 0o111 else 0o644)
    moment = min(max(float(member.mtime), 0.0), float(_LATEST))
    os.utime(target, (moment, moment))


def _links(text: bytes) -> dict[str, str]:
    import json

    try:
        found = json.loads(text)
    except RecursionError as error:
        raise _Refused(f"{LINKS} is nested too deep") from error
    if not isinstance(found, dict) or len(found) > MOST_ENTRIES:
        raise _Refused(f"{LINKS} holds no object of paths")
    if not all(isinstance(target, str) and 0 < len(target) < _MOST_NAME for target in found.values()):
        raise _Refused(f"{LINKS} holds a target that is no path")
    return found


def _link(root: Path, path: str, target: str) -> None:
    """Where it shows doesn't matter: `Host` follows links inside the root only."""
    parts = _inside(path.removeprefix("/"), ascii(path[:100]))
    place = root
    for part in parts[:-1]:
        place = place / part
        if place.is_symlink():
            raise _Refused(f"the link {path[:100]!a} lies behind another one")
        place.mkdir(exist_ok=True)
    (place / parts[-1]).symlink_to(target)
