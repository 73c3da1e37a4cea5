"""Work that may take its time, done beside the thread that must stay quick: one piece at a time."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread


class Errand:
    """For one caller's thread. A thread exists only while there is work."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: Thread | None = None
        self._failure: Exception | None = None

    @property
    def busy(self) -> bool:
        """Whether the last piece is still being worked on. Raises what it raised, a bug."""
        if self._failure is not None:
            raise self._failure
        return self._thread is not None and self._thread.is_alive()

    def start(self, task: Callable[[], None]) -> None:
        """Begin; only where nothing is being worked on."""
        self._thread = Thread(target=self._work, args=(task,), name=self._name, daemon=True)
        self._thread.start()

    def _work(self, task: Callable[[], None]) -> None:
        try:
            task()
        except Exception as error:  # noqa: BLE001 - raised by `busy`
            self._failure = error
