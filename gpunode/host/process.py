"""Child processes: each in its own session, killed as a whole, never waited for without a timeout.

`LineChild` is a child that stays and exchanges lines.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, NamedTuple

from gpunode.host.trust import find_program, safe_path

# Files without a name: deleted with the last process that has them open.


def unnamed_file() -> int:
    """The descriptor of an empty file in memory; not inherited across exec.

    `tempfile.TemporaryFile` fails where no directory for temporary files can be written: on the full or
    read-only disk that the doctor is to report. It is used where memfd_create(2) isn't available: Pythons
    built for old C libraries lack it, such as those of uv, and seccomp may forbid it.
    """
    if hasattr(os, "memfd_create"):
        with suppress(OSError):
            return os.memfd_create("gpunode")
    import tempfile

    with tempfile.TemporaryFile(buffering=0) as file:
        return os.dup(file.fileno())


COMMAND_NOT_FOUND = 127
_GRACE_SECONDS = 1.0
_MOST_BYTES = 4 << 20  # no answer has a longer line; 16 GPUs with 7 MIG devices each take 60 KiB
_LAST_WORDS = 2000


class Completed(NamedTuple):
    """A finished child. `code` is its exit status, 127 without such a program, negative for a signal."""

    argv: tuple[str, ...]
    code: int
    stdout: str
    stderr: str
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        return self.code == 0 and not self.timed_out

    @property
    def reason(self) -> str:
        """The last line of its error output, else of its output; empty if it printed nothing."""
        return ((self.stderr or self.stdout).strip().splitlines() or [""])[-1]


def run_process(
    argv: tuple[str, ...],
    timeout: float,
    stdin: str | bytes | None,
    env: Mapping[str, str],
    program: str | None = None,
    watch: Callable[[str], None] | None = None,
) -> Completed:
    """Run `argv` to its end, from the file `program` if given, or kill it with its children after `timeout`
    seconds.

    With `watch` the child writes to memory and not to a pipe, and has no stdin: if we are killed it goes on,
    because a broken pipe would end a package manager, or the script of a package, by SIGPIPE. `watch` is
    called with the last output, several times a second. `timeout` counts seconds from the last output then: a
    child that still prints isn't stuck. After that it gets SIGTERM, and SIGKILL later.
    """
    data = stdin.encode() if isinstance(stdin, str) else stdin
    timed_out = False
    child = None
    with ExitStack() as opened:
        files = [opened.enter_context(_memory()) for _ in ("stdout", "stderr")] if watch is not None else []
        try:
            with _signals_held():
                child = subprocess.Popen(
                    argv,
                    executable=program,
                    stdin=subprocess.DEVNULL if data is None else subprocess.PIPE,
                    stdout=files[0] if files else subprocess.PIPE,
                    stderr=files[1] if files else subprocess.PIPE,
                    env=dict(env),
                    start_new_session=True,
                )
            if watch is not None:
                _watch(child, timeout, files, watch)
            out, err = child.communicate(data, timeout)
        except BaseException as error:
            if child is None and isinstance(error, OSError):
                return Completed(argv, COMMAND_NOT_FOUND, "", f"{argv[0]}: {error.strerror}")
            out, err = _kill(child) if child is not None else (b"", b"")
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            timed_out = True
        assert child is not None
        if files:
            out, err = (os.pread(file.fileno(), _size(file), 0) for file in files)
    code = child.returncode if child.returncode is not None else -signal.SIGKILL
    return Completed(argv, code, _text(out), _text(err), timed_out)


# Watching a child process that must not be killed half-way because the process that reads its output has
# ended.

_LOOK_SECONDS = 0.25
_WATCHED_GRACE_SECONDS = 10.0
_LAST_BYTES = 2000


def _watch(
    child: subprocess.Popen[bytes], timeout: float, files: Sequence[BinaryIO], watch: Callable[[str], None]
) -> None:
    """Wait for its end. `TimeoutExpired`, after SIGTERM, if it prints nothing for that long."""
    deadline, last_size = time.monotonic() + timeout, 0
    while (left := deadline - time.monotonic()) > 0:
        with suppress(subprocess.TimeoutExpired):
            child.wait(min(left, _LOOK_SECONDS))
            return
        watch(next(filter(None, map(_last_line, files)), ""))
        if (size := sum(map(_size, files))) != last_size:
            deadline, last_size = time.monotonic() + timeout, size
    with suppress(ProcessLookupError):  # package managers then clean up their locks and lists
        os.killpg(child.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        child.wait(_WATCHED_GRACE_SECONDS)
    raise subprocess.TimeoutExpired(child.args, timeout)


def _memory() -> BinaryIO:
    return os.fdopen(unnamed_file(), "w+b", buffering=0)


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def _last_line(file: BinaryIO) -> str:
    """Carriage returns end lines too, for progress bars. The child's own position doesn't change."""
    end = os.pread(file.fileno(), _LAST_BYTES, max(0, _size(file) - _LAST_BYTES))
    lines = (line.strip() for line in reversed(_text(end).splitlines()))
    return next((line for line in lines if line), "")


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SignalHandler = Callable[[int, FrameType | None], None]


@contextmanager
def signal_handlers(handlers: Mapping[signal.Signals, SignalHandler]) -> Iterator[None]:
    """Handle these signals in the block; the earlier handlers are restored after it."""
    before: dict[signal.Signals, Any] = {}
    try:
        for number, handler in handlers.items():
            before[number] = signal.signal(number, handler)
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Handle signals only after the block. Without it a handler that raises, as for Ctrl-C, may do so inside
    Popen, and the child that has started by then would go on after the undo of what it does."""
    pending: dict[int, None] = {}
    held = [number for number in SIGNALS if callable(signal.getsignal(number))]
    if threading.current_thread() is not threading.main_thread():
        held = []  # Python runs the handlers in the main thread
    try:
        with signal_handlers(dict.fromkeys(held, lambda number, _: pending.update({number: None}))):
            yield
    finally:
        for waiting in pending:
            signal.raise_signal(waiting)


