"""Child processes that query NVML and CUDA: how they are started, their protocol, and how they fail.

With a failing GPU both libraries hang for minutes, or forever inside the kernel where no signal ends a
process (NVIDIA/open-gpu-kernel-modules issue 1333), or crash their process. Only children load them. `start`
starts one, `answer` returns its next document within a time limit, and `ChildFailure` names the query that
NVML did not answer, or the signal that ended the child. `run_each` does the same for forked children of a
child.

A child is a module of this package. Its first argument is a JSON object with its options, its second the
descriptor of a `Note`. It reads requests from stdin and writes answers to stdout, one JSON document per line.
The parent limits the length of a line. A kill is by process id, and the kernel ends a child with its parent.

JSON over pipes rather than `multiprocessing`: that unpickles its input, here from a process in which a
third-party library runs, and at exit it waits without a limit for a child that cannot be killed.

Standard library only, because every child imports it, in containers as well.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from gpunode.host import Host
    from gpunode.host.process import LineChild

_PR_SET_PDEATHSIG = 1  # prctl(2)
_LOOK_SECONDS = 0.25


# The parent's side.


def module_argv(module: str, *arguments: str) -> tuple[str, ...]:
    """Arguments that run a module of this package with this Python.

    ``-P`` keeps the current directory off the module path: a file there named like a module of the standard
    library must not run with the rights of the user who calls gpunode. Python 3.10 lacks it.
    """
    if sys.version_info >= (3, 11):
        return (sys.executable, "-P", "-m", module, *arguments)
    return (sys.executable, "-c", _WITHOUT_DIRECTORY, module, *arguments)


# sys is part of the interpreter; all other imports come after the empty entry, which ``-c`` adds, is removed
_WITHOUT_DIRECTORY = (
    "import sys; sys.path.remove(''); import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


class ChildFailure(Exception):
    """A child returned no answer: NVML or CUDA hung (`timed_out`) or crashed it. `question` has no answer
    yet."""

    def __init__(self, reason: str, timed_out: bool = False, question: NvmlQuestion | None = None) -> None:
        super().__init__(f"{reason} ({question})" if question else reason)
        self.reason, self.timed_out, self.question = reason, timed_out, question


def start(host: Host, module: str, options: Mapping[str, Any]) -> LineChild:
    """Start `module` as a child. `ChildFailure` if no process can be started."""
    try:
        return host.start_child(module_argv(module, json.dumps(options)))
    except OSError as error:
        raise ChildFailure(f"no process can be started: {error.strerror or error}") from error


def answer(
    child: LineChild,
    seconds: float,
    *,
    limit: float | None = None,
    library: str = "NVML",
    stopped: Callable[[], bool] | None = None,
) -> dict[str, Any]:
    """The next document of a child within `seconds`; `limit` is the time to name in a message.

    `ChildFailure` for a timeout, a crash or anything but a document, and as soon as `stopped` is true; the
    child has then been ended.
    """
    deadline = time.monotonic() + seconds
    line = None
    while line is None and (left := max(0.0, deadline - time.monotonic())):
        line = child.read_line(min(left, _LOOK_SECONDS) if stopped else left)
        if stopped and stopped():
            break
    if line:
        with suppress(ValueError, RecursionError):
            document = json.loads(line)
            if isinstance(document, dict):
                return document
    question = None
    with suppress(ValueError):
        question = read_note(child.note())[1]
    words = child.last_words
    code = child.end()
    if line is None:
        reason = f"{library} did not answer within {seconds if limit is None else limit:g} s"
        raise ChildFailure(reason, timed_out=True, question=question)
    if not line and code is not None and code < 0:
        crash = f"{library} crashed the process that queried it ({signal_name(code)})"
        raise ChildFailure(crash, question=question)
    raise ChildFailure(unusable(line[:200] or words or f"exit code {code}", library))


def unusable(text: str, library: str = "NVML") -> str:
    """Message for an answer that violates the protocol."""
    return f"the process that queried {library} returned an invalid answer: {text}"


def signal_name(code: int) -> str:
    """SIGSEGV and the like for the exit code of a child that a signal ended (-11)."""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


# The child's side.


class Parent:
    """The parent process: its `options`, its `note`, and documents sent to it, from any thread."""

    def __init__(self) -> None:
        import ctypes  # imported here, because the parent doesn't need it

        # killed by the kernel when the parent ends: only that enforces the time limit, and NVML may hang
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        self.options: dict[str, Any] = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
        self.note = Note(int(sys.argv[2]) if len(sys.argv) > 2 else -1)
        self.last = 0.0
        self._lock = Lock()
        self._output = os.dup(1)
        os.dup2(2, 1)  # a library's output must not mix with the answers

    def send(self, **document: Any) -> None:
        """Write a document as one line."""
        data = (json.dumps(document, separators=(",", ":")) + "\n").encode()
        with self._lock:
            self.last = time.monotonic()
            while data:
                data = data[os.write(self._output, data) :]


# Note of the query that NVML is answering. The child writes it for its parent.
#
# The note is an unnamed file that both processes have open. It survives the child, and unlike a line on
# stdout it costs the parent nothing in normal operation.

GPU, LINKS, EVENTS = "gpu", "links", "events"
"""What NVML is not asked about any more after a hang or a crash: the GPU, its links, or its events."""

_LINK_FUNCTIONS = ("nvmlDeviceGetNvLink", "nvmlDeviceGetTopology")
_EVENT_FUNCTIONS = ("nvmlEventSet", "nvmlDeviceRegisterEvents", "nvmlDeviceGetSupportedEventTypes")
_RECORD_BYTES = 256
_QUESTION, _WAIT = 0, _RECORD_BYTES
_WAIT_FUNCTION = "nvmlEventSetWait"


class NvmlQuestion(NamedTuple):
    """An NVML function and the indices of the GPUs that it concerns, none if it concerns the driver."""

    function: str
    gpus: tuple[int, ...] = ()

    @property
    def part(self) -> str:
        """GPU, LINKS or EVENTS."""
        if self.function.startswith(_LINK_FUNCTIONS):
            return LINKS
        return EVENTS if self.function.startswith(_EVENT_FUNCTIONS) else GPU

    def __str__(self) -> str:
        gpus = " and ".join(f"GPU {index}" for index in self.gpus)
        return f"{self.function} of {gpus}" if gpus else self.function


class Note:
    """The child's side. `file` is the descriptor of the note, -1 if no process reads it.

    All threads together make one query at a time, so that the note is never ambiguous. Only the wait for
    events, which takes most of the time, has a separate field in the note.
    """

    def __init__(self, file: int = -1) -> None:
        self._file = file
        self._lock = Lock()
        self._count = 0

    @contextmanager
    def asking(self, function: str, gpus: Sequence[int]) -> Iterator[None]:
        """Keep a note of the query while NVML answers it."""
        if self._file < 0:
            yield
            return
        waits = function == _WAIT_FUNCTION
        place = _WAIT if waits else _QUESTION
        with nullcontext() if waits else self._lock:
            self._count += not waits
            self._write(place, function, gpus)
            try:
                yield
            finally:
                self._write(place, "", ())

    def _write(self, place: int, function: str, gpus: Sequence[int]) -> None:
        record = json.dumps([self._count, function, list(gpus)])
        os.pwrite(self._file, record.encode().ljust(_RECORD_BYTES), place)


def read_note(data: bytes) -> tuple[int, NvmlQuestion | None, NvmlQuestion | None]:
    """The number of queries so far, the one that has no answer yet, and the wait for events.

    ValueError if the note is malformed.
    """
    return *_record(data[:_RECORD_BYTES]), _record(data[_WAIT:])[1]


def _record(data: bytes) -> tuple[int, NvmlQuestion | None]:
    text = data.rstrip(b" \0")
    if not text:
        return 0, None
    try:
        count, function, gpus = json.loads(text)
        return int(count), NvmlQuestion(str(function), tuple(map(int, gpus))) if function else None
    except (TypeError, RecursionError) as error:
        raise ValueError(f"malformed note {text[:100]!r}") from error


# Jobs in forked children, each with a time limit: a GPU that hangs or crashes does not stop the others.
#
# Fork and pipe rather than a process pool: a pool waits for a child that cannot be killed.

AT_ONCE = 16
_GRACE_SECONDS = 1.0
_FAILED = 70  # EX_SOFTWARE of sysexits(3)


class JobResult:
    """How a child ended: its output, its exit code (negative for a signal), whether it timed out."""

    def __init__(self, output: bytes, code: int, timed_out: bool = False) -> None:
        self.output, self.code, self.timed_out = output, code, timed_out


class _Child:
    """A running child, and its output so far. `deadline` is on the monotonic clock."""

    def __init__(self, pid: int, pipe: int, deadline: float) -> None:
        self.pid, self.pipe, self.deadline = pid, pipe, deadline
        self.output = bytearray()


def run_each(jobs: Sequence[Callable[[], bytes]], timeout: float) -> list[JobResult]:
    """Run every job in its own child, at most `AT_ONCE` at a time, each for at most `timeout` seconds.

    The outcomes are in the order of the jobs. The caller must have one thread and no open libcuda.
    """
    outcomes: dict[int, JobResult] = {}
    waiting = list(enumerate(jobs))
    running: dict[int, _Child] = {}
    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                number, job = waiting.pop(0)
                running[number] = _start(job, timeout)
            for number in _ended(running):
                outcomes[number] = _finish(running.pop(number))
    finally:
        for child in running.values():  # only after an exception, such as Ctrl-C
            os.kill(child.pid, signal.SIGKILL)
            _finish(child)
    return [outcomes[number] for number in range(len(jobs))]


def _start(job: Callable[[], bytes], timeout: float) -> _Child:
    """A child that runs the job. Of our open files it keeps only the standard ones."""
    read_end, write_end = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(read_end)
        os.close(write_end)
        raise
    if pid == 0:
        _be_child(job, write_end)
    os.close(write_end)
    return _Child(pid, read_end, time.monotonic() + timeout)


def _be_child(job: Callable[[], bytes], write_end: int) -> None:
    """Run the job and leave the process, without the parent's exit handlers and unflushed output."""
    code = _FAILED
    try:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a library's output must not mix with the answer
        _close_all_but(write_end)
        with os.fdopen(write_end, "wb") as pipe:
            pipe.write(job())
        code = 0
    except BaseException:  # noqa: BLE001 - the child must never return into the parent's code
        import traceback

        os.write(sys.stderr.fileno(), traceback.format_exc().encode())
    finally:
        os._exit(code)


