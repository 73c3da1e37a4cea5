"""The CRI's lists of what runs, read like cri_status.py without protobuf's and gRPC's libraries."""

from __future__ import annotations

from typing import Any

from gpunode.daemons.grpc_unary import fields, unary_call
from gpunode.dataclass import dataclass
from gpunode.errors import DaemonError
from gpunode.host import Host

_CONTAINERS = "/runtime.v1.RuntimeService/ListContainers"
_SANDBOXES = "/runtime.v1.RuntimeService/ListPodSandbox"
# ListContainersRequest.filter (1) .state (2) .state (1) = CONTAINER_RUNNING (1)
_RUNNING = b"\x0a\x04\x12\x02\x08\x01"
_SECONDS = 2.0


@dataclass(frozen=True)
class CriContainer:
    """One running container. `handler` is its pod's runtime handler, empty for the engine's default one."""

    id: str
    name: str
    pod: str
    namespace: str
    image: str
    handler: str


def running_containers(host: Host, socket: str, timeout: float) -> tuple[CriContainer, ...]:
    """Every running container of this engine, in its order; `DaemonError` if it doesn't tell."""
    if not host.live:
        seen = host.recorded("daemons", socket)
        listed = seen.get("containers") if isinstance(seen, dict) else None
        if not isinstance(listed, list):
            raise DaemonError(f"no socket is contacted under --root {host.root}", code="not-live")
        return tuple(_recorded(entry) for entry in listed if isinstance(entry, dict))
    limit = min(timeout, _SECONDS)
    containers = unary_call(host, socket, _CONTAINERS, _RUNNING, limit)
    sandboxes = unary_call(host, socket, _SANDBOXES, b"", limit) if containers is not None else None
    if containers is None or sandboxes is None:
        raise DaemonError(f"{socket} doesn't list its containers", code="daemon")
    try:
        found = parse_lists(containers, sandboxes)
        host.heard("daemons", socket, {"containers": [vars(one) for one in found]})
        return found
    except ValueError as error:
        raise DaemonError(f"{socket} answered with no CRI message: {error}", code="protocol") from error


def parse_lists(containers: bytes, sandboxes: bytes) -> tuple[CriContainer, ...]:
    """ListContainersResponse.containers (1) and ListPodSandboxResponse.items (1), put together."""
    pods = {}
    for item in _messages(sandboxes):
        metadata = dict(fields(_bytes(item.get(2, b""))))
        pods[_text(item, 1)] = (_text(metadata, 1), _text(metadata, 3), _text(item, 7))
    found = []
    for item in _messages(containers):
        pod, namespace, handler = pods.get(_text(item, 2), ("", "", ""))
        name = _text(dict(fields(_bytes(item.get(3, b"")))), 1)
        image = _text(dict(fields(_bytes(item.get(4, b"")))), 1)
        found.append(CriContainer(_text(item, 1), name, pod, namespace, image, handler))
    return tuple(found)


def _messages(answer: bytes) -> list[dict[int, int | bytes]]:
    """Field 1, repeated; of each message the last value of a field, as protobuf takes it."""
    return [dict(fields(_bytes(value))) for number, value in fields(answer) if number == 1]


def _text(message: dict[int, int | bytes], number: int) -> str:
    return _bytes(message.get(number, b"")).decode("utf-8", "replace")


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where the protocol has a text or a message")
    return value


def _recorded(entry: dict[str, Any]) -> CriContainer:
    names = ("id", "name", "pod", "namespace", "image", "handler")
    return CriContainer(*(str(entry.get(key, "")) for key in names))
