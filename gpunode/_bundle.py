"""`Host`'s drawer for support bundles: a .tar.gz that `gpunode report` made on another machine, unpacked.

A bundle is untrusted: whoever sends one may have built it by hand. So it holds files and directories only,
below one directory; symlinks of the recorded machine stand in links.json, and are made after all else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpunode._archive import Entry, Refused, entries
from gpunode.errors import ConfigError, Unreadable

MACHINE, LINKS, REPORT = "machine", "links.json", "report.json"
MOST_BYTES = 256 << 20
MOST_FILE = 32 << 20
MOST_ENTRIES = 50_000
MOST_DIRECTORIES = 10_000
_MOST_DEPTH = 64
_MOST_NAME = 2048
_LATEST = 1 << 33  # the year 2242; beyond it some file systems refuse a time


@contextmanager
def unpacked(archive: Path) -> Iterator[Path]:
    """The recorded machine of a bundle as a directory, as long as the context lasts; else `ConfigError`."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="gpunode-bundle-") as name:
        place = _Place(Path(name) / MACHINE)
        links: dict[str, str] = {}
        for parts, entry in _entries(archive):
            with _refusing(archive):
                if parts[:1] == (MACHINE,):
                    place.write(parts[1:], entry)
                elif parts == (LINKS,):
                    links = _links(_whole(entry))
        with _refusing(archive):
            for path, target in links.items():
                place.link(path, target)
            if not any(place.root.iterdir()):
                raise Refused(f"it has no {MACHINE}/")
        yield place.root


def report_in(archive: Path) -> bytes:
    """The DoctorReport that a bundle carries, as JSON; `ConfigError` if it has none."""
    found = None
    for parts, entry in _entries(archive):
        if parts == (REPORT,) and not entry.directory:
            with _refusing(archive):
                found = _whole(entry)
    if found is None:
        raise ConfigError(f"{archive} is no support bundle: it has no {REPORT}", hint="see gpunode report")
    return found


@contextmanager
def _refusing(archive: Path) -> Iterator[None]:
    """Whatever goes wrong while a bundle is read, by the bundle's name."""
    import zlib

    try:
        yield
    except PermissionError as error:
        raise Unreadable(f"can't read {archive}: {error.strerror}", hint="run as root") from error
    except (Refused, zlib.error, EOFError, OSError, ValueError) as error:
        told = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(
            f"{archive} is no support bundle: {told}", hint="one is made by gpunode report"
        ) from error


def _entries(archive: Path) -> Iterator[tuple[tuple[str, ...], Entry]]:
    """Each entry with its path below the bundle's one directory."""
    import gzip

    with _refusing(archive), gzip.open(archive) as packed:
        for entry in entries(packed, MOST_BYTES, MOST_FILE, MOST_ENTRIES):
            yield _inside(entry.name.removesuffix("/"))[1:], entry


def _whole(entry: Entry) -> bytes:
    return b"".join(iter(entry.read, b""))


def _inside(name: str) -> tuple[str, ...]:
    """The parts of a path that leads nowhere else."""
    shown = ascii(name[:100])
    parts = tuple(name.split("/", _MOST_DEPTH))
    if len(name) > _MOST_NAME or len(parts) > _MOST_DEPTH:
        raise Refused(f"{shown} is too long a path")
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise Refused(f"{shown} leads out of it")
    return parts


class _Place:
    """The directory that a bundle is unpacked into: never through a link, and no more than `MOST_DIRECTORIES`
    of them, which cost a bundle nothing."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._made: set[tuple[str, ...]] = set()
        root.mkdir()

    def write(self, parts: tuple[str, ...], entry: Entry) -> None:
        """No link was made yet; a second file of a name is refused."""
        if entry.directory:
            self._directory(parts)
            return
        target = self._directory(parts[:-1]).joinpath(*parts[-1:])
        with target.open("xb") as out:
            while piece := entry.read():
                out.write(piece)
        target.chmod(0o755 if entry.executable else 0o644)
        moment = min(max(entry.changed, 0.0), float(_LATEST))
        os.utime(target, (moment, moment))

    def link(self, path: str, target: str) -> None:
        """Where it shows doesn't matter: `Host` follows links inside the root only."""
        parts = _inside(path.removeprefix("/"))
        try:
            (self._directory(parts[:-1]) / parts[-1]).symlink_to(target)
        except FileExistsError as error:
            raise Refused(f"the link {path[:100]!a} lies behind another one, or over a file") from error

    def _directory(self, parts: tuple[str, ...]) -> Path:
        for depth in range(1, len(parts) + 1):
            if parts[:depth] not in self._made:
                if len(self._made) >= MOST_DIRECTORIES:
                    raise Refused(f"it has more than {MOST_DIRECTORIES} directories")
                self.root.joinpath(*parts[:depth]).mkdir()
                self._made.add(parts[:depth])
        return self.root.joinpath(*parts)


def _links(text: bytes) -> dict[str, str]:
    import json

    try:
        found = json.loads(text)
    except RecursionError as error:
        raise Refused(f"{LINKS} is nested too deep") from error
    if not isinstance(found, dict) or len(found) > MOST_ENTRIES:
        raise Refused(f"{LINKS} holds no object of paths")
    if not all(isinstance(target, str) and 0 < len(target) < _MOST_NAME for target in found.values()):
        raise Refused(f"{LINKS} holds a target that is no path")
    return found
