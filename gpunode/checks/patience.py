"""How long the doctor waits for one check: a file system, a process table or a driver may hang for ever.

The checks run in a thread of their own, and the one that asked for them only looks at the clock. Where a
question has no answer in time its thread is left behind, for nobody can end it; the finding names what it was
reading, and a fresh thread goes through the checks again, which have kept what they know. What the stuck one
holds (a topic of `Node`) is known to hang and isn't waited for again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event, Lock, Thread
from typing import Any, NoReturn, TypeVar

from gpunode.facts.topic import Stuck

CHECK_SECONDS = 25.0  # NVML alone may take 20 (facts/node.py), and a daemon 3 on the way
DEEP_SECONDS = 90.0  # a container is started, and ended after half of that
_AFTER_ONE_SECONDS = 5.0  # once something has hung, so that ten such don't take minutes

_Answer = TypeVar("_Answer")


class Patience:
    """Goes through some work whose questions may hang; for one thread."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds or CHECK_SECONDS
        self._given_up: dict[str, Stuck] = {}
        self._lock = Lock()
        self._worker: _Worker | None = None

    def through(self, work: Callable[[], _Answer]) -> _Answer:
        """What `work` comes to, and what it raises. It puts whatever may hang into `ask`, and is called again
        from its start after something did: what it has got to know by then it must remember itself."""
        while True:
            worker = self._worker = _Worker(work)
            worker.start()
            if self._wait(worker):
                if worker.error is not None:
                    raise worker.error
                answer: _Answer = worker.answer
                return answer

    def ask(self, name: str, question: Callable[[], _Answer], least: float = 0.0) -> _Answer:
        """The answer; `Stuck` if there was none in time. It is waited for `least` seconds, whatever has hung
        before. Only within `through`; a question has the same `name` each time."""
        if name in self._given_up:
            raise self._given_up[name]
        worker = self._worker
        assert worker is not None
        seconds = max(self._seconds, least)
        worker.asked = _Asked(name, seconds, time.monotonic() + seconds)
        try:
            return question()
        finally:
            with self._lock:
                worker.asked = None
                if worker is not self._worker:
                    _leave()

    def _wait(self, worker: _Worker) -> bool:
        """True when it has come to its end, False when it hangs."""
        while not worker.ended.wait(self._left(worker)):
            with self._lock:
                asked = worker.asked
                if asked is None or time.monotonic() < asked.until:
                    continue
                message = f"gave no answer within {asked.seconds:g} s: {worker.doing()}"
                self._given_up[asked.name] = Stuck(message, first=True)
                self._seconds = min(self._seconds, _AFTER_ONE_SECONDS)
                self._worker = None
                return False
        return True

    def _left(self, worker: _Worker) -> float:
        asked = worker.asked
        return self._seconds if asked is None else max(asked.until - time.monotonic(), 0.01)


@dataclass(frozen=True)
class _Asked:
    name: str
    seconds: float
    until: float


class _Left(BaseException):
    """Ends a thread whose answer nobody waits for any more."""


def _leave() -> NoReturn:
    raise _Left


class _Worker(Thread):
    """A thread that goes through the work; nobody can end one that hangs."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(name="checks", daemon=True)
        self._work = work
        self.asked: _Asked | None = None
        self.ended = Event()
        self.answer: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.answer = self._work()
        except _Left:
            return
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            self.error = error
        self.ended.set()

    def doing(self) -> str:
        """What it is waiting for, from its stack: the path or the command that `Host` was asked for."""
        frame = sys._current_frames().get(self.ident or 0)
        while frame is not None:
            known = frame.f_locals
            if "argv" in known:
                return f"running {' '.join(map(str, known['argv']))}"
            if isinstance(known.get("path"), str):
                return f"reading {known['path']}"
            frame = frame.f_back
        return "it is not known what it waits for"
