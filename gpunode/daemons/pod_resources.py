"""Devices held by each container, and allocatable devices: the kubelet's PodResources service, v1."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from gpunode.daemons.grpc_client import (
    MALFORMED,
    CallError,
    open_channel,
    recalled,
    recalled_list,
    unary_call,
)
from gpunode.errors import DaemonError
from gpunode.host import Host

if TYPE_CHECKING:
    import grpc

    from gpunode.daemons.proto import podresources_pb2 as pb

_Answer = TypeVar("_Answer")
_SERVICE = "/v1.PodResourcesLister"
_RUN_AS_ROOT = "run as root, for example with sudo"
_HINTS = {
    "denied": _RUN_AS_ROOT,
    "absent": "check that the kubelet is running; if it uses another directory, pass --pod-resources-socket",
    "refused": "the kubelet isn't running: systemctl status kubelet",
}


class Holding(NamedTuple):
    """What one container holds of one resource. `pod` is empty and `pod_uid` set where only that is known."""

    namespace: str = ""
    pod: str = ""
    container: str = ""
    resource: str = ""
    ids: tuple[str, ...] = ()
    pod_uid: str = ""


def list_pods(host: Host, socket: str, timeout: float = 2.0) -> tuple[Holding, ...]:
    """What the containers of this node hold, in the kubelet's order.

    `DaemonError` says why it is unknown: no socket, no permission, no listener, no answer in time.
    """
    if not host.live:
        return recalled_list(host, socket, "pods", Holding)
    holdings = _query(host, socket, "List", _list_pods, timeout)
    host.heard("daemons", socket, {"pods": [_as_recorded(holding) for holding in holdings]})
    return holdings


def allocatable(host: Host, socket: str, timeout: float = 2.0) -> dict[str, tuple[str, ...]]:
    """The healthy devices that the kubelet knows, held or not, by resource.

    `DaemonError` as for `list_pods`; its code is ``unsupported`` for a kubelet older than 1.23 (or with the
    feature gate KubeletPodResourcesGetAllocatable off).
    """
    if not host.live:
        return {name: tuple(ids) for name, ids in recalled(host, socket, "allocatable", dict).items()}
    devices = _query(host, socket, "GetAllocatableResources", query_allocatable, timeout)
    host.heard("daemons", socket, {"allocatable": {name: list(ids) for name, ids in devices.items()}})
    return devices


def query_allocatable(channel: grpc.Channel, timeout: float) -> dict[str, tuple[str, ...]]:
    """`allocatable` on an open channel. `CallError` for every failure."""
    from gpunode.daemons.proto import podresources_pb2 as pb

    method, request = f"{_SERVICE}/GetAllocatableResources", pb.AllocatableResourcesRequest()
    answer = unary_call(channel, method, request, pb.AllocatableResourcesResponse, timeout)
    return _by_resource(answer.devices)


def _list_pods(channel: grpc.Channel, timeout: float) -> tuple[Holding, ...]:
    from gpunode.daemons.proto import podresources_pb2 as pb

    request = pb.ListPodResourcesRequest()
    answer = unary_call(channel, f"{_SERVICE}/List", request, pb.ListPodResourcesResponse, timeout)
    return tuple(holdings_of(answer))


def _as_recorded(holding: Holding) -> dict[str, Any]:
    recorded = holding._asdict()
    del recorded["pod_uid"]
    return {**recorded, "ids": list(holding.ids)}


def _query(
    host: Host, socket: str, method: str, query: Callable[[grpc.Channel, float], _Answer], timeout: float
) -> _Answer:
    state = host.socket_state(socket)
    if state != "listening":
        reasons = {
            "absent": "is not there",
            "denied": "can't be opened: permission denied",
            "refused": "has no process listening on it",
            "not-a-socket": "is not a socket",
        }
        reason = reasons.get(state, state)
        raise DaemonError(
            f"the kubelet's PodResources socket {socket} {reason}", hint=_HINTS.get(state, ""), code=state
        )
    try:
        with open_channel(host, socket) as channel:
            return query(channel, timeout)
    except CallError as error:
        raise _explain(error, socket, method, timeout) from error


def _explain(error: CallError, socket: str, method: str, timeout: float) -> DaemonError:
    details = " ".join(error.details.split())[:200]
    if error.code == "UNIMPLEMENTED" or "disabled" in details:
        return DaemonError(
            f"this kubelet doesn't offer {method}",
            hint="it came with Kubernetes 1.23" if method == "GetAllocatableResources" else "",
            code="unsupported",
        )
    if error.code == "DEADLINE_EXCEEDED":
        return DaemonError(
            f"the kubelet did not answer {method} within {timeout:g} s",
            hint="read its log: journalctl -u kubelet -n 50",
            code="timeout",
        )
    if error.code == MALFORMED:
        return DaemonError(f"{socket} returned an invalid PodResources message: {details}", code="protocol")
    return DaemonError(f"the kubelet refused {method}: {details} ({error.code})", code="refused")


def holdings_of(answer: pb.ListPodResourcesResponse) -> Iterable[Holding]:
    """What each container holds of each resource."""
    for pod in answer.pod_resources:
        for container in pod.containers:
            for resource, ids in _by_resource(container.devices).items():
                yield Holding(pod.namespace, pod.name, container.name, resource, ids)


def _by_resource(entries: Iterable[pb.ContainerDevices]) -> dict[str, tuple[str, ...]]:
    """A Go kubelet gives each device an entry of its own."""
    devices: dict[str, list[str]] = {}
    for entry in entries:
        devices.setdefault(entry.resource_name, []).extend(entry.device_ids)
    return {resource: tuple(ids) for resource, ids in devices.items()}
