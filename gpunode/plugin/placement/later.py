"""Work that nobody waits for: one thread, there only while there is some, that gives way to all others."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from threading import Lock, Thread

_MOST_WAITING = 16


class Later:
    """A queue. What is asked for twice is done once; what doesn't fit in is forgotten."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._waiting: dict[Hashable, Callable[[], None]] = {}
        self._thread: Thread | None = None

    def put(self, key: Hashable, work: Callable[[], None]) -> None:
        """Do `work`, unless it waits already under this key."""
        with self._lock:
            if key in self._waiting or len(self._waiting) >= _MOST_WAITING:
                return
            self._waiting[key] = work
            if self._thread is None:
                thread = Thread(
                    target=self._run, name="placement", daemon=True
                )  # the process may end without it
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        try:
            while work := self._next():
                work()
                self._done()
        except BaseException:
            with self._lock:  # the next one starts another thread
                self._waiting.clear()
                self._thread = None
            raise

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            if not self._waiting:
                self._thread = None
                return None
            return next(iter(self._waiting.values()))

    def _done(self) -> None:
        with self._lock:
            del self._waiting[next(iter(self._waiting))]
