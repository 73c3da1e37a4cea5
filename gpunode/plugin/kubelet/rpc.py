"""gRPC over unix sockets: the services' methods, channels that share no state, the path limit.

Requests are parsed here and not by grpc, which would print a traceback for bytes that are no message and tell
the client nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # a client's malformed frame is no news for the log

import grpc
from google.protobuf.message import DecodeError, Message

from gpunode.errors import GpunodeError, PreconditionError
from gpunode.plugin.proto import deviceplugin_pb2 as pb
from gpunode.plugin.proto import podresources_pb2

VERSION = "v1beta1"
REGISTRATION = f"{VERSION}.Registration"
DEVICE_PLUGIN = f"{VERSION}.DevicePlugin"
POD_RESOURCES = "v1.PodResourcesLister"
MAX_SOCKET_PATH = 107  # sun_path of unix(7) holds 108 bytes, the last one is NUL
MAX_REQUEST_BYTES = 4 << 20  # ten thousand device ids are half a MiB
_MAX_DETAILS = 1024  # grpc-message travels in a header, and a client takes 8 KiB of those

Handler = Callable[[Any, grpc.ServicerContext], Any]
Methods = Mapping[str, tuple[type[Message], type[Message]]]

METHODS: dict[str, Methods] = {
    REGISTRATION: {"Register": (pb.RegisterRequest, pb.Empty)},
    DEVICE_PLUGIN: {
        "GetDevicePluginOptions": (pb.Empty, pb.DevicePluginOptions),
        "ListAndWatch": (pb.Empty, pb.ListAndWatchResponse),
        "GetPreferredAllocation": (pb.PreferredAllocationRequest, pb.PreferredAllocationResponse),
        "Allocate": (pb.AllocateRequest, pb.AllocateResponse),
        "PreStartContainer": (pb.PreStartContainerRequest, pb.PreStartContainerResponse),
    },
    POD_RESOURCES: {
        "List": (podresources_pb2.ListPodResourcesRequest, podresources_pb2.ListPodResourcesResponse),
        "GetAllocatableResources": (
            podresources_pb2.AllocatableResourcesRequest,
            podresources_pb2.AllocatableResourcesResponse,
        ),
        "Get": (podresources_pb2.GetPodResourcesRequest, podresources_pb2.GetPodResourcesResponse),
    },
}
"""By service; others add their own where they are needed (see watcher.py)."""
STREAMS = frozenset({"ListAndWatch"})


class Refused(GpunodeError):
    """A request that is answered with a gRPC error. `status` is grpc.StatusCode's name."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


def target(path: Path) -> str:
    """The gRPC address of a unix socket. `PreconditionError` if the path is too long for one."""
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH:
        raise PreconditionError(
            f"{path} has {length} bytes; a unix socket's path can have {MAX_SOCKET_PATH}",
            hint="use a shorter directory, through a symlink for example",
        )
    return f"unix:{path}"


def channel(path: Path) -> grpc.Channel:
    """A channel of its own: no connection, and no memory of failed ones, is shared with another channel."""
    return grpc.insecure_channel(target(path), options=[("grpc.use_local_subchannel_pool", 1)])


def method(opened: grpc.Channel, service: str, name: str) -> Any:
    """A callable for one method, with ``.future`` for unary ones."""
    request, response = METHODS[service][name]
    make = opened.unary_stream if name in STREAMS else opened.unary_unary
    return make(
        f"/{service}/{name}",
        request_serializer=request.SerializeToString,
        response_deserializer=response.FromString,
    )


def handlers(service: str, functions: Mapping[str, Handler]) -> grpc.GenericRpcHandler:
    """A service's methods as a server takes them; `functions` are by method name.

    A function answers with a message (an iterator of them for a stream), or raises `Refused`.
    """
    table: dict[str, Any] = {}
    for name, (request, response) in METHODS[service].items():
        stream = name in STREAMS
        make = grpc.unary_stream_rpc_method_handler if stream else grpc.unary_unary_rpc_method_handler
        guard = _streaming if stream else _unary
        table[name] = make(guard(request, functions[name]), response_serializer=response.SerializeToString)
    return grpc.method_handlers_generic_handler(service, table)


def _unary(kind: type[Message], function: Handler) -> Handler:
    def call(data: bytes, context: grpc.ServicerContext) -> Message:
        try:
            return function(_parsed(kind, data), context)  # type: ignore[no-any-return]
        except Refused as refused:
            abort(context, refused)

    return call


def _streaming(kind: type[Message], function: Handler) -> Handler:
    def call(data: bytes, context: grpc.ServicerContext) -> Any:
        try:
            yield from function(_parsed(kind, data), context)
        except Refused as refused:
            abort(context, refused)

    return call


def _parsed(kind: type[Message], data: bytes) -> Message:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise Refused("INVALID_ARGUMENT", f"the request is no {kind.DESCRIPTOR.full_name}") from error


def abort(context: grpc.ServicerContext, refused: Refused) -> NoReturn:
    """End the call with the error. Long words are cut: a header that is too long would hide them all."""
    words = refused.message
    if len(words.encode("utf-8", "replace")) > _MAX_DETAILS:
        words = words.encode("utf-8", "replace")[: _MAX_DETAILS - 4].decode("utf-8", "ignore") + " ..."
    context.abort(grpc.StatusCode[refused.status], words.encode("utf-8", "replace").decode())
    raise AssertionError("abort raises")
