"""A service's worker for slow tasks."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread


class BackgroundTask:
    """A worker for slow tasks, one at a time, so that the calling thread stays responsive. For one calling
    thread; the worker's thread exists only while a task runs."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: Thread | None = None
        self._failure: Exception | None = None

    @property
    def busy(self) -> bool:
        """Whether the last task still runs. Raises the exception of a task that failed, which is a bug."""
        if self._failure is not None:
            raise self._failure
        return self._thread is not None and self._thread.is_alive()

    def start(self, task: Callable[[], None]) -> None:
        """Start a task; only while none runs."""
        self._thread = Thread(target=self._work, args=(task,), name=self._name, daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> bool:
        """Wait for the last task, at most this long; return whether it has ended."""
        if self._thread is not None:
            self._thread.join(seconds)
        return not self.busy

    def _work(self, task: Callable[[], None]) -> None:
        try:
            task()
        except Exception as error:  # noqa: BLE001 - raised by `busy`
            self._failure = error
