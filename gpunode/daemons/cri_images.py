"""What an image of the CRI's store brings along, read without protobuf's and gRPC's libraries.

The settings are no part of the protocol: containerd and CRI-O both tell them in the verbose status, as JSON.
"""

from __future__ import annotations

from typing import Any

from gpunode.daemons.grpc_unary import fields, unary_call
from gpunode.daemons.http import decoded
from gpunode.errors import DaemonError
from gpunode.host import Host

_STATUS = "/runtime.v1.ImageService/ImageStatus"


def image_config(host: Host, socket: str, reference: str, timeout: float) -> dict[str, Any] | None:
    """The image's own settings (Env, Labels, Cmd, ...), None if the daemon doesn't hold it; never pulled.

    `DaemonError` if the daemon gives no answer.
    """
    state = host.socket_state(socket)
    answer = unary_call(host, socket, _STATUS, _request(reference), timeout) if state == "listening" else None
    if answer is None:
        raise DaemonError(f"no answer from {socket} ({state})", code=state)
    try:
        return parse_image(answer)
    except ValueError as error:
        raise DaemonError(f"{socket} answered with what is no image: {error}", code="malformed") from error


def _request(reference: str) -> bytes:
    """ImageStatusRequest: image = 1, a message with the name as its field 1, and verbose = 2."""
    name = reference.encode()
    image = b"\x0a" + _length(len(name)) + name
    return b"\x0a" + _length(len(image)) + image + b"\x10\x01"


def _length(number: int) -> bytes:
    """A base-128 number, as protobuf counts bytes."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def parse_image(answer: bytes) -> dict[str, Any] | None:
    """ImageStatusResponse: image = 1, info = 2 (a map's entries). ValueError for what is none."""
    held = False
    info: Any = None
    for number, value in fields(answer):
        if number == 1:
            held = True
        elif number == 2 and isinstance(value, bytes):
            entry = dict(fields(value))
            if entry.get(1) == b"info" and isinstance(entry.get(2), bytes):
                info = decoded(bytes(entry[2]))
    spec = info.get("imageSpec") if isinstance(info, dict) else None
    config = spec.get("config") if isinstance(spec, dict) else None
    return (config if isinstance(config, dict) else {}) if held else None
