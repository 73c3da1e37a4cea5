"""`Host`'s way to wait for a word from another thread, or for a change in a directory, without polling.

inotify(7) has no place in the standard library, so it is called through ctypes. Where the kernel refuses one
more (a node's agents share 128 by default, fs.inotify.max_user_instances) its user polls, as `watch` says.
"""

from __future__ import annotations

import os
import select
import signal
import sys
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
# a socket that was made anew in the same inode shows no more than other attributes
_CHANGES = _NAMES | _IN_ATTRIB | _IN_CLOSE_WRITE
_ONE = (1).to_bytes(8, sys.byteorder)


class Waiter:
    """`wait` belongs to one thread; `wake` may come from any, and from a signal handler."""

    def __init__(self) -> None:
        word = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._word = open(word, "r+b", buffering=0)  # noqa: SIM115, PTH123 - a file knows when it is closed
        self._poll = select.poll()
        self._poll.register(word, select.POLLIN)
        self._opened = False
        self._signals: tuple[int, int] | None = None  # a pipe: the byte of each signal goes in at the second

    def hear_signals(self) -> None:
        """A signal that has a Python handler ends the wait as well, and its handler has run after it.

        In the main thread; elsewhere nothing. Without it a handler may run late or, where other threads run,
        not until something else happens: Python (3.11's ceval.c) keeps what is pending in a flag that is
        written without a lock, by whichever thread the kernel has interrupted. A byte in a pipe isn't lost.
        """
        if self._signals is None and threading.current_thread() is threading.main_thread():
            self._signals = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            self._poll.register(self._signals[0], select.POLLIN)
            signal.set_wakeup_fd(self._signals[1], warn_on_full_buffer=False)

    def wake(self) -> None:
        """End this wait, or the next one. Nothing once it is closed."""
        with suppress(ValueError):
            self._word.write(_ONE)

    def watch(self, directories: Iterable[Path]) -> bool:
        """Wake when a name in one of them comes or goes, or it itself, or a file in it has been written.

        False if that can't be had of all of them.

        To be called again before each wait: what lies at the path may be another directory by then.
        """
        if self._inotify is None:
            return False
        library, descriptor = self._inotify
        made = [
            library.inotify_add_watch(descriptor, os.fsencode(path), _CHANGES | _IN_ONLYDIR)
            for path in directories
        ]
        return min(made, default=0) >= 0

    def wait(self, seconds: float) -> None:
        """Until a word or a change, `seconds` at most; what has come until then is over."""
        self._run_handlers()  # of what came before somebody heard signals
        for descriptor, _ in self._poll.poll(max(0.0, seconds) * 1000):
            with suppress(BlockingIOError):
                while os.read(descriptor, 65536) and descriptor != self._word.fileno():
                    continue
        self._run_handlers()

    def _run_handlers(self) -> None:
        if self._signals is not None:
            signal.pthread_sigmask(signal.SIG_BLOCK, ())  # which looks for itself whether any is due

    def close(self) -> None:
        if self._signals is not None:
            signal.set_wakeup_fd(-1)
            for descriptor in self._signals:
                os.close(descriptor)
            self._signals = None
        if self._opened and self._inotify is not None:
            os.close(self._inotify[1])
        self._opened = False
        self._word.close()  # a word that comes later finds it closed

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
