"""How long the doctor waits for one check: a file system, a process table or a driver may hang for ever.

Checks run in a thread of their own. One that doesn't come back in time is left behind in its thread and is a
finding that names what it was reading; the next checks run in a fresh thread. What the stuck one holds (a
topic of `Node`) is known to hang and isn't waited for again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from gpunode.facts.topic import Stuck

CHECK_SECONDS = 25.0  # NVML alone may take 15 (facts/node.py), and a daemon 3 on the way
DEEP_SECONDS = 90.0  # a container is started, and ended after half of that
_AFTER_ONE_SECONDS = 5.0  # once something has hung, so that ten such don't take minutes


class Patience:
    """Asks questions one after another, for one thread; each in the worker thread."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds or CHECK_SECONDS
        self._worker: _Worker | None = None

    def ask(self, question: Callable[[], Any], least: float = 0.0) -> Any:
        """The answer. `Stuck` if there is none in time; what the question raises is raised here. It is waited
        for `least` seconds, whatever has hung before."""
        if self._worker is None:
            self._worker = _Worker()
        worker = self._worker
        worker.questions.put(question)
        try:
            waited = max(self._seconds, least)
            answer, error = worker.answers.get(timeout=waited)
        except Empty:
            self._worker = None
            self._seconds = min(self._seconds, _AFTER_ONE_SECONDS)
            raise Stuck(f"gave no answer within {waited:g} s: {worker.doing()}", first=True) from None
        if error is not None:
            raise error
        return answer

    def close(self) -> None:
        if self._worker is not None:
            self._worker.questions.put(None)
            self._worker = None


class _Worker:
    """A thread that answers questions; nobody can end one that hangs."""

    def __init__(self) -> None:
        self.questions: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self.answers: SimpleQueue[tuple[Any, Exception | None]] = SimpleQueue()
        self._thread = Thread(target=self._run, name="checks", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (question := self.questions.get()) is not None:
            try:
                self.answers.put((question(), None))
            except Exception as error:  # noqa: BLE001 - raised again in the thread that asked
                self.answers.put((None, error))

    def doing(self) -> str:
        """What it is waiting for, from its stack: the path or the command that `Host` was asked for."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        while frame is not None:
            known = frame.f_locals
            if "argv" in known:
                return f"running {' '.join(map(str, known['argv']))}"
            if isinstance(known.get("path"), str):
                return f"reading {known['path']}"
            frame = frame.f_back
        return "it is not known what it waits for"
