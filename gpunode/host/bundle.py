"""Support bundles: unpacking an untrusted .tar.gz that `gpunode report` made, and packing one.

A bundle may be crafted. So it contains files and directories only, below one directory; symlinks of the
recorded machine are listed in links.json, and are created after everything else.

`TarFile.extractall` with ``filter="data"`` doesn't suffice: Debian 12's Python 3.11.2 doesn't have it, and it
judges a member only after tarfile has read the member's headers. For crafted ones tarfile takes minutes
inside one regular expression, where no time limit ends it (CVE-2024-6232, Python 3.11 before 3.11.10), and in
any Python it reads a sparse file's map without a limit: so each header is checked before its contents.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from gpunode.errors import ConfigError, Unreadable
from gpunode.host import Host
from gpunode.host.recorder import Kept
from gpunode.host.recording import KERNEL_LOG, RECORDING
from gpunode.host.redact import Redaction, known_variable, runs_known_program, shown_arguments, shown_variable

# Reader for an untrusted tar archive: `tarfile` with limits.
#
# tarfile's cost grows with the square of an extended header's size, it recurses from one header to the next,
# and it reads the map of a sparse file into memory. Nothing is extracted by tarfile: the caller decides about
# each path, which is stricter than its filter "data".

MOST_BYTES = 256 << 20
MOST_FILE = 32 << 20
MOST_ENTRIES = 50_000
MOST_DIRECTORIES = 10_000
MOST_SECONDS = 30.0  # to unpack one; the largest takes a few seconds
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


def members(stream: IO[bytes]) -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
    """Each file with its content, and each directory with None. Content is read before the next member.

    `Refused` or `tarfile.TarError` for any other kind of member, a damaged archive, and beyond the limits.
    """
    source = _Stream(stream)

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
        if number > MOST_ENTRIES:
            raise Refused(f"it has more than {MOST_ENTRIES} entries")
        if member.type not in _ACCEPTED:
            raise _unwanted(member)
        if member.isreg() and not 0 <= member.size <= MOST_FILE:
            raise Refused(f"{member.name[:100]!a} is larger than {MOST_FILE >> 20} MiB")
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
    """The decompressed archive as a file that is read forward only, within the limits."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._deadline = time.monotonic() + MOST_SECONDS
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
            raise Refused(f"reading it takes more than {MOST_SECONDS:g} s")
        data = self._stream.read(min(size, MOST_BYTES - self._position + 1))
        self._position += len(data)
        if self._position > MOST_BYTES:
            raise Refused(f"it unpacks to more than {MOST_BYTES >> 20} MiB")
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


MACHINE, LINKS, REPORT = "machine", "links.json", "report.json"
_MOST_DEPTH = 64
_MOST_NAME = 2048
_LATEST = 1 << 33  # the year 2242; some file systems refuse a later time


@contextmanager
def unpacked(archive: Path) -> Iterator[Path]:
    """The recorded machine of a bundle as a directory, while the context lasts; else `ConfigError`."""
    with tempfile.TemporaryDirectory(prefix="gpunode-bundle-") as name:
        place = _Place(Path(name) / MACHINE)
        links: dict[str, str] = {}
        for parts, member, content in _members(archive):
            with _refusing(archive):
                if parts[:1] == (MACHINE,):
                    place.write(parts[1:], member, content)
                elif parts == (LINKS,):
                    links = _links(content.read() if content else b"")
        with _refusing(archive):
            for path, target in links.items():
                place.link(path, target)
            if not any(place.root.iterdir()):
                raise Refused(f"it has no {MACHINE}/")
        yield place.root


def report_in(archive: Path) -> bytes:
    """The DoctorReport in a bundle, as JSON; `ConfigError` if it has none."""
    data = None
    for parts, _, content in _members(archive):
        if parts == (REPORT,) and content is not None:
            with _refusing(archive):
                data = content.read()
    if data is None:
        raise ConfigError(
            f"{archive} is not a support bundle: it has no {REPORT}",
            hint="run gpunode report to create a bundle",
        )
    return data


