"""One link per resource: those that are new get theirs, and all get their turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from gpunode.errors import GpunodeError
from gpunode.plugin.kubelet.serving import LinkContext
from gpunode.plugin.ledger import Feed


class Link(Protocol):
    """A resource's registration: see registration.py and watcher.py. `status` is one line for people."""

    registrations: int
    status: str

    @property
    def socket(self) -> str:
        """The path of the resource's socket."""

    @property
    def watched(self) -> bool:
        """Whether the kubelet follows our list of devices, and allocates from it."""

    def due_in(self, now: float) -> float:
        """Seconds after which `tick` has something to do even without news."""

    def claim(self) -> None:
        """Start serving if the kubelet's directory is there. `PreconditionError` if we may not."""

    def tick(self) -> None:
        """Bring things one step closer to: serving, registered, watched."""

    def close(self) -> None:
        """Stop serving."""


class Links:
    """Methods belong to one thread; `by_name` is replaced as a whole and may be read by any."""

    def __init__(self, context: LinkContext) -> None:
        self._context = context
        self.by_name: Mapping[str, Link] = {}

    def __iter__(self) -> Iterator[Link]:
        return iter(self.by_name.values())

    def tick(self, feeds: Mapping[str, Feed]) -> None:
        """Each link's turn, after links were made for resources that have devices for the first time.

        `PreconditionError` if the first resources of all can't be served. One that comes later waits instead,
        and says so: those that are served already must not end for it.
        """
        first = not self.by_name
        new = {
            name: self._make(name, feed)
            for name, feed in feeds.items()
            if name not in self.by_name and feed.snapshot().devices
        }
        if new:
            self.by_name = {**self.by_name, **new}
        for link in new.values():
            self._claim(link, first)
        for link in self:
            link.tick()

    def close(self) -> None:
        for link in self:
            link.close()

    def _make(self, name: str, feed: Feed) -> Link:
        if self._context.settings.registration == "watcher":
            from gpunode.plugin.kubelet.watcher import WatcherLink

            return WatcherLink(self._context, name, feed)
        from gpunode.plugin.kubelet.registration import KubeletLink

        return KubeletLink(self._context, name, feed)

    def _claim(self, link: Link, first: bool) -> None:
        try:
            link.claim()
        except GpunodeError:
            if first:
                raise  # later the link's own turns try again, and say what is in the way
