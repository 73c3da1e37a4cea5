"""The device plugin's RPCs: gRPC over unix sockets, the kubelet's streams, and the handlers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, NoReturn

import grpc
from google.protobuf.message import DecodeError, Message

from gpunode.errors import GpunodeError, PreconditionError
from gpunode.host import Host
from gpunode.plugin.config.settings import SOCKET_BYTES, Settings
from gpunode.plugin.ledger import Feed, Ledger
from gpunode.plugin.logfmt import Log, Rarely
from gpunode.plugin.model import AllocationError, Answer, Backend, Snapshot
from gpunode.plugin.placement import prefer
from gpunode.plugin.proto import deviceplugin_pb2 as pb

# The open ListAndWatch streams of one server.
#
# Each holds a worker thread for as long as it lives, and the stream of a kubelet that hangs may live for
# ever. So streams are numbered, and an old one is ended when there are too many, though not the present
# kubelet's.

MAX_STREAMS = 8


class Streams:
    """In the order in which they were opened. `news` is called when one was opened or has ended.

    Numbering continues after `last`: numbers of an earlier server are never reused.
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
        """The streams to end. The first stream after a registration is taken for the kubelet's."""
        oldest = sorted(self._open)
        newest = next((n for n in oldest if self._mark is not None and n > self._mark), None)
        return [n for n in oldest if n != newest][: max(0, len(oldest) - MAX_STREAMS)]

    def registering(self) -> int:
        """The kubelet's stream is about to open: return the number that it will exceed."""
        return self.registered(self.last)

    def registered(self, mark: int) -> int:
        """The kubelet's stream is the first above `mark`, whether it is open already or not."""
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
        """End every stream, also those that a client opens from now on: their threads would outlive the
        server."""
        with self._lock:
            self._ended = True
            self._open.clear()
        self._feed.wake()


# gRPC over unix sockets: the services' methods, the path limit.
#
# Requests are parsed here and not by grpc, which would print a traceback for bytes that aren't a message and
# send the client no reason.

VERSION = "v1beta1"
MAX_REQUEST_BYTES = 4 << 20  # ten thousand device ids are half a MiB
_MAX_DETAILS = 1024  # grpc-message is sent in a header, and a client accepts 8 KiB of those

Handler = Callable[[Any, grpc.ServicerContext], Any]


class Service(NamedTuple):
    """A gRPC service: its full name, the request and the response of each method."""

    name: str
    methods: Mapping[str, tuple[type[Message], type[Message]]]


REGISTRATION = Service(f"{VERSION}.Registration", {"Register": (pb.RegisterRequest, pb.Empty)})
DEVICE_PLUGIN = Service(
    f"{VERSION}.DevicePlugin",
    {
        "GetDevicePluginOptions": (pb.Empty, pb.DevicePluginOptions),
        "ListAndWatch": (pb.Empty, pb.ListAndWatchResponse),
        "GetPreferredAllocation": (pb.PreferredAllocationRequest, pb.PreferredAllocationResponse),
        "Allocate": (pb.AllocateRequest, pb.AllocateResponse),
        "PreStartContainer": (pb.PreStartContainerRequest, pb.PreStartContainerResponse),
    },
)
STREAMS = frozenset({"ListAndWatch"})


