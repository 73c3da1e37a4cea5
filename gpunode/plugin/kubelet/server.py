"""The plugin's gRPC server: one resource on a socket of its own that nobody else can connect to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc

from gpunode.errors import PreconditionError
from gpunode.host import Host
from gpunode.plugin.kubelet import rpc
from gpunode.plugin.kubelet.handlers import DevicePlugin
from gpunode.plugin.kubelet.streams import MAX_STREAMS, Streams

_WORKERS = 2 * MAX_STREAMS  # there are always more workers than streams; they are started when needed
_OPTIONS = (
    ("grpc.max_receive_message_length", rpc.MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", 4 * rpc.MAX_REQUEST_BYTES),
    ("grpc.so_reuseport", 0),
)


class PluginServer:
    """One gRPC server on one socket file. `streams` tells who is watching.

    `extra` are further services on the same socket.
    """

    def __init__(
        self,
        host: Host,
        socket: str,
        streams: Streams,
        plugin: DevicePlugin,
        extra: Sequence[grpc.GenericRpcHandler] = (),
    ) -> None:
        self._host = host
        self._socket = socket
        self._identity: tuple[int, int] | None = None
        self.streams = streams
        self._server = grpc.server(
            ThreadPoolExecutor(_WORKERS, thread_name_prefix="rpc"),
            handlers=[rpc.handlers(rpc.DEVICE_PLUGIN, plugin.functions), *extra],
            options=_OPTIONS,
        )

    def start(self) -> None:
        """Serve. `PreconditionError` if the path is too long, not ours to use or already served."""
        path = self._host.path(self._socket, follow=False)
        address = rpc.target(path)
        clear_stale(self._host, self._socket)
        listen_privately(self._host, self._socket, lambda: self._server.add_insecure_port(address))
        self._server.start()
        self._identity = self._seen()

    def socket_is(self) -> str:
        """ours, gone or foreign. While we listen our inode is kept, so that its number can't be reused."""
        seen = self._seen()
        if seen is None:
            return "gone"
        return "ours" if seen == self._identity else "foreign"

    def stop(self) -> None:
        """End every stream and remove the socket; at most a second.

        gRPC unlinks by path on the way out; where another process has put its own socket there meanwhile the
        listener is left to the end of the process instead.
        """
        self.streams.close_all()
        if self._identity is not None and self.socket_is() == "foreign":
            return
        self._server.stop(0.0).wait(1.0)  # with a grace, as without one it would wait for ever

    def _seen(self) -> tuple[int, int] | None:
        found = self._host.stat(self._socket)
        return None if found is None else (found.st_dev, found.st_ino)


def listen_privately(host: Host, socket: str, bind: Callable[[], object]) -> None:
    """Have a socket that only its owner can connect to.

    Connecting needs write permission, which `Host.restrict_umask` withholds from others at the bind already.
    The umask isn't changed for the bind itself: it is the whole process's, so what another thread makes at
    that moment would get it too, and two binds at once would leave it for good.
    """
    try:
        bind()
    except RuntimeError as error:
        raise PreconditionError(
            f"can't listen on {socket}", hint="run as root, for example with sudo"
        ) from error
    host.set_mode(socket, 0o600)


def clear_stale(host: Host, socket: str) -> None:
    """Remove what an earlier plugin left at `socket`: only a socket, and only if nobody listens behind it."""
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
        )
    host.remove(socket)
