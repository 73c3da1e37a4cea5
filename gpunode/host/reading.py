"""Reading from a host: paths below the root, files, devices and the kernel's log. Nothing here changes
anything."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from threading import get_ident
from typing import Any, NamedTuple

from gpunode.errors import GpunodeError, Unreadable
from gpunode.host import trust
from gpunode.host.files import (
    LARGE_BYTES,
    READ_BYTES,
    LogReader,
    explain_os_error,
    explained,
    read_end,
    read_regular,
    resolve_in_root,
)
from gpunode.host.recording import KERNEL_LOG, RECORDING, parse_recording
from gpunode.output.typed import from_plain

# paths below a process's root directory; the link's text isn't its real target
_INSIDE = re.compile(r"(/proc/([0-9]+)/root)(/.*)", re.DOTALL)
_MISSING = (FileNotFoundError, NotADirectoryError, ValueError)  # the last for a name with a NUL byte
_SYSTEM_PATH = (
    *("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"),
    "/run/current-system/sw/bin",  # NixOS, where the others contain only sh and env
)


class DeviceNode(NamedTuple):
    """A character device: numbers as the kernel gives them, `mode` holds permission bits only.

    `gid` is the group that owns it.
    """

    path: str
    major: int
    minor: int
    mode: int
    gid: int = 0


class FileSystem(NamedTuple):
    """Sizes in bytes, `left` is available to ordinary users; `inodes` is 0 for a file system that has no
    fixed number."""

    size: int
    left: int
    inodes: int
    inodes_left: int


@dataclass(frozen=True)
class ReadingHost:
    """See `Host`.

    `behalf` is the user for whom paths are read; None for ours. `asked` is the last request of each thread,
    by its identifier: the doctor names it if no response arrives.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    trace: Callable[[str], None] | None = None
    behalf: int | None = None
    asked: dict[int, str] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def live(self) -> bool:
        """Whether daemons, NVML and processes of this machine may be contacted."""
        return self.root == Path("/")

    @property
    def uid(self) -> int:
        """The effective user id of gpunode."""
        return os.geteuid()

    @property
    def is_root(self) -> bool:
        return self.uid == 0

    # --- paths -----------------------------------------------------------------------------------------

    def path(self, path: str | Path, *, follow: bool = True) -> Path:
        """Path on this machine of a node path; symlinks are resolved inside the root, never out of it."""
        if self.live:
            word = self._word(str(path))
            if word is None:
                return Path(path)
            with trust.opened_as(*word, follow=follow) as (_, real):
                return Path(real)
        self.note(f"reading {path}")
        if str(path) in self._unreadable:
            raise Unreadable(self._unreadable[str(path)])
        return resolve_in_root(self.root, path, follow)

    def _word(self, path: str) -> tuple[int, str, str] | None:
        """On whose behalf a path of the live node is read: the user, the root directory, and the path below
        it. None for our own."""
        word: tuple[int, str, str] | None = None
        if self.behalf is not None:
            word = self.behalf, "/", path  # also if the path leads through a process's root directory
        elif path.startswith("/proc/") and (inside := _INSIDE.fullmatch(path)):
            word = self.owner(int(inside[2])), inside[1], inside[3]
        self.note(f"reading {path}")
        return word

    def note(self, request: str) -> None:
        """Record the request that this thread is about to make to the machine."""
        self.asked[get_ident()] = request

    def owner(self, pid: int) -> int:
        """The user for whom a process acts. It is -1 for a live process that has ended or is hidden, and 0 in
        a recording without the process's status."""
        unknown = -1 if self.live else 0
        own_host = self if self.behalf is None else replace(self, behalf=None)
        return trust.owner_in(own_host.text_or_empty(f"/proc/{pid}/status"), unknown)

    def is_own(self, pid: int) -> bool:
        """Whether a process is the node's own, as gpunode/host/trust.py defines it: only such a process is
        trusted."""
        if self.owner(pid) not in (0, self.uid) or (self.live and trust.setuid_program(pid)):
            return False
        if self.in_pid_namespace(pid):
            return False  # also a container that a system service runs, such as one of systemd-nspawn
        cgroup = self.text_or_empty(f"/proc/{pid}/cgroup")
        if trust.in_system_service(cgroup):
            return True
        names = [name for name in ("self", "1") if self.live or name == "1"]
        spaces = {self._namespace(name, "user") for name in names} | {""}
        if self._namespace(str(pid), "user") not in spaces:
            return False
        mounts = self._namespace(str(pid), "mnt")
        if not mounts:
            return not trust.in_container(cgroup)
        for name in names:
            if mounts == self._namespace(name, "mnt"):
                return not self.live or trust.root_directory(str(pid)) == trust.root_directory(name)
        return not self.live and not any(self._namespace(name, "mnt") for name in names)

    def in_pid_namespace(self, pid: int) -> bool:
        """Whether a process is in a PID namespace below ours: proc_pid_status(5) then shows two numbers."""
        lines = self.text_or_empty(f"/proc/{pid}/status").splitlines()
        return any(line.startswith("NSpid:") and len(line.split()) > 2 for line in lines)

    def _namespace(self, pid: str, kind: str) -> str:
        """A process's namespace; empty if this user can't see it, or it wasn't recorded."""
        try:
            return self.readlink(f"/proc/{pid}/ns/{kind}") or ""
        except GpunodeError:
            return ""

    def node_path(self, real: Path) -> str:
        """The inverse of `path`: what the node itself calls this file."""
        return str(real) if self.live else "/" + str(real.relative_to(self.root))

    def realpath(self, path: str) -> str:
        """The node path behind a chain of symlinks."""
        if self.live and self._word(path) is None:
            return str(Path(path).resolve())
        with suppress(FileNotFoundError):
            return self.node_path(self.path(path))
        return path

    # --- reading ---------------------------------------------------------------------------------------

    def read_bytes(self, path: str, limit: int = READ_BYTES) -> bytes | None:
        """The bytes, None if the file doesn't exist.

        `Unreadable` if this user has no permission, else `ConfigError`. A pipe, a socket or a device is
        refused, because reading one may never end; so is a file of more than `limit` bytes, of which no more
        is read.
        """
        with explained(path, "read"), suppress(*_MISSING), self._readable(path) as (real, size):
            return read_regular(real, limit)[:size]
        return None

    @contextmanager
    def _readable(self, path: str) -> Iterator[tuple[Path, int | None]]:
        """A path on this machine of a file or directory, and how many of its bytes may be read; None for
        all."""
        word = self._word(path) if self.live else None
        if word is None:
            yield self.path(path), None
        else:
            with trust.readable_as(*word) as opened:
                yield opened

    def read_text(self, path: str, limit: int = READ_BYTES) -> str | None:
        """Like `read_bytes`, decoded; bytes that are no UTF-8 are kept as surrogates."""
        data = self.read_bytes(path, limit)
        return None if data is None else data.decode("utf-8", "surrogateescape")

    def text_or_empty(self, path: str, limit: int = READ_BYTES) -> str:
        """Like `read_text`, but empty for a file that doesn't exist or can't be read: for facts that a node
        needn't have, such as those of a process that may have ended or of a device that fell off the bus."""
        try:
            return self.read_text(path, limit) or ""
        except GpunodeError:
            return ""

    def read_tail(self, path: str, limit: int) -> str:
        """The last `limit` bytes of a file of any size, decoded like `read_text`; empty if it doesn't
        exist."""
        data = b""
        with explained(path, "read"), suppress(*_MISSING), self._readable(path) as (real, size):
            data = read_end(real, limit if size is None else min(limit, size))
        return data.decode("utf-8", "surrogateescape")

    def exists(self, path: str) -> bool:
        return self._mode(path) != 0

    def is_file(self, path: str) -> bool:
        return stat.S_ISREG(self._mode(path))

    def is_dir(self, path: str) -> bool:
        return stat.S_ISDIR(self._mode(path))

    def systemd_runs(self) -> bool:
        """Whether systemd is this node's init; sd_booted(3) tests the same directory."""
        return self.is_dir("/run/systemd/system")

    def is_symlink(self, path: str) -> bool:
        return stat.S_ISLNK(self._mode(path, follow=False))

    def _mode(self, path: str, *, follow: bool = True) -> int:
        """`st_mode` of the path's target, 0 if there is none.

        `Unreadable` if this user has no permission. A loop of symlinks has no target; neither has a name that
        is too long for its file system.
        """
        try:
            return self._status(path, follow=follow).st_mode
        except ValueError:
            return 0  # a name with a NUL byte
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR):
                return 0
            raise explain_os_error(error, path, "look at") from error

    def readlink(self, path: str) -> str | None:
        """The link's own text, None if it isn't a link."""
        with explained(path, "look at"), suppress(*_MISSING):
            if self.live and (word := self._word(path)):
                with trust.opened_as(*word, follow=False) as (descriptor, _):
                    is_link = stat.S_ISLNK(os.fstat(descriptor).st_mode)
                    return os.readlink("", dir_fd=descriptor) if is_link else None
            real = self.path(path, follow=False)
            return str(real.readlink()) if real.is_symlink() else None
        return None

    def listdir(self, path: str) -> tuple[str, ...]:
        """Sorted names; empty if the directory doesn't exist."""
        with explained(path, "list"), suppress(*_MISSING), self._readable(path) as (real, _):
            return tuple(sorted(os.listdir(real)))  # noqa: PTH208 - names, not paths
        return ()

    def glob(self, directory: str, pattern: str) -> tuple[str, ...]:
        """Sorted node paths in one directory whose names match (no recursion)."""
        names = (name for name in self.listdir(directory) if fnmatchcase(name, pattern))
        return tuple(f"{directory.rstrip('/')}/{name}" for name in names)

    def stat(self, path: str) -> os.stat_result | None:
        """`stat` of the path's target, None if there is none."""
        try:  # without `explained` and `suppress`, which would take as long as the call: services repeat it
            return self._status(path)
        except _MISSING:
            return None
        except OSError as error:
            raise explain_os_error(error, path, "look at") from error

    def _status(self, path: str, *, follow: bool = True) -> os.stat_result:
        if not self.live:
            return os.stat(self.path(path, follow=follow), follow_symlinks=follow)  # noqa: PTH116
        if word := self._word(path):
            # of the opened file: a resolved path may be replaced by a link before it is used
            with trust.opened_as(*word, follow=follow) as (descriptor, _):
                return os.fstat(descriptor)
        return os.stat(path, follow_symlinks=follow)  # noqa: PTH116 - called all day

    def executable(self, path: str) -> bool:
        """Whether it is an executable file of more than zero bytes; a truncated install counts as missing."""
        status = self.stat(path)
        return (
            status is not None
            and stat.S_ISREG(status.st_mode)
            and status.st_size > 0
            and status.st_mode & 0o111 != 0
        )

    def which(self, name: str) -> str | None:
        """Node path of a program: PATH on the live node, the system directories in any other root.

        On the live node a program that another user may have written is skipped; see `unsafe_program`.
        """
        if name.startswith("/"):
            return name if self.executable(name) else None
        return next((path for path in self._places(name) if not self.refusal(path)), None)

    def unsafe_program(self, name: str) -> tuple[str, str] | None:
        """The program that `which` skips if it finds no other: its path, and why it isn't run."""
        if "/" in name or self.which(name) is not None:
            return None
        return next(((path, f"it was not run: {self.refusal(path)}") for path in self._places(name)), None)

    def _places(self, name: str) -> Iterator[str]:
        own = self.environ.get("PATH", "").split(":") if self.live else []
        for directory in dict.fromkeys([*filter(None, own), *_SYSTEM_PATH]):
            with suppress(Unreadable):  # a program that this user can't read; a shell skips it too
                if self.executable(f"{directory}/{name}"):
                    yield f"{directory}/{name}"

    def refusal(self, path: str) -> str:
        """Why this file, a program or a library, must not be executed: other users may have written it, or
        can replace it. Empty if only root and this user can; see `trust.refusal`."""
        return trust.refusal(path) if self.live else ""

    def device(self, path: str) -> DeviceNode | None:
        """The character device at `path`, None if there is none."""
        if not self.live:
            seen = self.recorded("devices", path)
            if not seen:
                return None
            numbers = seen["major"], seen["minor"], int(seen["mode"], 8), seen.get("gid", 0)
            return DeviceNode(path, *numbers)
        status = self.stat(path)
        if status is None or not stat.S_ISCHR(status.st_mode):
            return None
        major, minor = os.major(status.st_rdev), os.minor(status.st_rdev)
        return DeviceNode(path, major, minor, stat.S_IMODE(status.st_mode), status.st_gid)

    def file_system(self, path: str) -> FileSystem | None:
        """Free space of the file system of `path` (statvfs(3)); None if the path doesn't exist. Blocks on a
        file system that hangs."""
        if not self.live:
            seen = self.recorded("filesystems", path)
            return None if seen is None else from_plain(FileSystem, seen, lenient=True)
        with explained(path, "look at"), suppress(*_MISSING):
            status = os.statvfs(self.path(path))
            size, left = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
            return FileSystem(size, left, status.f_files, status.f_favail)
        return None

    def devices(self, directory: str) -> tuple[DeviceNode, ...]:
        """Character devices directly in a directory, by name."""
        if not self.live:
            names: list[str] = [
                name for name in self.recording.get("devices", {}) if Path(name).parent == Path(directory)
            ]
            nodes = (self.device(name) for name in sorted(names))
        else:
            nodes = (self.device(f"{directory}/{name}") for name in self.listdir(directory))
        return tuple(node for node in nodes if node is not None)

    def kernel_log(self) -> tuple[str, ...] | None:
        """The kernel's log of this boot as far as it is kept, lines as in /dev/kmsg or, on a recorded
        machine, as dmesg(1) prints them. None if there is none; `Unreadable` if this user has no permission.
        """
        if not self.live:
            self.path("/dev/kmsg")  # the user who recorded this machine may have had no permission to read it
            text = self.read_text("/" + KERNEL_LOG, LARGE_BYTES)
            return None if text is None else tuple(text.splitlines())
        with (
            explained("/dev/kmsg", "read"),
            suppress(FileNotFoundError, NotADirectoryError),
            closing(LogReader(self.path("/dev/kmsg"))) as reader,
        ):
            reader.rewind()
            return tuple(reader.news())
        return None

    # --- recorded machines -----------------------------------------------------------------------------

    @cached_property
    def recording(self) -> dict[str, Any]:
        """Values of a recorded machine that can't be files; empty for a live one."""
        if self.live:
            return {}
        data = b""
        with explained("/" + RECORDING, "read"), suppress(FileNotFoundError, NotADirectoryError):
            data = read_regular(resolve_in_root(self.root, RECORDING, follow=True), LARGE_BYTES)
        return parse_recording(data.decode("utf-8", "surrogateescape")) if data else {}

    @cached_property
    def _unreadable(self) -> dict[str, str]:
        """Paths that the recording user couldn't read."""
        unreadable: dict[str, str] = self.recording.get("unreadable", {})
        return unreadable

    def recorded(self, section: str, key: str) -> Any:
        """One recorded value, None if it wasn't recorded."""
        return self.recording.get(section, {}).get(key)

    def heard(self, section: str, key: str, value: Any) -> None:
        """Receives each answer of a daemon or NVML, in a recording's format; a `RecordingHost` stores it."""
