"""Time limit for one check: a file system, the process table or a driver may never answer.

Each question runs in a thread of its own. A thread that takes too long is left behind, since nothing can
end it, and its late answer is ignored. The finding names what that thread asked `Host` for last. A topic of
`Node` that it was reading is known to hang and isn't waited for again.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any, TypeVar

from gpunode.facts.topic import Stuck
from gpunode.host import Host

CHECK_SECONDS = 25.0  # NVML alone may take 20 (facts/node.py), and a daemon 3 before it
DEEP_SECONDS = 90.0  # a container is started, and ended after half of that
_AFTER_ONE_SECONDS = 5.0  # once something has hung, so that ten such don't take minutes

_Answer = TypeVar("_Answer")


class Patience:
    """Asks questions that may hang, one at a time."""

    def __init__(self, host: Host, seconds: float = 0.0) -> None:
        self._host = host
        self._seconds = seconds or CHECK_SECONDS

    def ask(self, question: Callable[[], _Answer], least: float = 0.0) -> _Answer:
        """The answer, or what `question` raises; `Stuck` if there is none in time.

        It is waited for `least` seconds, whatever has hung before.
        """
        seconds = max(self._seconds, least)
        worker = _Worker(question)
        worker.start()
        worker.join(seconds)
        if worker.is_alive():
            self._seconds = min(self._seconds, _AFTER_ONE_SECONDS)
            doing = self._host.asked.get(worker.ident or 0, "it is not known what it waits for")
            raise Stuck(f"gave no answer within {seconds:g} s: {doing}", first=True)
        self._host.asked.pop(worker.ident or 0, None)
        if worker.error is not None:
            raise worker.error
        answer: _Answer = worker.answer
        return answer


class _Worker(Thread):
    """The thread of one question."""

    def __init__(self, question: Callable[[], Any]) -> None:
        super().__init__(name="checks", daemon=True)
        self._question = question
        self.answer: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.answer = self._question()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            self.error = error
