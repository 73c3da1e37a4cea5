"""The plugin's gRPC server: five thin handlers over the table and the pure policies, and its own socket.

Each ListAndWatch holds a worker thread for as long as its stream lives, and the stream of a kubelet that
hangs may live for ever. So streams are numbered, an old one is ended when there are too many, though not the
present kubelet's, and there are always more workers than streams.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Protocol

import grpc

from gpunode.errors import PreconditionError
from gpunode.host import Host
from gpunode.plugin.kubelet import rpc
from gpunode.plugin.ledger import Feed
from gpunode.plugin.model import AllocationError, Answer, Snapshot
from gpunode.plugin.proto import deviceplugin_pb2 as pb

MAX_STREAMS = 8
_WORKERS = 16
_STATUS = {
    "not-found": grpc.StatusCode.NOT_FOUND,
    "invalid": grpc.StatusCode.INVALID_ARGUMENT,
    "unhealthy": grpc.StatusCode.FAILED_PRECONDITION,
}


def plugin_options() -> pb.DevicePluginOptions:
    """What the kubelet may ask of this plugin."""
    return pb.DevicePluginOptions(pre_start_required=False, get_preferred_allocation_available=True)


class Policy(Protocol):
    """What the handlers ask: which devices to prefer, and what a container gets. `AllocationError` says why
    not."""

    def answer(self, snapshot: Snapshot, ids: Sequence[str]) -> Answer: ...

    def prefer(
        self, snapshot: Snapshot, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> Sequence[str]: ...


def device_list(table: Snapshot) -> pb.ListAndWatchResponse:
    """The whole list as the kubelet wants it: exactly one NUMA node, or no topology at all."""
    response = pb.ListAndWatchResponse()
    for device in table.devices:
        item = response.devices.add(ID=device.id, health="Healthy" if device.healthy else "Unhealthy")
        if device.unit.numa is not None:
            item.topology.nodes.add(ID=device.unit.numa)
    return response


def container_response(answer: Answer) -> pb.ContainerAllocateResponse:
    """The answer as the kubelet takes it."""
    return pb.ContainerAllocateResponse(
        envs=answer.envs,
        mounts=[
            pb.Mount(container_path=item.container, host_path=item.host, read_only=item.read_only)
            for item in answer.mounts
        ],
        devices=[
            pb.DeviceSpec(container_path=item.container, host_path=item.host, permissions=item.permissions)
            for item in answer.nodes
        ],
        annotations=answer.annotations,
        cdi_devices=[pb.CDIDevice(name=name) for name in answer.cdi],
    )


class Streams:
    """The open ListAndWatch streams, numbered in the order in which they were opened."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._lock = Lock()
        self._open: set[int] = set()
        self._ended = False
        self._mark: int | None = None
        self.last = 0

    def open(self) -> int:
        """Number a new stream; the oldest that isn't the kubelet's ends if there are too many."""
        with self._lock:
            self.last += 1
            if not self._ended:
                self._open.add(self.last)
            crowd = self._crowd()
            number = self.last
        for old in crowd:
            self.close(old)
        return number

    def _crowd(self) -> list[int]:
        """What is to end. The first stream after a registration is taken for the kubelet's."""
        oldest = sorted(self._open)
        mine = next((n for n in oldest if self._mark is not None and n > self._mark), None)
        return [n for n in oldest if n != mine][: max(0, len(oldest) - MAX_STREAMS)]

    def registering(self) -> int:
        """The kubelet's stream is about to come: the number that it will be above."""
        with self._lock:
            self._mark = self.last
            return self.last

    def is_open(self, number: int) -> bool:
        return number in self._open

    def since(self, mark: int) -> bool:
        """Whether a stream is open that was opened after number `mark`."""
        with self._lock:
            return any(number > mark for number in self._open)

    def close(self, number: int) -> None:
        """End a stream; safe to call twice and from any thread."""
        with self._lock:
            self._open.discard(number)
        self._feed.wake()

    def close_all(self) -> None:
        """End every stream, also one that a client opens from now on: its thread would outlive the server."""
        with self._lock:
            self._ended = True
            self._open.clear()
        self._feed.wake()


