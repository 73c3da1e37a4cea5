"""Another plugin that has registered our resource's name from a socket of its own.

The kubelet takes whoever comes last and tells nobody: our stream stays open, and yet Allocate goes to the
other. When that one ends, the kubelet drops the name, and still our stream stays open. What gives it away is
the kubelet's own checkpoint, which is written after every list: it names devices that aren't ours. A rival
that gives its devices the very ids that we give can't be told that way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection

from gpunode.host import Host
from gpunode.plugin.kubelet.directory import identity
from gpunode.plugin.kubelet.server import answers
from gpunode.plugin.ledger import Feed
from gpunode.plugin.settings import Settings

CHECKPOINT = "kubelet_internal_checkpoint"
_EVERY_SECONDS = 2.0
_SURE_AFTER = 2  # looks: our own news may be on its way to the kubelet
_NAMED = 3


class Rival:
    """Methods belong to one thread. `own` are the base names of this process' sockets."""

    def __init__(
        self, host: Host, settings: Settings, resource: str, feed: Feed, own: Callable[[], Collection[str]]
    ) -> None:
        self._host = host
        self._directory = settings.directory
        self._kubelet = settings.kubelet_socket.rpartition("/")[2]
        self._resource = resource
        self._feed = feed
        self._own = own
        self._mine = settings.endpoint(resource)
        self._next_look = 0.0
        self._written: tuple[int, int] | None = None
        self._listed: frozenset[str] = frozenset()
        self._looks = 0
        self._sockets: tuple[str, ...] = ()
        self._met = False  # somebody else listened: without one, what is written is merely old

    def look(self, now: float) -> str:
        """What the kubelet has from somebody else, with the sockets that may be theirs; empty if nothing.

        Looks every two seconds; a second for each socket behind which somebody hangs.
        """
        if now >= self._next_look:
            self._next_look = now + _EVERY_SECONDS
            self._read()
            ours = self._feed.snapshot().by_id
            strange = bool(ours) and bool(self._listed) and self._listed.isdisjoint(ours)
            self._looks = self._looks + 1 if strange else 0
            if strange:
                self._sockets = self._others()
                self._met = self._met or bool(self._sockets)
        if not self._sure or not self._sockets:
            return ""
        devices = ", ".join(sorted(self._listed)[:_NAMED]) + (" ..." if len(self._listed) > _NAMED else "")
        return (
            f"another device plugin has registered {self._resource}, with {devices}; "
            f"sockets beside ours: {', '.join(self._sockets)}"
        )

    @property
    def gone(self) -> bool:
        """Nobody else listens any more, so that the name is to be had again."""
        return self._sure and not self._sockets

    @property
    def suspected(self) -> bool:
        """Another look is due in two seconds, news or not; after it, what is merely old is let alone."""
        return self._looks > 0 and (self._met or self._looks < _SURE_AFTER)

    def forget(self) -> None:
        """We register anew: what the kubelet has written so far is no news."""
        self._looks = 0
        self._met = False

    @property
    def _sure(self) -> bool:
        return self._met and self._looks >= _SURE_AFTER

    def _read(self) -> None:
        path = f"{self._directory}/{CHECKPOINT}"
        found = self._host.stat(path)
        written = None if found is None else (found.st_ino, found.st_mtime_ns)
        if written == self._written:
            return
        self._written, self._listed = written, frozenset()
        try:
            devices = json.loads(self._host.read_text(path) or "{}")["Data"]["RegisteredDevices"]
            self._listed = frozenset(map(str, devices.get(self._resource) or ()))
        except (ValueError, LookupError, TypeError, AttributeError):
            return  # not this format: then there is nothing to be known

    def _others(self) -> tuple[str, ...]:
        mine = {*self._own(), self._mine, self._kubelet}
        paths = [
            path for path in self._host.glob(self._directory, "*") if path.rpartition("/")[2] not in mine
        ]
        alive = [path for path in paths if identity(self._host, path) and answers(self._host, path)]
        return tuple(path.rpartition("/")[2] for path in alive)
