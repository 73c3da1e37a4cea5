"""The machine. The only module that runs processes, writes files, opens daemon sockets or reads the clock.

Every path is absolute *on the node* and is joined to `Host.root`, symlinks included, so a recorded machine, a
mounted host and a test's tmp_path are the same thing. With a root other than ``/`` nothing live is contacted:
what can't be a file in the tree (command output, device numbers, daemon answers) comes from
``ROOT/.gpunode/recording.json``, whose format is docs/recorded-machines.md.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpunode._files import explain_os_error, holds, read_regular, resolve_in_root
from gpunode._process import COMMAND_NOT_FOUND, Completed, run_process
from gpunode._recording import RECORDING, parse_recording
from gpunode.errors import DaemonError, PreconditionError, Unreadable

if TYPE_CHECKING:
    import socket

__all__ = ["COMMAND_NOT_FOUND", "RECORDING", "Completed", "DeviceNode", "Host"]
_SYSTEM_PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")


@dataclass(frozen=True)
class DeviceNode:
    """A character device: numbers as the kernel gives them, `mode` holds permission bits only."""

    path: str
    major: int
    minor: int
    mode: int


@dataclass(frozen=True)
class Host:
    """One machine, seen through `root`. `environ` is what children inherit, `trace` is told every command."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    trace: Callable[[str], None] | None = None

    @cached_property
    def live(self) -> bool:
        """Whether daemons, NVML and processes of this machine may be contacted."""
        return self.root == Path("/")

    @property
    def uid(self) -> int:
        """Who runs gpunode: the effective user id."""
        return os.geteuid()

    @property
    def is_root(self) -> bool:
        return self.uid == 0

    # --- paths -----------------------------------------------------------------------------------------

    def path(self, path: str | Path, *, follow: bool = True) -> Path:
        """Where a node path lies on this machine; symlinks are resolved inside the root, never out of it."""
        if self.live:
            return Path(path)
        return resolve_in_root(self.root, path, follow)

    def node_path(self, real: Path) -> str:
        """The inverse of `path`: what the node itself calls this file."""
        return str(real) if self.live else "/" + str(real.relative_to(self.root))

    def realpath(self, path: str) -> str:
        """The node path behind a chain of symlinks."""
        return str(Path(path).resolve()) if self.live else self.node_path(self.path(path))

    # --- reading ---------------------------------------------------------------------------------------

    def read_bytes(self, path: str) -> bytes | None:
        """The bytes, None if nothing is there. `Unreadable` if this user may not, else `ConfigError`.

        A pipe, a socket or a device is refused, since reading one may never end; so is a file above 512 MiB.
        """
        try:
            return read_regular(self.path(path))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None  # a name with a NUL byte, a ValueError, is nobody's
        except OSError as error:
            raise explain_os_error(error, path, "read") from error

    def read_text(self, path: str) -> str | None:
        """Like `read_bytes`, decoded; bytes that are no UTF-8 are kept as surrogates."""
        data = self.read_bytes(path)
        return None if data is None else data.decode("utf-8", "surrogateescape")

    def exists(self, path: str) -> bool:
        return holds(Path.exists, self.path, path)

    def is_file(self, path: str) -> bool:
        return holds(Path.is_file, self.path, path)

    def is_dir(self, path: str) -> bool:
        return holds(Path.is_dir, self.path, path)

    def is_symlink(self, path: str) -> bool:
        return holds(Path.is_symlink, lambda name: self.path(name, follow=False), path)

    def readlink(self, path: str) -> str | None:
        """The link's own text, None if it is no link."""
        try:
            real = self.path(path, follow=False)
            return str(real.readlink()) if real.is_symlink() else None
        except OSError as error:
            raise explain_os_error(error, path, "look at") from error

    def listdir(self, path: str) -> tuple[str, ...]:
        """Sorted names; empty if there is no such directory."""
        try:
            return tuple(sorted(os.listdir(self.path(path))))  # noqa: PTH208 - names, not paths
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return ()
        except OSError as error:
            raise explain_os_error(error, path, "list") from error

    def glob(self, directory: str, pattern: str) -> tuple[str, ...]:
        """Sorted node paths in one directory whose names match (no recursion)."""
        from fnmatch import fnmatchcase

        names = (name for name in self.listdir(directory) if fnmatchcase(name, pattern))
        return tuple(f"{directory.rstrip('/')}/{name}" for name in names)

    def stat(self, path: str) -> os.stat_result | None:
        """`stat` of what the path leads to, None if there is nothing."""
        try:
            return os.stat(path if self.live else self.path(path))  # noqa: PTH116 - some ask all day
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        except OSError as error:
            raise explain_os_error(error, path, "look at") from error

    def executable(self, path: str) -> bool:
        """A file of more than zero bytes that may be executed; a truncated install counts as missing."""
        found = self.stat(path)
        return (
            found is not None
            and stat.S_ISREG(found.st_mode)
            and found.st_size > 0
            and found.st_mode & 0o111 != 0
        )

    def which(self, name: str) -> str | None:
        """Node path of a program: PATH on the live node, the system directories in any other root."""
        if name.startswith("/"):
            return name if self.executable(name) else None
        own = self.environ.get("PATH", "").split(":") if self.live else []
        for directory in dict.fromkeys([*filter(None, own), *_SYSTEM_PATH]):
            with suppress(Unreadable):  # one that is closed to this user; a shell passes it over, too
                if self.executable(f"{directory}/{name}"):
                    return f"{directory}/{name}"
        return None

    def device(self, path: str) -> DeviceNode | None:
        """The character device at `path`, None if there is none."""
        if not self.live:
            seen = self.recorded("devices", path)
            return DeviceNode(path, seen["major"], seen["minor"], int(seen["mode"], 8)) if seen else None
        found = self.stat(path)
        if found is None or not stat.S_ISCHR(found.st_mode):
            return None
        return DeviceNode(path, os.major(found.st_rdev), os.minor(found.st_rdev), stat.S_IMODE(found.st_mode))

    def devices(self, directory: str) -> tuple[DeviceNode, ...]:
        """Character devices directly in a directory, by name."""
        if not self.live:
            names: list[str] = [
                name for name in self.recording.get("devices", {}) if Path(name).parent == Path(directory)
            ]
            found = (self.device(name) for name in sorted(names))
        else:
            found = (self.device(f"{directory}/{name}") for name in self.listdir(directory))
        return tuple(node for node in found if node is not None)

    # --- recorded machines -----------------------------------------------------------------------------

    @cached_property
    def recording(self) -> dict[str, Any]:
        """What a recorded machine holds that can't be a file; empty for a live one."""
        text = None if self.live else self.read_text("/" + RECORDING)
        if not text:
            return {}
        return parse_recording(text)

    def recorded(self, section: str, key: str) -> Any:
        """One recorded value, None where nothing was recorded."""
        return self.recording.get(section, {}).get(key)

    # --- processes -------------------------------------------------------------------------------------

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float = 30.0,
        stdin: str | bytes | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Completed:
        """Run a program without a shell and wait at most `timeout` seconds; never raises for its failure.

        A child that can't be killed (stuck in the driver, state D) is left behind after a second: waiting for
        it would hang us as well. On a recorded machine the recorded output is returned.
        """
        if self.trace is not None:
            self.trace(" ".join(argv))
        if not self.live:
            return self._replay(argv)
        full = {**self.environ, "LC_ALL": "C.UTF-8", **(env or {})}
        return run_process(tuple(argv), timeout, stdin, full)

    def _replay(self, argv: Sequence[str]) -> Completed:
        import shlex

        seen = self.recorded("commands", shlex.join(argv))
        if seen is None:
            return Completed(tuple(argv), COMMAND_NOT_FOUND, "", "not recorded")
        return Completed(tuple(argv), seen.get("code", 0), seen.get("stdout", ""), seen.get("stderr", ""))

    def signal(self, pid: int, name: str) -> None:
        """Send SIGHUP, SIGTERM, ... (`name` without SIG) to a process of this node."""
        import signal

        if not self.live:
            raise PreconditionError(f"no process can be signalled under --root {self.root}")
        os.kill(pid, signal.Signals[f"SIG{name}"])

    # --- daemons and time ------------------------------------------------------------------------------

    def connect_unix(self, path: str, timeout: float = 5.0) -> socket.socket:
        """A connected stream socket. `DaemonError` says why not: absent, refused, denied."""
        from gpunode._sockets import connect_unix

        if not self.live:
            raise DaemonError(f"no socket is contacted under --root {self.root}", code="not-live")
        return connect_unix(path, timeout)

    def socket_state(self, path: str) -> str:
        """listening, refused (nobody behind it), absent, denied (no permission), not-a-socket, or other-type
        (somebody is behind it, and it is no stream socket)."""
        return self.listener(path)[0]

    def listener(self, path: str) -> tuple[str, int]:
        """`socket_state`, and the process that listens; 0 if it can't be told. Nothing is said to it."""
        from gpunode._sockets import listener

        if not self.live:
            return self.recorded("sockets", path) or "absent", 0
        return listener(path, self.stat(path))

    def listen_tcp(self, address: str, port: int) -> socket.socket:
        """A listening socket of this machine, whatever the root; `PreconditionError` if it can't be."""
        from gpunode._sockets import listen_tcp

        return listen_tcp(address, port)

    def notify(self, message: str) -> None:
        """Tell systemd (READY=1, STATUS=...); does nothing when it isn't listening. See sd_notify(3)."""
        from gpunode._sockets import send_datagram

        address = self.environ.get("NOTIFY_SOCKET", "")
        if self.live and address[:1] in {"/", "@"}:
            send_datagram(address, message)

    def listen_unix(self, path: str) -> socket.socket:
        """A listening socket that only we may connect to. `PreconditionError` says why there is none."""
        from gpunode._sockets import listen_unix

        return listen_unix(self.path(path, follow=False))

    def now(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds on a clock that never goes back."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait_until(self, ready: Callable[[], bool], timeout: float, interval: float = 0.05) -> bool:
        """Poll `ready` until it is true or `timeout` seconds are over."""
        deadline = self.monotonic() + timeout
        while not ready():
            if self.monotonic() >= deadline:
                return False
            self.sleep(interval)
        return True

    # --- writing ---------------------------------------------------------------------------------------

    def writable(self, path: str) -> bool:
        """Whether a file at `path` could be written: by the file if it exists, else by its nearest parent."""
        real = self.path(path)
        while not real.exists() and real != real.parent:
            real = real.parent
        return os.access(real, os.W_OK)

    def write_atomic(
        self, path: str, data: bytes, *, mode: int = 0o644, expect: bytes | None = None, keep: bool = True
    ) -> None:
        """Replace a file in one step: temporary file beside it, fsync, rename, fsync of the directory.

        Mode, owner and extended attributes (SELinux label, ACL) of an existing file are kept; a symlink is
        written through. With `expect` the write is refused if the file no longer holds those bytes. Without
        `keep` nothing of what was there is kept, a symlink included: for files that are ours alone, where
        whatever else lies in their place was planted.
        """
        from gpunode._files import refuse_dangling, write_atomic

        real = self.path(path, follow=keep)
        if keep:
            refuse_dangling(real, path)
        try:
            write_atomic(real.resolve() if self.live and keep else real, data, mode, expect, keep=keep)
        except OSError as error:
            raise explain_os_error(error, path, "write") from error

    def make_dirs(self, path: str, mode: int = 0o755) -> None:
        from gpunode._files import make_directories

        try:
            make_directories(self.path(path), mode)
        except OSError as error:
            raise explain_os_error(error, path, "create") from error

    def remove(self, path: str) -> None:
        """Remove one file; nothing happens if it is gone already."""
        try:
            self.path(path, follow=False).unlink(missing_ok=True)
        except OSError as error:
            raise explain_os_error(error, path, "remove") from error

    def remove_empty_directory(self, path: str) -> bool:
        """Remove a directory that gpunode made; False if something lies in it, or it is gone."""
        try:
            self.path(path, follow=False).rmdir()
        except OSError:
            return False
        return True

    def set_owner(self, path: str, uid: int, gid: int, mode: int) -> None:
        """Owner and permission bits of a file that was put back."""
        try:
            os.chown(self.path(path), uid, gid)
            self.path(path).chmod(mode)
        except OSError as error:
            raise explain_os_error(error, path, "change the owner of") from error

    def rename(self, old: str, new: str) -> None:
        """Atomic rename of a file or directory within one file system."""
        try:
            self.path(old, follow=False).rename(self.path(new, follow=False))
        except OSError as error:
            raise explain_os_error(error, old, "rename") from error

    def remove_tree(self, path: str) -> None:
        """Remove a directory that gpunode itself made, with everything in it."""
        import shutil

        shutil.rmtree(self.path(path, follow=False), ignore_errors=True)

    @contextmanager
    def temporary_directory(self) -> Iterator[Path]:
        """A private directory (0700) of this machine, whatever the root; removed on the way out.

        A long TMPDIR is passed over: a unix socket's path holds 107 bytes (unix(7)), and one is made inside.
        """
        import tempfile

        short = None if len(tempfile.gettempdir()) <= 32 else "/tmp"  # noqa: S108 - mkdtemp makes its own name
        with tempfile.TemporaryDirectory(prefix="gpunode-", dir=short) as name:
            yield Path(name)

    @contextmanager
    def lock(self, path: str, timeout: float) -> Iterator[None]:
        """Hold an exclusive lock, waiting at most `timeout` seconds; the kernel frees it if we die."""
        from gpunode._files import exclusive_lock

        try:
            self.make_dirs(str(Path(path).parent))
            with exclusive_lock(self.path(path), timeout):
                yield
        except TimeoutError as error:
            raise PreconditionError(
                f"another gpunode is changing this node ({error})",
                hint="wait for it to end, then run this again",
            ) from error