class RefusedRequest(GpunodeError):
    """A request that is answered with a gRPC error. `status` is grpc.StatusCode's name."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


def target(path: Path) -> str:
    """The gRPC address of a unix socket. `PreconditionError` if the path is too long for one."""
    length = len(os.fsencode(path))
    if length > SOCKET_BYTES:
        raise PreconditionError(
            f"{path} has {length} bytes; a unix socket's path can have {SOCKET_BYTES}",
            hint="use a shorter directory, through a symlink for example",
        )
    return f"unix:{path}"


def method(opened: grpc.Channel, service: Service, name: str) -> Any:
    """A callable for one method, with ``.future`` for unary ones."""
    request, response = service.methods[name]
    make = opened.unary_stream if name in STREAMS else opened.unary_unary
    return make(
        f"/{service.name}/{name}",
        request_serializer=request.SerializeToString,
        response_deserializer=response.FromString,
    )


def handlers(service: Service, functions: Mapping[str, Handler]) -> grpc.GenericRpcHandler:
    """A service's methods as a server takes them; `functions` are by method name.

    A function returns a message (an iterator of them for a stream), or raises `RefusedRequest`.
    """
    table: dict[str, Any] = {}
    for name, (request, response) in service.methods.items():
        stream = name in STREAMS
        make = grpc.unary_stream_rpc_method_handler if stream else grpc.unary_unary_rpc_method_handler
        guard = _streaming if stream else _unary
        table[name] = make(guard(request, functions[name]), response_serializer=response.SerializeToString)
    return grpc.method_handlers_generic_handler(service.name, table)


def _unary(kind: type[Message], function: Handler) -> Handler:
    def call(data: bytes, context: grpc.ServicerContext) -> Message:
        try:
            return function(_parsed(kind, data), context)  # type: ignore[no-any-return]
        except RefusedRequest as refused:
            abort(context, refused)

    return call


def _streaming(kind: type[Message], function: Handler) -> Handler:
    def call(data: bytes, context: grpc.ServicerContext) -> Any:
        try:
            yield from function(_parsed(kind, data), context)
        except RefusedRequest as refused:
            abort(context, refused)

    return call


def _parsed(kind: type[Message], data: bytes) -> Message:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise RefusedRequest(
            "INVALID_ARGUMENT", f"the request is not a {kind.DESCRIPTOR.full_name}"
        ) from error


def abort(context: grpc.ServicerContext, refused: RefusedRequest) -> NoReturn:
    """End the call with the error. Long messages are cut, because a header that is too long would hide all of
    them."""
    words = refused.message
    if len(words.encode("utf-8", "replace")) > _MAX_DETAILS:
        words = words.encode("utf-8", "replace")[: _MAX_DETAILS - 4].decode("utf-8", "ignore") + " ..."
    context.abort(grpc.StatusCode[refused.status], words.encode("utf-8", "replace").decode())
    raise AssertionError("abort raises")


# The five RPCs of a device plugin: thin, as the backend answers and placement.py chooses. Every bug becomes
# an RPC error.

_STATUS = {"not-found": "NOT_FOUND", "invalid": "INVALID_ARGUMENT", "unhealthy": "FAILED_PRECONDITION"}
_REASON = 500  # characters of a reason in the log
_LISTED = 16  # devices of an allocation in the log


class Call(NamedTuple):
    """One RPC that was answered. `code` is gRPC's (OK, NOT_FOUND, ...), `devices` how many were requested.

    A ListAndWatch is reported when its stream has ended. `fallback` is set where a preference came from the
    simple rule because the good one failed.
    """

    resource: str
    method: str
    code: str
    seconds: float
    devices: int = 0
    fallback: bool = False


Observer = Callable[[Call], None]


def plugin_options() -> pb.DevicePluginOptions:
    """The options that this plugin reports to the kubelet."""
    return pb.DevicePluginOptions(pre_start_required=False, get_preferred_allocation_available=True)


def device_list(snapshot: Snapshot) -> pb.ListAndWatchResponse:
    """The whole list in the kubelet's form: exactly one NUMA node, or no topology at all."""
    response = pb.ListAndWatchResponse()
    for device in snapshot.devices:
        item = response.devices.add(ID=device.id, health="Healthy" if device.healthy else "Unhealthy")
        if device.unit.numa is not None:
            item.topology.nodes.add(ID=device.unit.numa)
    return response


def container_response(answer: Answer) -> pb.ContainerAllocateResponse:
    """The response in the kubelet's form."""
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


@dataclass(frozen=True)
class LinkContext:
    """Shared by all links of a plugin. `settings` are those of the plugin's start, for options that need a
    restart. `observers` are called for every RPC, `news` requests the next turn at once."""

    host: Host
    settings: Settings
    backend: Backend
    ledger: Ledger
    log: Log
    observers: Sequence[Observer]
    news: Callable[[], None]


