"""Wait for a wake-up from another thread, a signal or a change in a directory, with poll(2).

The standard library lacks inotify(7), so it is called through ctypes. Where the kernel refuses another
instance (a user's processes share 128 by default, fs.inotify.max_user_instances) the caller polls instead.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

# sys/inotify.h
_IN_ATTRIB, _IN_CLOSE_WRITE, _IN_MOVED_FROM, _IN_MOVED_TO, _IN_CREATE = 0x4, 0x8, 0x40, 0x80, 0x100
_IN_DELETE, _IN_DELETE_SELF, _IN_MOVE_SELF, _IN_ONLYDIR = 0x200, 0x400, 0x800, 0x1000000
_NAMES = _IN_MOVED_FROM | _IN_MOVED_TO | _IN_CREATE | _IN_DELETE | _IN_DELETE_SELF | _IN_MOVE_SELF
# a socket that was created again in the same inode shows only changed attributes
_CHANGES = _NAMES | _IN_ATTRIB | _IN_CLOSE_WRITE


class Waiter:
    """A wait that can be ended early. `wait` belongs to one thread; any thread or signal handler may call
    `wake`."""

    def __init__(self) -> None:
        ends = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._output = open(ends[0], "rb", buffering=0)  # noqa: SIM115, PTH123 - a file knows when it is closed
        self._input = open(ends[1], "wb", buffering=0)  # noqa: SIM115, PTH123
        self._poll = select.poll()
        self._poll.register(self._output, select.POLLIN)
        self._opened = False
        self._hears_signals = False

    def hear_signals(self) -> None:
        """Let a signal that has a Python handler end the wait as well; it has run when `wait` returns.

        Does nothing outside the main thread. Without it a handler may run late or, where other threads run,
        not until another event: Python (3.11's ceval.c) keeps pending signals in a flag that is written
        without a lock, by whichever thread the kernel has interrupted. A byte in a pipe isn't lost.
        """
        if not self._hears_signals and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._input.fileno(), warn_on_full_buffer=False)
            self._hears_signals = True

    def wake(self) -> None:
        """End this wait, or the next one. Does nothing once it is closed."""
        with suppress(ValueError):
            self._input.write(b"\0")

    def watch(self, directories: Iterable[Path]) -> bool:
        """Wake when an entry of one of them is created or removed, when it is itself, or when a file in it is
        written.

        False if not all of them can be watched.

        Call it again before each wait, because the path may be another directory by then.
        """
        if self._inotify is None:
            return False
        library, descriptor = self._inotify
        watches = [
            library.inotify_add_watch(descriptor, os.fsencode(path), _CHANGES | _IN_ONLYDIR)
            for path in directories
        ]
        return min(watches, default=0) >= 0

    def wait(self, seconds: float) -> None:
        """Wait for a wake-up, a signal or a change, at most `seconds`; all of them are consumed."""
        self._run_handlers()  # for signals that arrived before `hear_signals`
        for descriptor, _ in self._poll.poll(max(0.0, seconds) * 1000):
            with suppress(BlockingIOError):
                while os.read(descriptor, 65536):
                    continue
        self._run_handlers()

    def _run_handlers(self) -> None:
        if self._hears_signals:
            signal.pthread_sigmask(signal.SIG_BLOCK, ())  # it checks by itself whether a signal is pending

    def close(self) -> None:
        if self._hears_signals:
            signal.set_wakeup_fd(-1)
            self._hears_signals = False
        if self._opened and self._inotify is not None:
            os.close(self._inotify[1])
        self._opened = False
        self._output.close()
        self._input.close()  # `wake` does nothing after this

    @cached_property
    def _inotify(self) -> tuple[Any, int] | None:
        import ctypes

        library = ctypes.CDLL(None)
        descriptor = library.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if descriptor < 0:
            return None
        self._opened = True
        self._poll.register(descriptor, select.POLLIN)
        return library, descriptor
