"""Access to the machine: the only package that runs processes, writes files and opens daemon sockets.

Every path is absolute *on the node* and is joined to `Host.root`, symlinks included, so a recorded machine, a
mounted host and a test's tmp_path are the same thing. With a root other than ``/`` nothing live is contacted:
what can't be a file in the tree (command output, device numbers, daemon answers) comes from
``ROOT/.gpunode/recording.json``, in the format of docs/recorded-machines.md.
"""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import signal
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpunode.errors import DaemonError, PreconditionError, UsageError
from gpunode.host import trust
from gpunode.host.files import (
    LARGE_BYTES,
    OTHERS_MAY_WRITE,
    SMALL_BYTES,
    Place,
    exclusive_lock,
    explain_os_error,
    explained,
    named,
    open_lock,
    remove_leftovers,
    socket_state_of,
    write_atomic,
)
from gpunode.host.process import COMMAND_NOT_FOUND, Completed, LineChild, run_process
from gpunode.host.reading import DeviceNode, FileSystem, ReadingHost
from gpunode.host.recording import RECORDING

if TYPE_CHECKING:
    import socket

    from typing_extensions import Self


NOT_TRUSTED = 126  # a shell's exit status for a program that can't be executed
_M_ARENA_MAX = -8  # malloc.h
PLUGIN_STATE = "/var/lib/gpunode/plugin"  # default state directory of gpunode's own plugin

__all__ = ["COMMAND_NOT_FOUND", "LARGE_BYTES", "NOT_TRUSTED", "PLUGIN_STATE", "RECORDING", "SMALL_BYTES"]
__all__ += ["Completed", "DeviceNode", "FileSystem", "Host"]


