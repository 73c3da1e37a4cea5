"""`Host`'s file primitives: paths inside a root, replacing a file in one step, locks, error texts."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from gpunode.errors import ConfigError, GpunodeError, PreconditionError, Unreadable

_MAX_STEPS = 400  # ten times the kernel's limit of 40 links (include/linux/namei.h), parts included
_NO_LINK = (errno.EINVAL, errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # errors of readlink(2) for other paths

OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_LEFTOVER = ".gpunode"  # ends the name of a temporary file
_PIECE = 128 << 10
_SELINUX = "security.selinux"
READ_BYTES = 16 << 20  # of any file by default: parsers of text take seconds for more
LARGE_BYTES = 512 << 20  # of programs, libraries, archives and databases
SMALL_BYTES = 64 << 10  # of files for parsers whose time grows with the square of a word's length (shlex)


def read_regular(path: Path, limit: int = READ_BYTES) -> bytes:
    """The bytes of a regular file (those of /proc and /sys are regular). OSError for anything else, without
    waiting, and for one with more than `limit` bytes, of which no more than that is read.

    O_NONBLOCK lets open(2) of a FIFO without a writer return at once; on regular files it changes nothing.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    return _read_all(descriptor, str(path), limit)


@contextmanager
def _regular(descriptor: int, path: str) -> Iterator[tuple[BinaryIO, int]]:
    """A stream of an open regular file, and its size; OSError for anything else. Closes the descriptor, which
    `os.fdopen` leaves open if it is a directory's."""
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        with os.fdopen(descriptor, "rb", closefd=False) as stream:
            yield stream, status.st_size
    finally:
        os.close(descriptor)


def _read_all(descriptor: int, path: str, limit: int) -> bytes:
    with _regular(descriptor, path) as (stream, size):
        data = bytearray()  # the size is 0 in /proc
        # in pieces: for files of /proc/sys the kernel allocates as much as is requested
        while size <= limit and (piece := stream.read(_PIECE)):
            data += piece
            size = max(size, len(data))
        if size > limit:
            limit_text = f"{limit >> 20} MiB" if limit >> 20 else f"{limit >> 10} KiB"
            raise OSError(errno.EFBIG, f"larger than {limit_text}", path)
        return bytes(data)


def read_end(path: Path, limit: int) -> bytes:
    """The last `limit` bytes of a regular file; errors as for `read_regular`, without its limit of size."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with _regular(descriptor, str(path)) as (stream, size):
        stream.seek(max(0, size - limit))
        return stream.read(limit)


class DanglingLink(FileNotFoundError):
    """A symlink at `filename` without a target."""


class Place(NamedTuple):
    """An entry of a directory, held open, so that the checked entry is the changed one (`trust.walk`).

    All descriptors are O_PATH. `above` is the directory in which `directory` is, None for the root.
    `descriptor` is None if there is no such entry. `path` names it on this machine, without symlinks.
    """

    above: int | None
    directory: int
    name: str
    descriptor: int | None
    path: str

    def existing(self) -> int:
        """The descriptor; FileNotFoundError if nothing exists there."""
        if self.descriptor is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path)
        return self.descriptor


def named(descriptor: int) -> str:
    """A path to the object of an O_PATH descriptor, for calls that accept no such descriptor
    (proc_pid_fd(5))."""
    if not os.path.exists("/proc/self/fd"):  # noqa: PTH110
        raise OSError(errno.ENOSYS, "/proc is not mounted")
    return f"/proc/self/fd/{descriptor}"


def write_atomic(
    place: Place,
    data: bytes,
    mode: int,
    expect: bytes | None,
    *,
    keep: bool,
    above: bool,
    owner: tuple[int, int] | None = None,
) -> None:
    """Write `data` through a temporary file. OSError leaves the existing file unchanged.

    With `keep` attributes stay as they are, also mode and owner unless `owner` is given. With `above` the
    temporary file is in the directory above, if that is possible.
    """
    before = None if place.descriptor is None else os.fstat(place.descriptor)
    if before is not None and stat.S_ISDIR(before.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), place.path)
    old_file = place.descriptor if keep else None
    if keep and before is not None and owner is None:
        mode, owner = before.st_mode & 0o7777, (before.st_uid, before.st_gid)
    if above and place.above is not None and _can_stage(place.above, place.directory):
        try:
            _replace(place, place.above, data, mode, owner, expect, old_file)
        except OSError as error:
            # the directory above is read-only, or a mount point is between the two
            if error.errno not in (errno.EROFS, errno.EXDEV, errno.EACCES, errno.EPERM):
                raise
        else:
            return
    _replace(place, place.directory, data, mode, owner, expect, old_file)


def _can_stage(above: int, directory: int) -> bool:
    """Whether a file can be moved here from the directory above, where no other user can replace it."""
    outer, inner = os.fstat(above), os.fstat(directory)
    return outer.st_dev == inner.st_dev and not outer.st_mode & OTHERS_MAY_WRITE


def _replace(
    place: Place,
    staging: int,
    data: bytes,
    mode: int,
    owner: tuple[int, int] | None,
    expect: bytes | None,
    old_file: int | None,
) -> None:
    temporary = f".{place.name}.{os.urandom(4).hex()}{_LEFTOVER}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600, dir_fd=staging)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            if old_file is not None:
                _keep_attributes(place, descriptor)
            elif staging != place.directory:
                # the label that a file made in the directory itself would have
                with suppress(OSError), listable(place.directory) as source:
                    os.setxattr(descriptor, _SELINUX, os.getxattr(source, _SELINUX))
            now = os.fstat(descriptor)
            if owner is not None and owner != (now.st_uid, now.st_gid):
                os.fchown(descriptor, *owner)
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        if expect is not None and _content(place) != expect:
            raise ConfigError(
                f"{place.path} changed while gpunode was working on it; it was left alone",
                hint="run the same command again",
            )
        os.replace(temporary, place.name, src_dir_fd=staging, dst_dir_fd=place.directory)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=staging)
        raise
    with listable(place.directory) as directory:  # the entry itself must be on the disk
        os.fsync(directory)


def _content(place: Place) -> bytes | None:
    """The current contents; empty if there is no file, or a symlink. None if it isn't the file that was
    checked."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(place.name, flags, dir_fd=place.directory)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP):
            raise
        return b""
    if place.descriptor is not None and not os.path.sameopenfile(descriptor, place.descriptor):
        os.close(descriptor)
        return None
    return _read_all(descriptor, place.path, READ_BYTES)


