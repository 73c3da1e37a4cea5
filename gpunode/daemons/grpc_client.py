"""gRPC channels to unix sockets, and unary calls with a deadline and a limit on the response's size.

grpc takes 60 to 100 ms to import and is imported when a channel is opened.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gpunode.errors import DaemonError
from gpunode.host import Host
from gpunode.host.recording import naming_the_key
from gpunode.output.typed import as_dict, from_plain

if TYPE_CHECKING:
    import grpc
    from google.protobuf.message import Message

MAX_RESPONSE_BYTES = 16 << 20
MALFORMED = "MALFORMED"  # beside gRPC's status names: the response is not the message that was expected
_T = TypeVar("_T")
_Response = TypeVar("_Response", bound="Message")

# Both are read by gRPC when it is first imported. Its fork handlers can hang a process that spawns children
# (grpc/grpc#17986), and ours call exec at once; its own messages on stderr repeat the error.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")


class CallError(Exception):
    """A call that failed. `code` is the name of grpc's status code, or `MALFORMED`."""

    def __init__(self, code: str, details: str) -> None:
        super().__init__(f"{details} ({code})")
        self.code = code
        self.details = details


def channel_to(path: str | Path) -> grpc.Channel:
    """A channel to the unix socket at this path of the machine, connected when it is first called."""
    import grpc

    options = (
        # Go's server refuses the percent-encoded socket path that gRPC would send as :authority
        ("grpc.default_authority", "localhost"),
        ("grpc.enable_http_proxy", 0),
        # no connection, and no memory of failed ones, is shared with another channel
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", MAX_RESPONSE_BYTES),
    )
    return grpc.insecure_channel(f"unix:{path}", options=options)


@contextmanager
def open_channel(host: Host, socket: str) -> Iterator[grpc.Channel]:
    """A channel to a daemon's socket on the host. `DaemonError` if the host refuses it."""
    with host.socket_path(socket) as path, channel_to(path) as channel:
        yield channel


def recalled(host: Host, socket: str, what: str, kind: type) -> Any:
    """A daemon's answer on a recorded machine (docs/recorded-machines.md). `DaemonError` without one."""
    answer = as_dict(host.recorded("daemons", socket)).get(what)
    if not isinstance(answer, kind):
        raise DaemonError(f"no socket is contacted under --root {host.root}", code="not-live")
    return answer


def recalled_list(host: Host, socket: str, what: str, cls: type[_T]) -> tuple[_T, ...]:
    """The same for a list of records; `ConfigError` for a malformed recording."""
    items = enumerate(recalled(host, socket, what, list))
    with naming_the_key():
        return tuple(
            from_plain(cls, item, where=f"daemons.{socket}.{what}[{number}]") for number, item in items
        )


def unary_call(
    channel: grpc.Channel, method: str, request: Message, response: type[_Response], timeout: float
) -> _Response:
    """The response of `method` (``/package.Service/Method``). `CallError` for every failure."""
    import grpc
    from google.protobuf.message import DecodeError

    invoke: Any = channel.unary_unary(method)  # bytes in, bytes out: grpc hides why it can't parse a message
    try:
        data = invoke(request.SerializeToString(), timeout=timeout)
    except grpc.RpcError as error:
        code = error.code().name
        raise CallError(code, error.details() or code) from error
    try:
        return response.FromString(data)
    except DecodeError as error:
        raise CallError(MALFORMED, f"the response is not a {response.DESCRIPTOR.name}: {error}") from error
