"""The CRI's ``Status`` and ``Version`` read without protobuf's and gRPC's libraries, which cost 100 ms."""

from __future__ import annotations

from gpunode.daemons.grpc_unary import fields, unary_call
from gpunode.host import Host

_STATUS = "/runtime.v1.RuntimeService/Status"
_VERSION = "/runtime.v1.RuntimeService/Version"
_VERBOSE = b"\x08\x01"  # StatusRequest.verbose = true
_SECONDS = 2.0  # a daemon that runs answers in 3 ms; of one that hangs the library is to say so soon
Said = tuple[str, tuple[str, ...], dict[str, bool]]


def quick_status(host: Host, socket: str, timeout: float) -> Said | None:
    """The configuration's JSON, the handlers' names and the conditions; None for every kind of failure."""
    answer = unary_call(host, socket, _STATUS, _VERBOSE, min(timeout, _SECONDS))
    if answer is None:
        return None
    try:
        return _read(answer)
    except ValueError:  # not what the protocol says; the generated code tells what is wrong
        return None


def quick_version(host: Host, socket: str, timeout: float) -> str:
    """The running program's version, as in ``containerd --version``; empty for every kind of failure."""
    answer = unary_call(host, socket, _VERSION, b"", min(timeout, _SECONDS))
    if answer is None:
        return ""
    try:
        return _text(_message(answer).get(3, b""))  # VersionResponse.runtime_version
    except ValueError:
        return ""


def _read(answer: bytes) -> Said:
    """StatusResponse: status = 1, info = 2 (a map's entries), runtime_handlers = 3."""
    info: dict[str, str] = {}
    handlers: list[str] = []
    conditions: dict[str, bool] = {}
    for number, value in fields(answer):
        message = _message(value) if number in (1, 2, 3) else {}
        if number == 1:
            conditions |= _conditions(value)
        elif number == 2:
            info[_text(message.get(1, b""))] = _text(message.get(2, b""))
        elif number == 3:
            handlers.append(_text(message.get(1, b"")))
    return info.get("config", ""), tuple(handlers), conditions


def _conditions(status: int | bytes) -> dict[str, bool]:
    """RuntimeStatus: conditions = 1, each with type = 1 and status = 2."""
    found = [_message(value) for number, value in fields(_bytes(status)) if number == 1]
    return {_text(one.get(1, b"")): bool(one.get(2, 0)) for one in found}


def _message(value: int | bytes) -> dict[int, int | bytes]:
    """The last value of each field, as protobuf takes it."""
    return dict(fields(_bytes(value)))


def _text(value: int | bytes) -> str:
    return _bytes(value).decode()


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where the protocol has a text or a message")
    return value