@contextmanager
def _refusing(archive: Path) -> Iterator[None]:
    """Report any error while a bundle is read, with the bundle's name."""
    try:
        yield
    except PermissionError as error:
        raise Unreadable(f"can't read {archive}: {error.strerror}", hint="run as root") from error
    except (Refused, tarfile.TarError, zlib.error, EOFError, OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        if isinstance(error, gzip.BadGzipFile):  # its text has the bytes as Python writes them
            reason = "it is not a gzip file"
        raise ConfigError(
            f"{archive} is not a support bundle: {reason}", hint="run gpunode report to create a bundle"
        ) from error


def _members(archive: Path) -> Iterator[tuple[tuple[str, ...], tarfile.TarInfo, IO[bytes] | None]]:
    """Each member with its path below the bundle's one directory, and a file's content."""
    with _refusing(archive), gzip.open(archive) as packed:
        for member, content in members(cast("IO[bytes]", packed)):
            yield _inside(member.name.removesuffix("/"))[1:], member, content


def _inside(name: str) -> tuple[str, ...]:
    """The parts of a path that doesn't lead out of the archive."""
    quoted = ascii(name[:100])
    parts = tuple(name.split("/", _MOST_DEPTH))
    if len(name) > _MOST_NAME or len(parts) > _MOST_DEPTH:
        raise Refused(f"the path {quoted} is too long")
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise Refused(f"the path {quoted} leads out of the archive")
    return parts


class _Place:
    """The directory that a bundle is unpacked into: never through a link, and with at most `MOST_DIRECTORIES`
    directories, which take no space in a bundle."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._made: set[tuple[str, ...]] = set()
        root.mkdir()

    def write(self, parts: tuple[str, ...], member: tarfile.TarInfo, content: IO[bytes] | None) -> None:
        """No link exists yet; a second file of the same name is refused."""
        if content is None:
            self._directory(parts)
            return
        target = self._directory(parts[:-1]).joinpath(*parts[-1:])
        with target.open("xb") as out:
            while piece := content.read(1 << 20):
                out.write(piece)
        target.chmod(0o755 if member.mode & 0o111 else 0o644)
        moment = min(max(float(member.mtime), 0.0), float(_LATEST))
        os.utime(target, (moment, moment))

    def link(self, path: str, target: str) -> None:
        """The target doesn't matter: `Host` follows links inside the root only."""
        parts = _inside(path.removeprefix("/"))
        try:
            (self._directory(parts[:-1]) / parts[-1]).symlink_to(target)
        except FileExistsError as error:
            raise Refused(f"the link {path[:100]!a} is below another link or replaces a file") from error

    def _directory(self, parts: tuple[str, ...]) -> Path:
        for depth in range(1, len(parts) + 1):
            if parts[:depth] not in self._made:
                if len(self._made) >= MOST_DIRECTORIES:
                    raise Refused(f"it has more than {MOST_DIRECTORIES} directories")
                self.root.joinpath(*parts[:depth]).mkdir()
                self._made.add(parts[:depth])
        return self.root.joinpath(*parts)


def _links(text: bytes) -> dict[str, str]:
    try:
        links = json.loads(text)
    except RecursionError as error:
        raise Refused(f"{LINKS} is nested too deeply") from error
    if not isinstance(links, dict) or len(links) > MOST_ENTRIES:
        raise Refused(f"{LINKS} doesn't contain an object of paths")
    if not all(isinstance(target, str) and 0 < len(target) < _MOST_NAME for target in links.values()):
        raise Refused(f"{LINKS} has a target that is not a path")
    return links


# A support bundle: a redacted recording of a machine, as one .tar.gz that `unpacked` can read.

_PROC = re.compile(r"/proc/([0-9]+)/(?:task/[0-9]+/)?(cmdline|environ)")
_OF_IMAGES = ("NVIDIA_", "CUDA_")
_GECOS = 4
_PROGRAM = b"#!/bin/sh\n"


def files_of(kept: Kept, redaction: Redaction) -> dict[str, bytes]:
    """Everything below machine/, by its path on the node without the first slash, and links.json."""
    # a program that was only looked up isn't copied, but must not be empty
    stubs = {path: _PROGRAM for path in kept.programs if not kept.files.get(path)}
    inside = {
        redaction.path(path).removeprefix("/"): _cleaned(path, data, redaction)
        for path, data in {**kept.files, **stubs}.items()
    }
    inside[RECORDING] = _json(redaction.value(_without_images(kept.recording)))
    if kept.log:
        inside[KERNEL_LOG] = redaction.text("\n".join(kept.log) + "\n").encode("utf-8", "surrogateescape")
    return inside


def _without_images(recording: Mapping[str, Any]) -> dict[str, Any]:
    """The recording without variables of an image's environment that don't concern GPUs: they may belong to
    any program. podman prints an image's settings with everything else about it."""
    result = {name: dict(section) for name, section in recording.items()}
    for socket, answer in result.get("daemons", {}).items():
        images = answer.get("images") if isinstance(answer, dict) else None
        if isinstance(images, dict):
            settings = {name: _settings(image) for name, image in images.items()}
            result["daemons"][socket] = {**answer, "images": settings}
    for line, answer in result.get("commands", {}).items():
        if "podman image inspect" in line:
            result["commands"][line] = {**answer, "stdout": _inspected(answer.get("stdout", ""))}
    return result


def _settings(config: Any) -> Any:
    listed = config.get("Env") if isinstance(config, dict) else None
    variables = (
        [variable for variable in listed if str(variable).startswith(_OF_IMAGES)]
        if isinstance(listed, list)
        else []
    )
    return {"Env": variables} if isinstance(config, dict) else config


def _inspected(text: str) -> str:
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    first = answer[0] if isinstance(answer, list) and answer else None
    config = first.get("Config") if isinstance(first, dict) else None
    return json.dumps([{"Config": _settings(config)}]) if isinstance(config, dict) else ""


def links_of(kept: Kept, redaction: Redaction) -> dict[str, str]:
    """Without links that would hide files below them."""
    solid = {parent for path in (*kept.files, *kept.directories) for parent in _parents(path)}
    return {
        redaction.path(path): redaction.path(target)
        for path, target in kept.links.items()
        if path not in solid and path not in kept.directories
    }


def _parents(path: str) -> Iterator[str]:
    while path := path.rpartition("/")[0]:
        yield path


def _cleaned(path: str, data: bytes, redaction: Redaction) -> bytes:
    """Binary files, such as the loader's cache, are tables that contain no private text."""
    match = _PROC.fullmatch(path)
    if match is not None:
        data = _arguments(data) if match[2] == "cmdline" else _variables(data)
    elif path == "/etc/passwd":
        data = b"\n".join(map(_without_person, data.split(b"\n")))
    elif b"\0" in data[:8192]:
        return data
    text = data.decode("utf-8", "surrogateescape")
    return redaction.text(text).encode("utf-8", "surrogateescape")


def _arguments(data: bytes) -> bytes:
    """Of other programs only the first argument is kept."""
    argv = data.decode("utf-8", "surrogateescape").split("\0")
    argument_text = "\0".join(shown_arguments(argv)) if runs_known_program(argv) else argv[0] + "\0"
    return argument_text.encode("utf-8", "surrogateescape")


def _variables(data: bytes) -> bytes:
    text = data.decode("utf-8", "surrogateescape")
    return "\0".join(
        shown_variable(variable) for variable in text.split("\0") if known_variable(variable)
    ).encode("utf-8", "surrogateescape")


def _without_person(line: bytes) -> bytes:
    fields = line.split(b":")
    if len(fields) > _GECOS:
        fields[_GECOS] = b""
    return b":".join(fields)


def packed(
    top: str, inside: Mapping[str, bytes], kept: Kept, beside: Mapping[str, bytes], now: float
) -> bytes:
    """The archive: `beside` first, so that a user finds the report on top, then the machine."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", compresslevel=6) as archive:
        for name, data in beside.items():
            _add(archive, f"{top}/{name}", data, now, 0o600)
        solid = {parent for path in inside for parent in _parents("/" + path)}
        for path in sorted(kept.directories):
            if path not in solid and path != "/":
                _add(archive, f"{top}/{MACHINE}{path}", None, now, 0o755)
        for path, data in sorted(inside.items()):
            mode = 0o755 if f"/{path}" in kept.programs else 0o644
            moment = kept.times.get(f"/{path}", now)
            if f"/{path}" not in solid:
                _add(archive, f"{top}/{MACHINE}/{path}", data, moment, mode)
    return out.getvalue()


def _add(archive: Any, name: str, data: bytes | None, moment: float, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.mtime, entry.mode = moment, mode
    if data is None:
        entry.type = tarfile.DIRTYPE
        archive.addfile(entry)
        return
    entry.size = len(data)
    archive.addfile(entry, io.BytesIO(data))


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode("utf-8", "surrogateescape")


def described(
    links: Mapping[str, str], about: Mapping[str, Any], report: Mapping[str, Any]
) -> dict[str, bytes]:
    """The files beside the machine that are JSON."""
    return {"about.json": _json(about), "report.json": _json(report), LINKS: _json(links)}


# The last lines that the daemons logged in this boot, from systemd's journal.

UNITS = (
    *("docker", "containerd", "crio", "kubelet", "k3s", "k3s-agent", "rke2-server", "rke2-agent"),
    *("nvidia-persistenced", "nvidia-fabricmanager", "nvidia-cdi-refresh", "nvidia-mig-manager"),
    *("gpunode-device-plugin", "gpunode-mps", "gpunode-cdi-refresh", "gpunode-doctor"),
)
_LINES = 500
_SECONDS = 5.0


def daemon_logs(host: Host) -> tuple[dict[str, str], dict[str, str]]:
    """Texts by unit, and the reason for units without one. No unit is queried after one that hangs."""
    logs: dict[str, str] = {}
    missing: dict[str, str] = {}
    if not host.live:
        return logs, missing
    for unit in UNITS:
        done = host.run(
            # --no-hostname: a log that is passed on must not name its host on every line
            ("journalctl", "-u", unit, "-b", "-n", str(_LINES), "-q", "--no-pager", "--no-hostname"),
            timeout=_SECONDS,
        )
        if done.ok and done.stdout.strip():
            logs[unit] = done.stdout
        elif done.timed_out:
            missing[unit] = f"journalctl didn't finish within {_SECONDS:g} s"
            break
        elif not done.ok:
            missing[unit] = (done.stderr.strip().splitlines() or [f"exit code {done.code}"])[-1]
            if done.code == 127:
                break
    return logs, missing