class DevicePlugin:
    """The RPC handlers. All policy lies behind `Policy`."""

    def __init__(self, feed: Feed, streams: Streams, policy: Policy) -> None:
        self._feed = feed
        self._streams = streams
        self._policy = policy

    def get_options(self, request: pb.Empty, context: grpc.ServicerContext) -> pb.DevicePluginOptions:
        return plugin_options()

    def list_and_watch(
        self, request: pb.Empty, context: grpc.ServicerContext
    ) -> Iterator[pb.ListAndWatchResponse]:
        """The list now, and again after every change, until either side ends the stream."""
        number = self._streams.open()
        if not context.add_callback(lambda: self._streams.close(number)):
            self._streams.close(number)  # the client has gone already
        version = -1
        while snapshot := self._feed.wait_newer(version, lambda: self._streams.is_open(number)):
            version = snapshot.version
            yield device_list(snapshot)

    def get_preferred(
        self, request: pb.PreferredAllocationRequest, context: grpc.ServicerContext
    ) -> pb.PreferredAllocationResponse:
        table = self._feed.snapshot()
        response = pb.PreferredAllocationResponse()
        for asked in request.container_requests:
            ids = self._policy.prefer(
                table, asked.available_deviceIDs, asked.must_include_deviceIDs, asked.allocation_size
            )
            response.container_responses.add(deviceIDs=ids)
        return response

    def allocate(self, request: pb.AllocateRequest, context: grpc.ServicerContext) -> pb.AllocateResponse:
        table = self._feed.snapshot()
        response = pb.AllocateResponse()
        try:
            for asked in request.container_requests:
                response.container_responses.append(
                    container_response(self._policy.answer(table, asked.devices_ids))
                )
        except AllocationError as error:
            context.abort(_STATUS[error.code], error.message)
        return response

    def pre_start(
        self, request: pb.PreStartContainerRequest, context: grpc.ServicerContext
    ) -> pb.PreStartContainerResponse:
        return pb.PreStartContainerResponse()


class PluginServer:
    """One gRPC server on one socket file. `streams` tells who is watching."""

    def __init__(self, host: Host, socket: str, feed: Feed, policy: Policy) -> None:
        self._host = host
        self._socket = socket
        self._identity: tuple[int, int] | None = None
        self.streams = Streams(feed)
        plugin = DevicePlugin(feed, self.streams, policy)
        functions: dict[str, rpc.Handler] = {
            "GetDevicePluginOptions": plugin.get_options,
            "ListAndWatch": plugin.list_and_watch,
            "GetPreferredAllocation": plugin.get_preferred,
            "Allocate": plugin.allocate,
            "PreStartContainer": plugin.pre_start,
        }
        workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="rpc")
        self._server = grpc.server(workers, handlers=[rpc.handlers(rpc.DEVICE_PLUGIN, functions)])

    def start(self) -> None:
        """Serve. `PreconditionError` if the path is too long, not ours to use or already served."""
        path = self._host.path(self._socket, follow=False)
        address = rpc.target(path)
        clear_stale(self._host, self._socket)
        before = os.umask(0o177)  # the socket is born 0600: connecting to it needs write permission
        try:
            self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise PreconditionError(
                f"can't listen on {self._socket}", hint="run as root, for example with sudo"
            ) from error
        finally:
            os.umask(before)
        self._server.start()
        self._identity = self._seen()

    def socket_is(self) -> str:
        """ours, gone or foreign. While we listen our inode is kept, so that its number can't be reused."""
        seen = self._seen()
        if seen is None:
            return "gone"
        return "ours" if seen == self._identity else "foreign"

    def stop(self) -> None:
        """End every stream and remove the socket.

        gRPC unlinks by path on the way out; where another process has put its own socket there meanwhile the
        listener is left to the end of the process instead.
        """
        self.streams.close_all()
        if self.socket_is() != "foreign":
            self._server.stop(None).wait(1.0)

    def _seen(self) -> tuple[int, int] | None:
        found = self._host.stat(self._socket)
        return None if found is None else (found.st_dev, found.st_ino)


def clear_stale(host: Host, socket: str) -> None:
    """Remove what an earlier plugin left at `socket`: only a socket, and only if nobody listens behind it."""
    path = host.path(socket, follow=False)
    if host.is_symlink(socket) or (path.exists() and not path.is_socket()):
        raise PreconditionError(
            f"{socket} is not a socket", hint=f"look at it and remove it: ls -ld {socket}"
        )
    if not path.exists():
        return
    if _answers(path):
        raise PreconditionError(
            f"another device plugin is serving on {socket}",
            hint=f"find it with: ss -xlp src {socket}; NVIDIA's plugin is a DaemonSet in kube-system",
        )
    host.remove(socket)


def _answers(path: Path) -> bool:
    """Whether a process listens behind a socket, whatever it has to say."""
    with rpc.channel(path) as channel:
        ask = rpc.method(channel, rpc.DEVICE_PLUGIN, "GetDevicePluginOptions")
        try:
            ask(pb.Empty(), timeout=1.0)
        except grpc.RpcError as error:
            return bool(error.code() != grpc.StatusCode.UNAVAILABLE)
    return True
