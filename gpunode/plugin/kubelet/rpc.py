"""gRPC over unix sockets: the two services' methods, channels that share no state, the path limit."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message

from gpunode.errors import PreconditionError
from gpunode.plugin.proto import deviceplugin_pb2 as pb

VERSION = "v1beta1"
REGISTRATION = f"{VERSION}.Registration"
DEVICE_PLUGIN = f"{VERSION}.DevicePlugin"
MAX_SOCKET_PATH = 107  # sun_path of unix(7) holds 108 bytes, the last one is NUL

Handler = Callable[[Any, grpc.ServicerContext], Any]

_METHODS: dict[str, dict[str, tuple[type[Message], type[Message]]]] = {
    REGISTRATION: {"Register": (pb.RegisterRequest, pb.Empty)},
    DEVICE_PLUGIN: {
        "GetDevicePluginOptions": (pb.Empty, pb.DevicePluginOptions),
        "ListAndWatch": (pb.Empty, pb.ListAndWatchResponse),
        "GetPreferredAllocation": (pb.PreferredAllocationRequest, pb.PreferredAllocationResponse),
        "Allocate": (pb.AllocateRequest, pb.AllocateResponse),
        "PreStartContainer": (pb.PreStartContainerRequest, pb.PreStartContainerResponse),
    },
}
_STREAMS = {"ListAndWatch"}


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
    request, response = _METHODS[service][name]
    make = opened.unary_stream if name in _STREAMS else opened.unary_unary
    return make(
        f"/{service}/{name}",
        request_serializer=request.SerializeToString,
        response_deserializer=response.FromString,
    )


def handlers(service: str, functions: Mapping[str, Handler]) -> grpc.GenericRpcHandler:
    """A service's methods as a server takes them; `functions` are by method name."""
    table = {}
    for name, (request, response) in _METHODS[service].items():
        make = (
            grpc.unary_stream_rpc_method_handler if name in _STREAMS else grpc.unary_unary_rpc_method_handler
        )
        table[name] = make(
            functions[name],
            request_deserializer=request.FromString,
            response_serializer=response.SerializeToString,
        )
    return grpc.method_handlers_generic_handler(service, table)
