"""Our own socket: created where the kubelet looks for it, and again whenever it was removed or replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from gpunode.dataclass import dataclass
from gpunode.errors import GpunodeError, PreconditionError
from gpunode.host import Host
from gpunode.plugin.kubelet import rpc
from gpunode.plugin.kubelet.directory import check_directory, is_directory, is_socket
from gpunode.plugin.kubelet.handlers import DevicePlugin, Observer, Policy
from gpunode.plugin.kubelet.server import PluginServer, clear_stale
from gpunode.plugin.kubelet.streams import Streams
from gpunode.plugin.ledger import Feed
from gpunode.plugin.logfmt import Log
from gpunode.plugin.settings import Settings

if TYPE_CHECKING:
    import grpc

READ_ONLY = "directory-not-writable"
_BIND_DELAY = 1.0
_LONGEST_BIND_DELAY = 2.0
_PROBE_SECONDS = 2.0  # between two attempts to connect to another plugin's socket at our path


@dataclass(frozen=True)
class LinkContext:
    """What all links of a plugin share. `observe` gets every RPC, `news` asks for the next turn at once."""

    host: Host
    settings: Settings
    policy: Policy
    log: Log
    observe: Observer
    news: Callable[[], None]


class Serving:
    """One resource's server for as long as the plugin lives. All methods belong to one thread.

    `generation` grows whenever there is another server. `streams` are the present one's. `extra` are further
    services on the same socket.
    """

    def __init__(
        self,
        context: LinkContext,
        socket: str,
        feed: Feed,
        extra: Sequence[grpc.GenericRpcHandler] = (),
    ) -> None:
        self._context = context
        self._host = context.host
        self._log = context.log
        self.socket = socket
        self._directory = socket.rpartition("/")[0]
        self._feed = feed
        self._extra = extra
        self._server: PluginServer | None = None
        self.streams = Streams(feed, context.news)
        self._next_bind = 0.0
        self._bind_delay = _BIND_DELAY
        self._next_probe = 0.0
        self._problem = "waiting to serve again"
        self.generation = 0

    def claim(self, others: Iterable[str]) -> None:
        """Start serving if the directory exists. `PreconditionError` if we may not, or another plugin does.

        `others` are further sockets that this resource may have had. Stale ones are removed now: the kubelet
        deregisters the resource when they are removed later.
        """
        rpc.target(self._host.path(self.socket))
        try:
            for other in others:
                if is_socket(self._host, other):
                    clear_stale(self._host, other)
        except GpunodeError as error:
            if "another device plugin" in error.message:
                raise
            self._log.warning("can't look for a stale socket", reason=error.message)
        if check_directory(self._host, self._directory):
            self._serve()

    def keep(self, now: float) -> str:
        """See to it that we serve; empty if so, else what is in the way.

        `PreconditionError` with the code `READ_ONLY` if the directory can't be written (any more): a
        service's sandbox still holds the old one after somebody made it anew, and only a new start opens the
        new one.
        """
        if self._server is not None:
            state = self._server.socket_is()
            if state == "ours":
                return ""
            if state == "foreign":
                if now < self._next_probe:
                    return self._foreign
                self._next_probe = now + _PROBE_SECONDS
                if not self._host.is_dead_socket(self.socket):
                    return self._foreign
                clear_stale(self._host, self.socket)
                self._log.warning("the other device plugin has exited: serving again", socket=self.socket)
            else:
                self._log.warning("our socket was deleted: serving anew", socket=self.socket)
            self.close()
        if not is_directory(self._host, self._directory):
            return f"waiting for the kubelet: {self._directory} is not there"
        if now < self._next_bind:
            return self._problem
        self._next_bind = now + self._bind_delay
        self._bind_delay = min(2 * self._bind_delay, _LONGEST_BIND_DELAY)
        try:
            self._serve()
        except PreconditionError as error:
            self._problem = error.message
            if error.code == READ_ONLY:
                raise
            return self._problem
        return ""

    @property
    def _foreign(self) -> str:
        return f"another device plugin has put its socket at {self.socket}"

    def move(self, socket: str) -> None:
        """Serve at another path instead, which the kubelet's plugin watcher takes for a new plugin."""
        self.close()
        self.socket = socket
        self._serve()

    def close(self) -> None:
        """Stop serving; our socket goes away, which is how the kubelet learns of it."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()

    def _serve(self) -> None:
        if not self._host.writable(self._directory):
            raise PreconditionError(
                f"can't create a socket in {self._directory}",
                hint="run as root, for example with sudo",
                code=READ_ONLY,
            )
        self.streams = Streams(self._feed, self._context.news, self.streams.last)
        plugin = DevicePlugin(
            self._feed, self.streams, self._context.policy, self._log, self._context.observe
        )
        server = PluginServer(self._host, self.socket, self.streams, plugin, self._extra)
        server.start()
        self._server = server
        self.generation += 1
        self._next_bind = 0.0
        self._bind_delay = _BIND_DELAY
        self._log.info("serving", resource=self._feed.snapshot().resource.name, socket=self.socket)