@dataclass(frozen=True)
class Host(ReadingHost):
    """One machine, seen through `root`. `environ` is what children inherit, `trace` gets every command."""

    # --- processes -------------------------------------------------------------------------------------

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float = 30.0,
        stdin: str | bytes | None = None,
        env: Mapping[str, str] | None = None,
        watch: Callable[[str], None] | None = None,
    ) -> Completed:
        """Run a program without a shell and wait at most `timeout` seconds; never raises for its failure.

        A child that can't be killed (stuck in the driver, state D) is left behind after a second: waiting for
        it would hang us as well. On a recorded machine the recorded output is returned.

        With `watch`, which is called with the last line of output from time to time, the child goes on if we
        are killed, and `timeout` counts from its last output; it has no stdin.
        """
        if self.trace is not None:
            self.trace(" ".join(argv))
        self.note(f"running {' '.join(argv)}")
        if not self.live:
            return self._replay(argv)
        full = {**self.environ, "LC_ALL": "C.UTF-8", **(env or {})}
        path = full.get("PATH", os.defpath)
        program, refusal = trust.find_program(argv[0], path)
        full["PATH"] = trust.safe_path(path)
        if refusal or self.behalf is not None:
            reason = refusal or f"user {self.behalf} specified it"
            return Completed(tuple(argv), NOT_TRUSTED, "", f"{argv[0]} was not run: {reason}")
        if not program:
            return Completed(tuple(argv), COMMAND_NOT_FOUND, "", f"{argv[0]}: {os.strerror(errno.ENOENT)}")
        return run_process(tuple(argv), timeout, stdin, full, program, watch)

    def start_child(self, argv: Sequence[str]) -> LineChild:
        """Start a child process of this live machine that answers in lines; see `process.LineChild`."""
        if self.trace is not None:
            self.trace(" ".join(argv))
        self.note(f"running {' '.join(argv)}")
        return LineChild(tuple(argv), {**self.environ, "LC_ALL": "C.UTF-8"})

    def refuse_unsafe(self, *names: str) -> None:
        """`PreconditionError` for a program if the node only has one that other users may have written: the
        caller would otherwise report it as missing."""
        for name in names:
            unsafe = self.unsafe_program(name)
            if unsafe is not None:
                raise PreconditionError(
                    f"{name} is at {unsafe[0]}, but {unsafe[1]}",
                    hint=f"{trust.advice(unsafe[1])}; see namei -l {unsafe[0]}",
                    code="unsafe-program",
                )

    def as_user(self, uid: int) -> Self:
        """This host for paths that another user specifies: they are read as that user could read them,
        sockets must be that user's, and nothing is run. Returns the host itself for root and for our own
        user."""
        return self if not self.live or uid in (0, self.uid) else replace(self, behalf=uid)

    def _replay(self, argv: Sequence[str]) -> Completed:
        seen = self.recorded("commands", shlex.join(argv))
        if seen is None:
            return Completed(tuple(argv), COMMAND_NOT_FOUND, "", "not recorded")
        out, err = seen.get("stdout", ""), seen.get("stderr", "")
        return Completed(tuple(argv), seen.get("code", 0), out, err, seen.get("timedOut") is True)

    def signal(self, pid: int, name: str, expected: Callable[[], bool] = lambda: True) -> None:
        """Send SIGHUP, SIGTERM, ... (`name` without SIG) to a process of this node.

        `expected` says whether `pid` is still the intended process: it is called once a descriptor of the
        process is open, so that its number can't be given to another one in between. `ProcessLookupError` if
        it isn't.
        """
        if not self.live:
            raise PreconditionError(f"no process can get a signal under --root {self.root}")
        process = os.pidfd_open(pid)
        try:
            if not expected():
                raise ProcessLookupError(f"process {pid} has ended and its number is in use again")
            signal.pidfd_send_signal(process, signal.Signals[f"SIG{name}"])
        finally:
            os.close(process)

    # --- daemons and time ------------------------------------------------------------------------------

    def connect_unix(self, path: str, timeout: float = 5.0) -> socket.socket:
        """A connected stream socket. `DaemonError` says why there is none: absent, refused, denied."""
        from gpunode.host.sockets import connect_unix

        with self.socket_path(path) as real:
            return connect_unix(real, timeout)

    @contextmanager
    def socket_path(self, path: str) -> Iterator[str]:
        """A path to connect to a daemon's socket, valid in the context.

        `DaemonError` on a host that isn't live, and if the user for whom we act doesn't own the socket.
        """
        self.note(f"reading {path}")
        if not self.live:
            raise DaemonError(f"no socket can be used under --root {self.root}", code="not-live")
        with ExitStack() as opened:
            real = path
            if self.behalf is not None:
                try:
                    real = opened.enter_context(trust.socket_as(self.behalf, path))
                except OSError as error:
                    raise DaemonError(
                        f"can't connect to {path}: {error.strerror or error}", code=socket_state_of(error)
                    ) from error
            yield real

    def socket_state(self, path: str) -> str:
        """listening, refused (no process listens), absent, denied (no permission), not-a-socket, or
        other-type (a process listens, but it is not a stream socket)."""
        return self.listener(path)[0]

    def listener(self, path: str) -> tuple[str, int]:
        """`socket_state`, and the process that listens; 0 if unknown. Sends no data."""
        if not self.live:
            return self.recorded("sockets", path) or "absent", 0
        from gpunode.host.sockets import listener

        return listener(path, self.stat(path), self.connect_unix)

    def is_dead_socket(self, path: str) -> bool:
        """Whether a unix socket of this machine, whatever the root, is a leftover: no process listens on it.

        False with a full backlog, without permission, and if there is no socket.
        """
        from gpunode.host.sockets import refuses

        return refuses(self.path(path, follow=False))

    def listen_tcp(self, address: str, port: int) -> socket.socket:
        """A listening socket of this machine, whatever the root; `PreconditionError` if there can't be
        one."""
        from gpunode.host.sockets import listen_tcp

        return listen_tcp(address, port)

    def notify(self, message: str) -> None:
        """Notify systemd (READY=1, STATUS=...); does nothing if it isn't listening. See sd_notify(3)."""
        from gpunode.host.sockets import send_datagram

        address = self.environ.get("NOTIFY_SOCKET", "")
        if self.live and address[:1] in {"/", "@"}:
            send_datagram(address, message)

    def listen_unix(self, path: str) -> socket.socket:
        """A listening socket for this user only. `PreconditionError` says why there is none."""
        from gpunode.host.sockets import listen_unix

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
        self,
        path: str,
        data: bytes,
        *,
        mode: int = 0o644,
        expect: bytes | None = None,
        keep: bool = True,
        above: bool = False,
        owner: tuple[int, int] | None = None,
    ) -> None:
        """Replace a file in one step: temporary file beside it, fsync, rename, fsync of the directory.

        Mode, owner and extended attributes (SELinux label, ACL) of an existing file are kept; a symlink is
        written through. With `expect` the write is refused if the file no longer holds those bytes. Without
        `keep` nothing of an existing entry is kept, a symlink included: for files that only gpunode writes,
        where any other entry was planted. `above` is for directories of which a program reads every file
        (CRI-O: hidden ones too): the temporary file is in the directory above, where that is possible. In a
        directory of another user, or in which others may make files, nothing is kept either, but a file that
        fewer users may read keeps that mode. With `owner` (uid, gid) the file gets this owner and `mode`,
        regardless of the existing file; in such a directory without setuid and setgid bits.
        `PreconditionError` for a path through another user's symlink, and with `expect` for a symlink in such
        a directory.
        """
        with explained(path, "write"), self._held(path, follow=keep) as place:
            if keep and self.live and trust.is_shared(os.fstat(place.directory)):
                keep, mode = False, self._mode_in_shared(path, place, mode, expect, owner is not None)
            write_atomic(place, data, mode, expect, keep=keep, above=above, owner=owner)

    def _mode_in_shared(
        self, path: str, place: Place, mode: int, expect: bytes | None, restored: bool
    ) -> int:
        """The mode of a file that is written to a directory in which other users may replace it."""
        before = None if place.descriptor is None else os.fstat(place.descriptor).st_mode
        if expect and before is not None and stat.S_ISLNK(before):
            raise PreconditionError(
                f"can't write {path}: it is a symlink in a directory that other users can write",
                hint=f"see where the link points, then specify the target itself: ls -l {path}",
                code="planted-link",
            )
        narrow = before is not None and stat.S_ISREG(before) and not restored
        return mode & 0o777 & (before if narrow and before is not None else 0o777)

    def remove_leftovers(self, path: str) -> tuple[str, ...]:
        """Remove the temporary files of a killed `write_atomic` of `path`; return their node paths.

        The caller holds the lock that keeps others from writing the file now.
        """
        with (
            explained(path, "clean up beside"),
            suppress(FileNotFoundError, NotADirectoryError),
            self._held(path, follow=True) as place,
        ):
            return tuple(self.node_path(Path(leftover)) for leftover in remove_leftovers(place))
        return ()

    def refuse_output(self, path: str) -> None:
        """An error if `path`, on this machine whatever the root, can't take an output file."""
        whole = Path(path).absolute()
        with suppress(OSError):
            if not stat.S_ISREG(whole.stat().st_mode):
                hint = f"name a file in it: --output-file {path}/FILE" if whole.is_dir() else "name a file"
                raise UsageError(f"--output-file {path} is not a file", hint=hint)
        try:
            with trust.held("/", str(whole), follow=True, live=True) as place:
                allowed = os.access(".", os.W_OK, dir_fd=place.directory) and not self._kept_from_us(place)
        except PermissionError:
            allowed = False
        except OSError as error:
            if whole.is_symlink() or error.errno not in (errno.ENOENT, errno.ENOTDIR):
                raise explain_os_error(error, path, "write") from error
            raise UsageError(
                f"--output-file {path}: the directory doesn't exist",
                hint=f"create the directory: mkdir -p {whole.parent}",
            ) from error
        if not allowed:
            raise PreconditionError(
                f"--output-file {path}: no permission to write in this directory",
                hint="specify another directory, or use sudo",
            )

    def _kept_from_us(self, place: Place) -> bool:
        """Whether the directory's sticky bit prevents this user from replacing the entry."""
        directory = os.fstat(place.directory)
        if place.descriptor is None or self.is_root or not directory.st_mode & stat.S_ISVTX:
            return False
        return os.geteuid() not in (directory.st_uid, os.fstat(place.descriptor).st_uid)

    def _held(self, path: str, *, follow: bool = False, make: int = 0) -> AbstractContextManager[Place]:
        """The place where `path` is changed; see `trust.held`."""
        whole = str(Path(path).absolute()) if self.live else path
        return trust.held(str(self.root), whole, follow=follow, live=self.live, make=make)

    def make_dirs(self, path: str, mode: int = 0o755) -> None:
        """Make `path` with this mode, its missing parents with 0755; existing ones stay as they are.

        The umask is ignored: 077 would hide a CDI specification from other users' engines, 000 would open the
        journal.
        """
        with explained(path, "create"), self._held(path, make=mode) as place:
            if not stat.S_ISDIR(os.fstat(place.existing()).st_mode):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)

    def make_link(self, path: str, target: str) -> None:
        """Create a symlink to `target` at `path`. OSError if something exists there."""
        with self._held(path) as place:
            os.symlink(target, place.name, dir_fd=place.directory)

    def remove(self, path: str) -> None:
        """Remove one file; a missing file is not an error."""
        with explained(path, "remove"), suppress(FileNotFoundError), self._held(path) as place:
            os.unlink(place.name, dir_fd=place.directory)

    def remove_empty_directory(self, path: str) -> bool:
        """Remove a directory that gpunode created; False if it isn't empty, or doesn't exist."""
        try:
            with self._held(path) as place:
                os.rmdir(place.name, dir_fd=place.directory)
        except (OSError, PreconditionError):
            return False
        return True

    def set_owner(self, path: str, uid: int, gid: int, mode: int) -> None:
        """Set owner and permission bits of an existing file; does nothing in a directory in which other users
        may replace it."""
        with explained(path, "change the owner of"), self._held(path, follow=True) as place:
            if not (self.live and trust.is_shared(os.fstat(place.directory))):
                os.chown(named(place.existing()), uid, gid)
                os.chmod(named(place.existing()), mode)  # noqa: PTH101

    def set_mode(self, path: str, mode: int) -> None:
        """Set the permission bits of a file that gpunode created. No symlink at the end of the path is
        followed."""
        with explained(path, "change the mode of"), self._held(path) as place:
            if stat.S_ISLNK(os.fstat(place.existing()).st_mode):
                raise OSError(errno.ELOOP, "it is a symlink", path)
            os.chmod(named(place.existing()), mode)  # noqa: PTH101

    def restrict_umask(self) -> None:
        """Deny group and others write access to files that this process makes; call it once, before it has
        threads."""
        os.umask(os.umask(OTHERS_MAY_WRITE) | OTHERS_MAY_WRITE)

    def use_one_heap(self) -> None:
        """Let all threads of this process allocate from glibc's main heap; call it before there are threads.

        Otherwise glibc makes a heap ("arena", malloc(3)) for each thread, up to eight per processor, and each
        keeps memory that was freed: how much depends on which threads happened to allocate at once. They gain
        nothing from it where Python's lock lets one thread run at a time. musl has neither arenas nor this
        function.
        """
        import ctypes

        with suppress(AttributeError):
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)

    def rename(self, old: str, new: str) -> None:
        """Atomic rename of a file or directory within one file system."""
        with explained(old, "rename"), self._held(old) as source, self._held(new) as target:
            os.rename(source.name, target.name, src_dir_fd=source.directory, dst_dir_fd=target.directory)

    def remove_tree(self, path: str) -> None:
        """Remove a directory that gpunode created, with its contents."""
        with suppress(OSError), self._held(path) as place:
            shutil.rmtree(f"{named(place.directory)}/{place.name}", ignore_errors=True)

    @contextmanager
    def temporary_directory(self) -> Iterator[Path]:
        """A private directory (0700) of this machine, whatever the root; removed on the way out.

        A long TMPDIR is not used: a unix socket's path holds 107 bytes (unix(7)), and one is made inside.
        """
        import tempfile

        short = None if len(tempfile.gettempdir()) <= 32 else "/tmp"  # noqa: S108 - mkdtemp makes its own name
        with tempfile.TemporaryDirectory(prefix="gpunode-", dir=short) as name:
            yield Path(name)

    @contextmanager
    def lock(self, path: str, timeout: float) -> Iterator[None]:
        """Hold an exclusive lock, waiting at most `timeout` seconds; the kernel releases it if we die.

        Its directory is created with mode 0700 and must be one that no other user can write, because a user
        who can open the file can hold the lock forever. `PreconditionError`.
        """
        directory, _, name = path.rpartition("/")
        self.make_dirs(directory, mode=0o700)
        with explained(path, "lock"), self._held(directory) as place:
            descriptor = open_lock(place.existing(), name, directory)
        with exclusive_lock(descriptor, self.path(path), timeout):
            yield
