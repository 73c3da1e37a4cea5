"""The open ListAndWatch streams of one server.

Each holds a worker thread for as long as it lives, and the stream of a kubelet that hangs may live for ever.
So streams are numbered, and an old one is ended when there are too many, though not the present kubelet's.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from gpunode.plugin.ledger import Feed

MAX_STREAMS = 8


class Streams:
    """In the order in which they were opened. `news` is called when one was opened or has ended.

    Numbers go on after `last`: those of an earlier server are never given again.
    """

    def __init__(self, feed: Feed, news: Callable[[], None], last: int = 0) -> None:
        self._feed = feed
        self._news = news
        self._lock = Lock()
        self._open: set[int] = set()
        self._ended = False
        self._mark: int | None = None
        self.last = last

    def open(self) -> int:
        """Number a new stream; the oldest that isn't the kubelet's ends if there are too many."""
        with self._lock:
            self.last += 1
            if not self._ended:
                self._open.add(self.last)
            crowd = self._crowd()
            number = self.last
            self._open.difference_update(crowd)
        if crowd:
            self._feed.wake()
        self._news()
        return number

    def _crowd(self) -> list[int]:
        """What is to end. The first stream after a registration is taken for the kubelet's."""
        oldest = sorted(self._open)
        mine = next((n for n in oldest if self._mark is not None and n > self._mark), None)
        return [n for n in oldest if n != mine][: max(0, len(oldest) - MAX_STREAMS)]

    def registering(self) -> int:
        """The kubelet's stream is about to come: the number that it will be above."""
        return self.registered(self.last)

    def registered(self, mark: int) -> int:
        """The kubelet's stream is the first above `mark`, whether it has come already or not."""
        with self._lock:
            self._mark = mark
            return mark

    def is_open(self, number: int) -> bool:
        return number in self._open

    def since(self, mark: int) -> bool:
        """Whether a stream is open that was opened after number `mark`."""
        with self._lock:
            return any(number > mark for number in self._open)

    def close(self, number: int) -> None:
        """End a stream; safe to call twice and from any thread."""
        with self._lock:
            was_open = number in self._open
            self._open.discard(number)
        if was_open:
            self._feed.wake()
            self._news()

    def close_all(self) -> None:
        """End every stream, also one that a client opens from now on: its thread would outlive the server."""
        with self._lock:
            self._ended = True
            self._open.clear()
        self._feed.wake()