class DevicePlugin:
    """The RPC handlers of one resource."""

    def __init__(self, context: LinkContext, feed: Feed, streams: Streams) -> None:
        self._context = context
        self._feed = feed
        self._streams = streams
        self._log = context.log
        self._rarely = Rarely(60.0)

    @property
    def functions(self) -> dict[str, Handler]:
        """By method name, each with error handling."""
        return {
            "GetDevicePluginOptions": self._guarded("GetDevicePluginOptions", lambda _: plugin_options()),
            "ListAndWatch": self.list_and_watch,
            "GetPreferredAllocation": self.get_preferred,
            "Allocate": self._guarded("Allocate", self.allocate),
            "PreStartContainer": self._guarded("PreStartContainer", lambda _: pb.PreStartContainerResponse()),
        }

    def list_and_watch(
        self, request: pb.Empty, context: grpc.ServicerContext
    ) -> Iterator[pb.ListAndWatchResponse]:
        """The list now, and again after every change, until either side ends the stream."""
        started = time.perf_counter()
        number = self._streams.open()
        if not context.add_callback(lambda: self._streams.close(number)):
            self._streams.close(number)  # the client has disconnected already
        version = -1
        try:
            while snapshot := self._feed.wait_newer(version, lambda: self._streams.is_open(number)):
                version = snapshot.version
                yield device_list(snapshot)
        finally:
            self._streams.close(number)
            self._report("ListAndWatch", "OK", started)

    def get_preferred(
        self, request: pb.PreferredAllocationRequest, context: grpc.ServicerContext
    ) -> pb.PreferredAllocationResponse:
        """Never an error, because the kubelet would refuse the pod for it."""
        started, failed = time.perf_counter(), False
        snapshot, ledger = self._feed.snapshot(), self._context.ledger
        response = pb.PreferredAllocationResponse()
        for container_request in request.container_requests:
            available, must = container_request.available_deviceIDs, container_request.must_include_deviceIDs
            try:
                ids = prefer(
                    ledger.settings,
                    snapshot,
                    ledger.topology,
                    available,
                    must,
                    container_request.allocation_size,
                )
                answer = pb.ContainerPreferredAllocationResponse(deviceIDs=ids)
            except Exception as error:  # noqa: BLE001 - any devices are better than a refused pod
                failed = True
                self._bug("choosing preferred devices failed: using the first ones", error)
                ids = first_available(available, must, container_request.allocation_size)
                answer = pb.ContainerPreferredAllocationResponse(deviceIDs=ids)
            response.container_responses.append(answer)
        self._report("GetPreferredAllocation", "OK", started, _requested_devices(request), failed)
        return response

    def allocate(self, request: pb.AllocateRequest) -> pb.AllocateResponse:
        snapshot, settings = self._feed.snapshot(), self._context.ledger.settings
        response = pb.AllocateResponse()
        try:
            for container_request in request.container_requests:
                answer = self._context.backend.answer(settings, snapshot, container_request.devices_ids)
                response.container_responses.append(container_response(answer))
                devices = _shortened(container_request.devices_ids)
                self._log.info("allocated", resource=snapshot.resource.name, devices=devices)
        except AllocationError as error:
            raise RefusedRequest(_STATUS.get(error.code, "INVALID_ARGUMENT"), error.message) from error
        return response

    # --- error handling ---------------------------------------------------------------------------------

    def _guarded(self, name: str, function: Callable[[Any], Any]) -> Handler:
        """A unary RPC: timed, and a bug becomes an error that names its cause."""

        def call(request: Any, context: grpc.ServicerContext) -> Any:
            started, code = time.perf_counter(), "OK"
            try:
                return function(request)
            except RefusedRequest as refused:
                code = refused.status
                self._warn(f"{name} refused", refused.message[:_REASON])
                raise
            except Exception as error:
                code = "INTERNAL"
                self._bug(f"{name} failed", error)
                raise RefusedRequest(code, f"a bug in gpunode: {type(error).__name__}: {error}") from error
            finally:
                self._report(name, code, started, _requested_devices(request))

        return call

    @property
    def _resource(self) -> str:
        return self._feed.snapshot().resource.name

    def _warn(self, message: str, reason: str) -> None:
        if times := self._rarely.times((message, reason)):
            self._log.warning(message, resource=self._resource, reason=reason, times=times)

    def _bug(self, message: str, error: Exception) -> None:
        where = error.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        at = f"{where.tb_frame.f_code.co_filename}:{where.tb_lineno}" if where is not None else ""
        reason = f"{type(error).__name__}: {error}"[:_REASON]
        if times := self._rarely.times((message, reason, at)):
            self._log.error(message, resource=self._resource, reason=reason, at=at, times=times)

    def _report(
        self, method: str, code: str, started: float, devices: int = 0, fallback: bool = False
    ) -> None:
        call = Call(self._resource, method, code, time.perf_counter() - started, devices, fallback)
        for observe in self._context.observers:
            try:
                observe(call)
            except Exception as error:  # noqa: BLE001 - an observer must not make calls fail
                if times := self._rarely.times(repr(error)):
                    self._log.error("counting a call failed", reason=repr(error), times=times)


def first_available(available: Sequence[str], must_include: Sequence[str], size: int) -> tuple[str, ...]:
    """The required ids, then the first available ones, `size` in all."""
    return tuple(dict.fromkeys([*must_include, *available]))[: max(0, size)]


def _shortened(ids: Sequence[str]) -> str:
    """The ids for a log line; the kubelet doesn't report to a plugin which pod they are for."""
    more = f" and {len(ids) - _LISTED} more" if len(ids) > _LISTED else ""
    return ",".join(ids[:_LISTED]) + more


def _requested_devices(request: Any) -> int:
    """The number of devices in a request, where it has any."""
    if isinstance(request, pb.AllocateRequest):
        return sum(len(container_request.devices_ids) for container_request in request.container_requests)
    if isinstance(request, pb.PreferredAllocationRequest):
        return sum(container_request.allocation_size for container_request in request.container_requests)
    return 0
