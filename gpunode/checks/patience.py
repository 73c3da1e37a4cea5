"""Time limit for one check: a file system, the process table or a driver may never answer.

A worker thread answers one question after another. A thread that takes too long is abandoned, because nothing
can end it: its late answer is ignored, and the next question gets a new thread. The finding names the last
request that the thread made to `Host`. The topic of `Node` that it was reading is marked as hanging, and no
later check waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

from gpunode.facts.topic import Stuck
from gpunode.host import Host

if TYPE_CHECKING:
    from typing_extensions import Self

CHECK_SECONDS = 25.0  # NVML alone may take 20 (facts/node.py), and a daemon 3 before it
DEEP_SECONDS = 90.0  # a container is started, and ended after half of that
_AFTER_ONE_SECONDS = 5.0  # once something has hung, so that ten such don't take minutes

_Answer = TypeVar("_Answer")


class Patience:
    """Runs functions that may hang, one at a time. As a context manager it ends its thread."""

    def __init__(self, host: Host, seconds: float = 0.0) -> None:
        self._host = host
        self._seconds = seconds or CHECK_SECONDS
        self._worker: _Worker | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._dismiss()

    def call(self, question: Callable[[], _Answer], least: float = 0.0) -> _Answer:
        """Return the result, or raise what `question` raises; `Stuck` if there is none in time.

        The limit is at least `least` seconds, even after another question has hung.
        """
        seconds = max(self._seconds, least)
        if self._worker is None:
            self._worker = _Worker()
            self._worker.start()
        thread = self._worker.ident or 0
        self._worker.questions.put(question)
        try:
            answer, error = self._worker.answers.get(timeout=seconds)
        except Empty:
            self._dismiss()
            self._seconds = min(self._seconds, _AFTER_ONE_SECONDS)
            doing = self._host.asked.get(thread, "the check that it waits for is unknown")
            raise Stuck(f"no answer within {seconds:g} s: {doing}", first=True) from None
        self._host.asked.pop(thread, None)
        if error is not None:
            raise error
        result: _Answer = answer
        return result

    def _dismiss(self) -> None:
        """End the thread as soon as possible."""
        if self._worker is not None:
            self._worker.questions.put(None)
            self._worker = None


class _Worker(Thread):
    """Thread that runs functions from a queue until it receives None."""

    def __init__(self) -> None:
        super().__init__(name="checks", daemon=True)
        self.questions: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self.answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def run(self) -> None:
        while (question := self.questions.get()) is not None:
            try:
                self.answers.put((question(), None))
            except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
                self.answers.put((None, error))
