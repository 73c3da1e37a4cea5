"""Jobs in forked children, each with a time limit: one GPU that hangs or crashes doesn't stop the others.

Standard library only. Fork and pipe rather than a process pool: this is also a container's only program.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

AT_ONCE = 16
_GRACE_SECONDS = 1.0
_FAILED = 70  # EX_SOFTWARE of sysexits(3)


class Outcome:
    """How a child ended: what it wrote, its exit code (negative for a signal), whether its time was up."""

    def __init__(self, output: bytes, code: int, timed_out: bool = False) -> None:
        self.output, self.code, self.timed_out = output, code, timed_out


class _Child:
    """One that runs, and what came of it so far. `deadline` is on the monotonic clock."""

    def __init__(self, pid: int, pipe: int, deadline: float) -> None:
        self.pid, self.pipe, self.deadline = pid, pipe, deadline
        self.output = bytearray()


def run_each(jobs: Sequence[Callable[[], bytes]], timeout: float) -> list[Outcome]:
    """Run every job in a child of its own, at most `AT_ONCE` at a time, each for at most `timeout` seconds.

    The outcomes are in the order of the jobs. The caller must have one thread and no open libcuda.
    """
    outcomes: dict[int, Outcome] = {}
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
        for child in running.values():  # only after an exception, Ctrl-C for example
            os.kill(child.pid, signal.SIGKILL)
            _finish(child)
    return [outcomes[number] for number in range(len(jobs))]


def _start(job: Callable[[], bytes], timeout: float) -> _Child:
    """A child that does the job. No file of ours but the standard ones is open in it."""
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
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a library's chatter must not mix with the answer
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
    """A child that even SIGKILL doesn't end must not hold what others wait for the end of."""
    with suppress(OSError):  # without /proc they stay open
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers, not paths
            if int(name) > 2 and int(name) != write_end:
                with suppress(OSError):  # the list's own is gone already
                    os.close(int(name))


def _ended(running: dict[int, _Child]) -> list[int]:
    """Wait for output; the numbers of the children that closed their pipe or ran out of time."""
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


def _finish(child: _Child) -> Outcome:
    """Collect a child, killing it if it doesn't leave by itself; one stuck in the kernel is left behind."""
    os.close(child.pipe)
    late = child.deadline <= time.monotonic()
    code = None if late else _wait(child.pid, min(_GRACE_SECONDS, child.deadline - time.monotonic()))
    if code is None:
        os.kill(child.pid, signal.SIGKILL)
        code = _wait(child.pid, _GRACE_SECONDS)
    return Outcome(bytes(child.output), -signal.SIGKILL if code is None else code, late)


def _wait(pid: int, seconds: float) -> int | None:
    """The child's exit code, None if it is still there after `seconds`."""
    deadline = time.monotonic() + seconds
    pause = 0.0002  # who closed the pipe is about to end
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return None
        time.sleep(pause)
        pause = min(2 * pause, 0.005)