@contextmanager
def listable(directory: int) -> Iterator[int]:
    """The same directory as a descriptor that can be listed and synced."""
    descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def remove_leftovers(place: Place) -> list[str]:
    """Remove temporary files that a killed `write_atomic` left, here or in the directory above."""
    pattern = re.compile(rf"\.{re.escape(place.name)}\.[a-z0-9_]{{8}}{re.escape(_LEFTOVER)}")
    directory = os.path.dirname(place.path)  # noqa: PTH120
    removed = []
    for descriptor, path in ((place.directory, directory), (place.above, os.path.dirname(directory))):  # noqa: PTH120
        if descriptor is None:
            continue
        with listable(descriptor) as listed:
            for name in filter(pattern.fullmatch, os.listdir(listed)):  # noqa: PTH208
                status = os.stat(name, dir_fd=listed, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                    os.unlink(name, dir_fd=listed)
                    removed.append(f"{path.rstrip('/')}/{name}")
    return removed


def _keep_attributes(place: Place, target: int) -> None:
    """Copy SELinux label, ACLs and the like if the file system has them and we have permission."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with suppress(OSError), os.fdopen(os.open(place.name, flags, dir_fd=place.directory), "rb") as stream:
        for name in os.listxattr(stream.fileno()):
            os.setxattr(target, name, os.getxattr(stream.fileno(), name))


def open_lock(directory: int, name: str, path: str) -> int:
    """A descriptor for `exclusive_lock`. `PreconditionError` unless `directory` is a directory, not a
    symlink, that belongs to this user and that no other user can write."""
    status = os.fstat(directory)
    if (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.geteuid()
        and not status.st_mode & OTHERS_MAY_WRITE
    ):
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(name, flags, 0o600, dir_fd=directory)
    raise PreconditionError(
        f"{path} must be a directory that belongs to this user and that no other user can write",
        hint=f"find out what created it, then remove it: ls -ld {path}",
        code="unsafe-directory",
    )


@contextmanager
def exclusive_lock(descriptor: int, path: Path, timeout: float) -> Iterator[None]:
    """flock(2) on a descriptor of `path`, which is closed in the end; `PreconditionError` names the holder's
    pid if the file holds that of a live process."""
    try:
        deadline = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
                    alive = holder.isdecimal() and Path("/proc", holder).exists()
                    known = f"pid {holder}, " if alive else ""
                    raise PreconditionError(
                        f"another gpunode is changing this node ({known}lock {path})",
                        hint="wait until it has finished, then run the command again",
                        code="locked",
                    ) from None
                time.sleep(0.05)
        with suppress(OSError):  # on a full disk the next process can't name the pid that it waits for
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def follow_links(path: str, target_of: Callable[[str, bool], str]) -> str:
    """`path` with its symlinks followed, from the root on; ``..`` never leaves it. OSError for a loop.

    `target_of` gets each step as a path without symlinks, and whether it is the last one; it returns the text
    of the symlink there that is to be followed, else an empty string.

    It works on strings: the doctor requests hundreds of paths, and making a `Path` per step took a quarter of
    its time.
    """
    current = ""
    todo = path_steps(path)
    for _ in range(_MAX_STEPS):
        if not todo:
            return current or "/"
        part = todo.pop()
        if part == "..":
            current = current.rpartition("/")[0]
            continue
        step = f"{current}/{part}"
        target = target_of(step, not todo)
        if target:
            current = "" if target.startswith("/") else current
            todo += path_steps(target)
        else:
            current = step
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


def resolve_in_root(root: Path, path: str | Path, follow: bool) -> Path:
    """Walk `path` inside `root`; an absolute symlink starts again at the root, ``..`` never leaves it."""
    top = str(root)

    def target_of(step: str, last: bool) -> str:
        return _link_text(top + step) if follow or not last else ""

    return Path(top + follow_links(str(path), target_of))


def path_steps(path: str) -> list[str]:
    """The steps of a path, the first one last."""
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def _link_text(path: str) -> str:
    """Target of a symlink; empty for anything else, including a missing file."""
    try:
        return os.readlink(path)  # noqa: PTH115
    except ValueError:
        return ""  # a name with a NUL byte; opening it reports the error
    except OSError as error:
        if error.errno in _NO_LINK:
            return ""
        raise


def socket_state_of(error: OSError) -> str:
    """State of a socket from a failed connect(2): absent, refused, denied or other-type."""
    known = {
        **{errno.ENOENT: "absent", errno.EACCES: "denied", errno.EPERM: "denied"},
        errno.EPROTOTYPE: "other-type",
    }
    return known.get(error.errno or 0, "refused")


def explain_os_error(error: OSError, path: str, verb: str) -> GpunodeError:
    """An operating system error as a message: the file, the action, and a hint."""
    number = error.errno or 0
    reason = error.strerror or str(error)
    if number in (errno.EACCES, errno.EPERM):
        if verb in ("read", "list", "look at"):
            return Unreadable(f"can't {verb} {path}: {reason}", hint="run as root, for example with sudo")
        hint = "run as root, for example with sudo"
        if os.geteuid() == 0:
            hint = f"root has no permission either: lsattr -d {path}; findmnt -T {path}"
        return PreconditionError(f"can't {verb} {path}: {reason}", hint=hint)
    hints = {
        errno.ENOSPC: f"free some space: df -h {Path(path).parent}",
        errno.EDQUOT: f"free some space: df -h {Path(path).parent}",
        errno.EROFS: f"the file system is read-only: findmnt -T {path}",
        errno.EISDIR: f"a directory exists at this path: ls -ld {path}",
        errno.EINVAL: f"a pipe, socket or device exists at this path: ls -lL {path}",
        errno.EBUSY: f"the file itself is a mount point, as in a container: findmnt {path}",
        errno.EFBIG: f"find out why it is so large: ls -lh {path}",
        errno.ELOOP: f"the symlinks form a loop: namei -l {path}",
    }
    if isinstance(error, DanglingLink):
        hints[number] = f"create its target or remove the link: rm {error.filename}"
    kind = PreconditionError if number == errno.EROFS else ConfigError
    return kind(f"can't {verb} {path}: {reason}", hint=hints.get(number, f"inspect it: ls -ld {path}"))


@contextmanager
def explained(path: str, verb: str) -> Iterator[None]:
    """Turn an OSError of the block into a message."""
    try:
        yield
    except OSError as error:
        raise explain_os_error(error, path, verb) from error


def read_from(path: Path, offset: int, most: int) -> bytes:
    """At most `most` bytes of a growing file, from `offset` on; from its start if it has become shorter."""
    with path.open("rb") as stream:
        if os.fstat(stream.fileno()).st_size >= offset:
            stream.seek(offset)
        return stream.read(most)


def empty_file(path: Path) -> None:
    """Empty a file in place: a process that appends to it continues at its start."""
    os.truncate(path, 0)


class LogReader:
    """Lines that are appended to the kernel's log, /dev/kmsg, or to a file like it.

    OSError without permission. Each read(2) of /dev/kmsg returns one record, EPIPE if records were
    overwritten before they were read, and EAGAIN at the end (the kernel's
    Documentation/ABI/testing/dev-kmsg).
    """

    _RECORD = 8192
    _MOST = 20_000  # records: more than the kernel's own buffer holds

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        self.skip()

    def skip(self) -> None:
        """Skip the lines that exist now."""
        os.lseek(self._descriptor, 0, os.SEEK_END)

    def rewind(self) -> None:
        """Return to the oldest line that still exists."""
        os.lseek(self._descriptor, 0, os.SEEK_SET)

    def news(self) -> Iterator[str]:
        """Lines since the last call."""
        for _ in range(self._MOST):
            try:
                data = os.read(self._descriptor, self._RECORD)
            except BrokenPipeError:
                continue
            except BlockingIOError:
                return
            if not data:
                return
            yield from data.decode("utf-8", "replace").splitlines()

    def close(self) -> None:
        os.close(self._descriptor)
