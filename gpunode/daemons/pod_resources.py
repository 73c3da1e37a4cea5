"""Which container holds which device, and what could be handed out: the kubelet's PodResources service, v1.

The messages are read by their field numbers (proto/podresources.proto): the library that could read them
takes longer to import than the whole question. It is loaded only where a question failed and it can tell why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gpunode.daemons.grpc_unary import fields, unary_call
from gpunode.errors import DaemonError
from gpunode.host import Host

_SERVICE = "/v1.PodResourcesLister"
_RUN_AS_ROOT = "run as root, for example with sudo"
_HINTS = {
    "denied": _RUN_AS_ROOT,
    "absent": "is the kubelet running? One with another directory is named with --pod-resources-socket",
    "refused": "the kubelet isn't running: systemctl status kubelet",
}


@dataclass(frozen=True)
class Holding:
    """What one container holds of one resource. `pod` is empty and `pod_uid` set where only that is known."""

    namespace: str
    pod: str
    container: str
    resource: str
    ids: tuple[str, ...]
    pod_uid: str = ""


def list_pods(host: Host, socket: str, timeout: float = 2.0) -> tuple[Holding, ...]:
    """What the containers of this node hold, in the kubelet's order; takes at most about twice `timeout`.

    `DaemonError` says why it can't be told: no socket, no permission, nobody there, no answer in time.
    """
    if not host.live:
        return tuple(map(_recorded_holding, _recalled(host, socket, "pods")))
    answer = _ask(host, socket, "List", timeout)
    try:
        found = tuple(_holdings(answer))
        host.heard("daemons", socket, {"pods": [_as_recorded(one) for one in found]})
        return found
    except (ValueError, TypeError) as error:
        raise _nonsense(socket, error) from error


def allocatable(host: Host, socket: str, timeout: float = 2.0) -> dict[str, tuple[str, ...]]:
    """The healthy devices that the kubelet knows, held or not, by resource.

    `DaemonError` as for `list_pods`; its code is ``unsupported`` for a kubelet older than 1.23 (or with the
    feature gate KubeletPodResourcesGetAllocatable off).
    """
    if not host.live:
        table = dict(_recalled(host, socket, "allocatable"))
        return {
            str(name): tuple(map(str, ids)) if isinstance(ids, list) else () for name, ids in table.items()
        }
    answer = _ask(host, socket, "GetAllocatableResources", timeout)
    try:
        found = _devices(value for number, value in fields(answer) if number == 1)
        host.heard("daemons", socket, {"allocatable": {name: list(ids) for name, ids in found.items()}})
        return found
    except (ValueError, TypeError) as error:
        raise _nonsense(socket, error) from error


def _recalled(host: Host, socket: str, what: str) -> Any:
    """What a recorded machine says that the kubelet answers (docs/recorded-machines.md)."""
    seen = host.recorded("daemons", socket)
    answer = seen.get(what) if isinstance(seen, dict) else None
    if not isinstance(answer, list if what == "pods" else dict):
        raise DaemonError(f"no socket is contacted under --root {host.root}", code="not-live")
    return answer


def _as_recorded(one: Holding) -> dict[str, Any]:
    fields_of = {"namespace": one.namespace, "pod": one.pod, "container": one.container}
    return {**fields_of, "resource": one.resource, "ids": list(one.ids)}


def _recorded_holding(entry: Any) -> Holding:
    """An object with the fields of `Holding`; what has another type counts as absent."""
    known = entry if isinstance(entry, dict) else {}
    namespace, pod, container, resource = (
        str(known.get(key, "")) for key in ("namespace", "pod", "container", "resource")
    )
    return Holding(namespace, pod, container, resource, _recorded_ids(known.get("ids")))


def _recorded_ids(ids: Any) -> tuple[str, ...]:
    return tuple(map(str, ids)) if isinstance(ids, list) else ()


def _ask(host: Host, socket: str, method: str, timeout: float) -> bytes:
    state = host.socket_state(socket)
    if state != "listening":
        reasons = {
            "absent": "is not there",
            "denied": "can't be opened: permission denied",
            "refused": "has nobody listening",
            "not-a-socket": "is not a socket",
        }
        reason = reasons.get(state, state)
        raise DaemonError(
            f"the kubelet's PodResources socket {socket} {reason}", hint=_HINTS.get(state, ""), code=state
        )
    answer = unary_call(host, socket, f"{_SERVICE}/{method}", b"", timeout)
    return _ask_again(host, socket, method, timeout) if answer is None else answer


def _ask_again(host: Host, socket: str, method: str, timeout: float) -> bytes:
    """With gRPC's library, which knows why not."""
    import grpc

    # no connection, and no memory of failed ones, is shared with another channel
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"unix:{host.path(socket)}", options=options) as opened:
        ask: Any = opened.unary_unary(f"{_SERVICE}/{method}")  # bytes in, bytes out
        try:
            return bytes(ask(b"", timeout=timeout))
        except grpc.RpcError as error:
            details = " ".join((error.details() or "").split())[:200]
            code = error.code()
    if code == grpc.StatusCode.UNIMPLEMENTED or "disabled" in details:
        raise DaemonError(
            f"this kubelet doesn't offer {method}",
            hint="it came with Kubernetes 1.23" if method == "GetAllocatableResources" else "",
            code="unsupported",
        )
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        raise DaemonError(
            f"the kubelet did not answer {method} within {timeout:g} s",
            hint="look at it: journalctl -u kubelet -n 50",
            code="timeout",
        )
    raise DaemonError(f"the kubelet refused {method}: {details} ({code.name})", code="refused")


def _nonsense(socket: str, error: Exception) -> DaemonError:
    return DaemonError(f"{socket} gave an answer that is no PodResources message: {error}", code="protocol")


def _holdings(answer: bytes) -> Iterable[Holding]:
    """ListPodResourcesResponse: pod_resources = 1, each name = 1, namespace = 2, containers = 3."""
    for number, pod in fields(answer):
        if number == 1:
            message = _grouped(_bytes(pod))
            for container in message.get(3, ()):
                yield from _container(_text(message, 2), _text(message, 1), _bytes(container))


def _container(namespace: str, pod: str, data: bytes) -> Iterable[Holding]:
    """ContainerResources: name = 1, devices = 2. A Go kubelet gives each device an entry of its own."""
    message = _grouped(data)
    for resource, ids in _devices(message.get(2, ())).items():
        yield Holding(namespace, pod, _text(message, 1), resource, ids)


def _devices(entries: Iterable[int | bytes]) -> dict[str, tuple[str, ...]]:
    """ContainerDevices: resource_name = 1, device_ids = 2; topology = 3 is nothing that anybody here asks."""
    found: dict[str, list[str]] = {}
    for entry in entries:
        message = _grouped(_bytes(entry))
        ids = found.setdefault(_text(message, 1), [])
        ids += [_bytes(item).decode("utf-8", "replace") for item in message.get(2, ())]
    return {resource: tuple(ids) for resource, ids in found.items()}


def _grouped(data: bytes) -> Mapping[int, list[int | bytes]]:
    """The values of each field, in order."""
    found: dict[int, list[int | bytes]] = {}
    for number, value in fields(data):
        found.setdefault(number, []).append(value)
    return found


def _text(message: Mapping[int, list[int | bytes]], number: int) -> str:
    """The last value of a field, as protobuf takes it."""
    return _bytes(message[number][-1]).decode("utf-8", "replace") if number in message else ""


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise TypeError("a number where a message belongs")
    return value
