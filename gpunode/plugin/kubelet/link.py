"""A resource's server on its socket, which only root can connect to, and the base of both kinds of
registration."""

from __future__ import annotations

import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath

import grpc

from gpunode.errors import GpunodeError, PreconditionError, Unreadable
from gpunode.host import Host
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.kubelet.server import (
    DEVICE_PLUGIN,
    MAX_REQUEST_BYTES,
    MAX_STREAMS,
    DevicePlugin,
    LinkContext,
    Streams,
    handlers,
    target,
)
from gpunode.plugin.ledger import Feed
from gpunode.plugin.logfmt import OnChange

# The sockets in the kubelet's directories: their paths, and what is at a path.


def listen_privately(host: Host, socket: str, bind: Callable[[], object]) -> None:
    """Create a socket that only its owner can connect to.

    Connecting needs write permission, which `Host.restrict_umask` already denies others at the bind. The
    umask isn't changed for the bind itself, because it applies to the whole process: files that another
    thread makes at that moment would get it too, and two concurrent binds would leave it changed permanently.
    """
    try:
        bind()
    except RuntimeError as error:
        raise PreconditionError(
            f"can't listen on {socket}", hint="run as root, for example with sudo"
        ) from error
    host.set_mode(socket, 0o600)


def clear_stale(host: Host, socket: str) -> None:
    """Remove the socket of an earlier plugin at `socket`: only a socket, and only if no process listens on
    it."""
    path = host.path(socket, follow=False)
    if host.is_symlink(socket) or (path.exists() and not path.is_socket()):
        raise PreconditionError(
            f"{socket} is not a socket", hint=f"look at it and remove it: ls -ld {socket}"
        )
    if not path.exists():
        return
    if not host.is_dead_socket(socket):
        raise PreconditionError(
            f"another device plugin is serving on {socket}",
            hint=f"find it with: ss -xlp src {socket}; NVIDIA's plugin is a DaemonSet in kube-system",
            code=ANOTHER_PLUGIN,
        )
    host.remove(socket)


def check_directory(host: Host, path: str) -> bool:
    """Whether the directory exists. `PreconditionError` without permission to check it."""
    try:
        return host.is_dir(path)
    except Unreadable as error:
        raise PreconditionError(error.message, hint="run as root, for example with sudo") from error


def is_socket(host: Host, path: str) -> bool:
    return identity(host, path) is not None


def identity(host: Host, path: str) -> tuple[int, int, int] | None:
    """What changes when a socket is recreated; None if there is no socket.

    The change time is part of it, as a new socket often gets the old one's inode number again.
    """
    status = host.stat(path)
    if status is None or not stat.S_ISSOCK(status.st_mode):
        return None
    return (status.st_dev, status.st_ino, status.st_ctime_ns)


def registry(settings: Settings) -> str:
    """The directory of the kubelet's plugin watcher: beside its device plugin directory."""
    return str(PurePosixPath(settings.directory).parent / "plugins_registry")


def registry_socket(host: Host, settings: Settings, resource: str) -> str:
    """A new path for a resource's socket in the plugin watcher's directory.

    Each has a name of its own. The kubelet delays its next attempt on a path by up to two minutes after
    failed ones, and its monitor (since 1.35) deregisters a path that was dead for a while.
    """
    stem, _, suffix = settings.endpoint(resource).rpartition(".")
    return f"{registry(settings)}/{stem}@{int(host.now() * 100) & 0xFFFFFFFF:08x}.{suffix}"


def registry_sockets(host: Host, settings: Settings, resource: str) -> Iterator[str]:
    """The sockets of a resource in the plugin watcher's directory: those that `registry_socket` has named."""
    stem, _, suffix = settings.endpoint(resource).rpartition(".")
    yield from host.glob(registry(settings), f"{stem}@*.{suffix}")


# Our own socket: created where the kubelet expects it, and again whenever it was removed or replaced.

ANOTHER_PLUGIN = "another-plugin"
READ_ONLY = "directory-not-writable"
_BIND_DELAY = 1.0
_LONGEST_BIND_DELAY = 2.0
_PROBE_SECONDS = 2.0  # between two attempts to connect to another plugin's socket at our path
_WORKERS = 2 * MAX_STREAMS  # there are always more workers than streams; they are started when needed
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", 4 * MAX_REQUEST_BYTES),
    ("grpc.so_reuseport", 0),
)


