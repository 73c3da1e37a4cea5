"""Threads of a service: the wait of one for events, and a worker for slow tasks."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from threading import Lock, Thread


class Waiter:
    """A wait that can be ended early. `wait` belongs to one thread; any thread or signal handler may call
    `wake`.

    A bare lock, which a wake-up releases. A handler that interrupts the thread inside `threading.Event` would
    wait for the lock that this thread holds, and `SimpleQueue.get` with a time limit, interrupted near its
    end, waits without one (Python 3.11's _queuemodule.c).
    """

    def __init__(self) -> None:
        self._quiet = Lock()
        self._quiet.acquire()

    def wake(self) -> None:
        """End this wait, or the next one."""
        with suppress(RuntimeError):  # it is released already
            self._quiet.release()

    def wait(self, seconds: float) -> None:
        """Wait for a wake-up, at most `seconds`; all of them are consumed. In the main thread the handlers of
        signals that arrived have run."""
        self._quiet.acquire(timeout=max(0.0, seconds))
        # Python (3.11's ceval.c) keeps pending signals in a flag that is written without a lock, by whichever
        # thread the kernel has interrupted; this looks at the signals themselves
        signal.pthread_sigmask(signal.SIG_BLOCK, ())


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