def _kill(child: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Kill the whole session; give up on a child that survives even SIGKILL."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    try:
        return child.communicate(timeout=_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        return b"", b""
    finally:  # the second communicate() leaves a half-written stdin open
        for pipe in (child.stdin, child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()


def _text(data: bytes | None) -> str:
    return (data or b"").decode("utf-8", "replace")


class ChildDaemon:
    """A program that may outlive gpunode: in its own session, its output appended to a file."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        """Use `start_daemon` instead."""
        self._child = child
        self.pid = child.pid

    def ended(self) -> int | None:
        """Its exit status as in `Completed`, None while it runs."""
        return self._child.poll()

    def signal(self, name: str) -> None:
        """Send it SIGTERM, ...; nothing happens once it has ended (its number may be another process's)."""
        self._child.send_signal(signal.Signals[f"SIG{name}"])

    def end_children(self) -> None:
        """Send SIGTERM to the rest of its process group after it has ended."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGTERM)


def start_daemon(argv: tuple[str, ...], output: Path, env: Mapping[str, str]) -> ChildDaemon:
    """Start `argv` with exactly `env`. OSError if there is no such program or `output` can't be written."""
    path = env.get("PATH", os.defpath)
    program, refusal = find_program(argv[0], path)
    if not program:
        raise OSError(errno.EACCES if refusal else errno.ENOENT, refusal or os.strerror(errno.ENOENT))
    with output.open("ab") as stream:
        return ChildDaemon(
            subprocess.Popen(
                argv,
                executable=program,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**env, "PATH": safe_path(path)},
                start_new_session=True,
            )
        )


class LineChild:
    """A running child that writes lines to stdout; one thread reads, any thread may write or `wake`.

    `OSError` if it can't be started. `last_words` is the end of its stderr. The child gets one more argument,
    the descriptor of an unnamed file with the content `note`.
    """

    def __init__(self, argv: tuple[str, ...], env: Mapping[str, str]) -> None:
        self._note = unnamed_file()
        try:
            self._child = subprocess.Popen(
                (*argv, str(self._note)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=dict(env),
                start_new_session=True,
                pass_fds=(self._note,),
            )
        except OSError:
            os.close(self._note)
            raise
        self._buffer = bytearray()
        self._stderr = b""
        self._woken, self._wake = os.pipe()
        assert self._child.stdin and self._child.stdout and self._child.stderr
        self._out, self._err = self._child.stdout.fileno(), self._child.stderr.fileno()
        self._poll = select.poll()  # not select(): a server with many clients exceeds its limit of 1024
        for pipe in (self._out, self._err, self._woken):
            self._poll.register(pipe, select.POLLIN)
        self._ended = False
        for pipe in (self._wake, self._woken, self._child.stdin.fileno(), self._out, self._err):
            os.set_blocking(pipe, False)

    @property
    def last_words(self) -> str:
        return (_text(self._stderr).strip().splitlines() or [""])[-1]

    def read_line(self, timeout: float) -> str | None:
        """The next line; "" at the end of its output, None if nothing arrived in time or `wake` was
        called."""
        deadline = time.monotonic() + timeout
        searched = 0
        while True:
            end = self._buffer.find(b"\n", searched)
            if end >= 0:
                line = _text(bytes(self._buffer[:end]))
                del self._buffer[: end + 1]
                return line or " "
            searched = len(self._buffer)
            if self._ended or searched > _MOST_BYTES:
                return ""
            left = deadline - time.monotonic()
            ready = {number for number, _ in self._poll.poll(max(0, round(left * 1000)))}
            if self._woken in ready:
                self._take(self._woken)
                return None
            if self._err in ready:
                self._stderr = (self._stderr + self._take(self._err))[-_LAST_WORDS:]
            if self._out in ready:
                self._buffer += self._take(self._out)
            if left <= 0 and b"\n" not in self._buffer:  # also if stderr never ends
                return None

    def _take(self, pipe: int) -> bytes:
        try:
            data = os.read(pipe, 65536)
        except BlockingIOError:
            return b""
        if not data:
            self._poll.unregister(pipe)
            self._ended = self._ended or pipe == self._out
        return data

    def note(self) -> bytes:
        """Contents that the child has written to its note file; nothing after `end`."""
        return os.pread(self._note, _LAST_WORDS, 0) if self._note >= 0 else b""

    def tell(self, line: str) -> None:
        """Write a line to its stdin; dropped if it doesn't read, or has ended."""
        with suppress(OSError, ValueError):
            assert self._child.stdin
            os.write(self._child.stdin.fileno(), line.encode() + b"\n")

    def wake(self) -> None:
        """Make `read_line` return at once."""
        with suppress(OSError):
            os.write(self._wake, b"w")

    def ended(self) -> bool:
        """Whether the process has ended; the call also removes its entry from the process table."""
        return self._child.poll() is not None

    def end(self) -> int | None:
        """Kill it if it runs and close everything; its exit code, None if not even SIGKILL ends it."""
        with suppress(ProcessLookupError, PermissionError):
            if not self.ended():
                os.killpg(self._child.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(_GRACE_SECONDS)
        for pipe in (self._child.stdin, self._child.stdout, self._child.stderr):
            if pipe is not None and not pipe.closed:
                with suppress(OSError):
                    pipe.close()
        for number in (self._woken, self._wake, self._note):
            with suppress(OSError):
                os.close(number)
        self._woken = self._wake = self._note = -1
        return self._child.returncode
