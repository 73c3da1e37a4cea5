"""A place where threads stop until they are released, and a time limit that ends as soon as one is there.

So a test of what hangs waits for a state and not for a time, and no busy machine makes another check seem to
hang.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any

import pytest

from gpunode.checks import patience
from tests.waiting import PATIENCE


class Stall:
    """`limits` are the seconds that each question was given, in order."""

    def __init__(self) -> None:
        self.limits: list[float] = []
        self.arrived = threading.Semaphore(0)
        self._released = threading.Event()

    def wait(self, *_args: object, **_named: object) -> bool:
        """Stop here."""
        self.arrived.release()
        return self._released.wait(PATIENCE)

    def release(self) -> None:
        self._released.set()


@contextmanager
def stalling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stall]:
    """A `Patience` gives up when a thread is in this stall; its seconds are only recorded."""
    stall = Stall()

    class Answers(SimpleQueue[Any]):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            if timeout is None:
                return super().get(block)
            stall.limits.append(timeout)
            while True:
                try:
                    return super().get(timeout=0.01)
                except Empty:
                    if stall.arrived.acquire(blocking=False):
                        raise

    monkeypatch.setattr(patience, "SimpleQueue", Answers)
    try:
        yield stall
    finally:
        stall.release()