def _close_all_but(write_end: int) -> None:
    """A child that even SIGKILL doesn't end must not keep pipes open that other processes wait for."""
    with suppress(OSError):  # without /proc they stay open
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers, not paths
            if int(name) > 2 and int(name) != write_end:
                with suppress(OSError):  # the list's own descriptor is closed already
                    os.close(int(name))


def _ended(running: dict[int, _Child]) -> list[int]:
    """Wait for output; return the numbers of the children that closed their pipe or timed out."""
    poller = select.poll()
    numbers = {child.pipe: number for number, child in running.items()}
    for pipe in numbers:
        poller.register(pipe, select.POLLIN)
    nearest = min(child.deadline for child in running.values())
    ended = []
    for pipe, _ in poller.poll(max(0.0, nearest - time.monotonic()) * 1000 + 1):
        data = os.read(pipe, 65536)
        running[numbers[pipe]].output.extend(data)
        if not data:
            ended.append(numbers[pipe])
    now = time.monotonic()
    late = [number for number, child in running.items() if child.deadline <= now and number not in ended]
    return ended + late


def _finish(child: _Child) -> JobResult:
    """Collect a child, killing it if it doesn't exit by itself; one stuck in the kernel is abandoned."""
    os.close(child.pipe)
    late = child.deadline <= time.monotonic()
    code = None if late else _wait(child.pid, min(_GRACE_SECONDS, child.deadline - time.monotonic()))
    if code is None:
        os.kill(child.pid, signal.SIGKILL)
        code = _wait(child.pid, _GRACE_SECONDS)
    return JobResult(bytes(child.output), -signal.SIGKILL if code is None else code, late)


def _wait(pid: int, seconds: float) -> int | None:
    """The child's exit code, None if it still runs after `seconds`."""
    deadline = time.monotonic() + seconds
    pause = 0.0002  # a child that closed its pipe is about to end
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return None
        time.sleep(pause)
        pause = min(2 * pause, 0.005)