class Serving:
    """One resource's gRPC server on its socket file, for as long as the plugin lives. Methods belong to one
    thread.

    `generation` grows with each new server. `streams` lists the open ListAndWatch calls of the present one.
    `extra` are further services on the same socket.
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
        self._server: grpc.Server | None = None
        self._identity: tuple[int, int] | None = None
        self.streams = Streams(feed, context.news)
        self._next_bind = 0.0
        self._bind_delay = _BIND_DELAY
        self._next_probe = 0.0
        self._problem = "waiting to serve again"
        self.generation = 0

    def claim(self, others: Iterable[str]) -> None:
        """Start serving if the directory exists. `PreconditionError` without permission, or if another plugin
        serves.

        `others` are further sockets that this resource may have had. Stale ones are removed now: the kubelet
        deregisters the resource when they are removed later.
        """
        target(self._host.path(self.socket))
        try:
            for other_path in others:
                if is_socket(self._host, other_path):
                    clear_stale(self._host, other_path)
        except GpunodeError as error:
            if error.code == ANOTHER_PLUGIN:
                raise
            self._log.warning("can't look for a stale socket", reason=error.message)
        if check_directory(self._host, self._directory):
            self._serve()

    def keep(self, now: float) -> str:
        """Make sure that the server runs; returns empty if it does, else the reason.

        `PreconditionError` with the code `READ_ONLY` if the directory can't be written (any more): a
        service's sandbox still holds the old one after it was recreated, and only a restart opens the new
        one.
        """
        if self._server is not None:
            state = self.socket_is()
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
                self._log.warning("the plugin's socket was deleted: serving again", socket=self.socket)
            self.close()
        if not self._host.is_dir(self._directory):
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
        """Serve at another path instead, which the kubelet's plugin watcher treats as a new plugin."""
        self.close()
        self.socket = socket
        self._serve()

    def close(self) -> None:
        """End every stream and remove the socket, within a second, which notifies the kubelet.

        gRPC unlinks by path when it closes. If another process has replaced the socket meanwhile, the
        listener stays open until the process ends.
        """
        server, self._server = self._server, None
        if server is None:
            return
        self.streams.close_all()
        if self.socket_is() != "foreign":
            server.stop(0.0).wait(1.0)  # with a grace period, because without one it would wait forever

    def socket_is(self) -> str:
        """ours, gone or foreign. While we listen our inode is kept, so that its number can't be reused."""
        seen = self._socket_identity()
        if seen is None:
            return "gone"
        return "ours" if seen == self._identity else "foreign"

    def _socket_identity(self) -> tuple[int, int] | None:
        status = self._host.stat(self.socket)
        return None if status is None else (status.st_dev, status.st_ino)

    def _serve(self) -> None:
        if not self._host.writable(self._directory):
            raise PreconditionError(
                f"can't create a socket in {self._directory}",
                hint="run as root, for example with sudo",
                code=READ_ONLY,
            )
        address = target(self._host.path(self.socket, follow=False))
        clear_stale(self._host, self.socket)
        self.streams = Streams(self._feed, self._context.news, self.streams.last)
        plugin = DevicePlugin(self._context, self._feed, self.streams)
        server = grpc.server(
            ThreadPoolExecutor(_WORKERS, thread_name_prefix="rpc"),
            handlers=[handlers(DEVICE_PLUGIN, plugin.functions), *self._extra],
            options=_OPTIONS,
        )
        listen_privately(self._host, self.socket, lambda: server.add_insecure_port(address))
        server.start()
        self._server, self._identity = server, self._socket_identity()
        self.generation += 1
        self._next_bind = 0.0
        self._bind_delay = _BIND_DELAY
        self._log.info("serving", resource=self._feed.snapshot().resource.name, socket=self.socket)


class Link(ABC):
    """One resource's server and its registration with the kubelet: see registration.py and watcher.py.

    All methods belong to one thread; `status`, one line for people, and `watched` may be read by any.
    """

    def __init__(self, context: LinkContext, resource: str, serving: Serving) -> None:
        self._host = context.host
        self._settings = context.settings
        self._log = context.log
        self._news = context.news
        self._say = OnChange(context.log)
        self._resource = resource
        self._serving = serving
        self.registrations = 0
        self.status = "starting"

    @property
    def socket(self) -> str:
        """The path of the resource's socket."""
        return self._serving.socket

    @property
    @abstractmethod
    def watched(self) -> bool:
        """Whether the kubelet follows our list of devices, and allocates from it."""

    @abstractmethod
    def claim(self) -> None:
        """Start serving if the kubelet's directory exists. `PreconditionError` if serving is impossible."""

    @abstractmethod
    def tick(self) -> None:
        """Do the next step towards serving, registered and watched. `PreconditionError` as in
        `Serving.keep`."""

    def close(self) -> None:
        """Stop serving."""
        self._serving.close()

    def _wait(self, reason: str) -> None:
        self.status = reason
        self._say.warning(reason)
