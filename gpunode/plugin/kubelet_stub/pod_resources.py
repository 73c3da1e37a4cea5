"""The kubelet's PodResources service, v1."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import grpc

from gpunode.plugin.kubelet import rpc
from gpunode.plugin.kubelet_stub.allocations import Held
from gpunode.plugin.proto import podresources_pb2 as pb


class PodResources:
    """`held` tells what containers hold, `allocatable` (resource, id, NUMA node) of what could be held.

    A pod is called NAMESPACE/NAME; without a slash it is in the namespace default.
    """

    def __init__(
        self,
        held: Callable[[], Iterable[Held]],
        allocatable: Callable[[], Iterable[tuple[str, str, int | None]]],
    ) -> None:
        self._held = held
        self._allocatable = allocatable

    @property
    def handler(self) -> grpc.GenericRpcHandler:
        functions = {"List": self._list, "GetAllocatableResources": self._get_allocatable, "Get": self._get}
        return rpc.handlers(rpc.POD_RESOURCES, functions)

    def _list(self, request: Any, context: Any) -> pb.ListPodResourcesResponse:
        return pb.ListPodResourcesResponse(pod_resources=self._pods())

    def _get(self, request: pb.GetPodResourcesRequest, context: Any) -> pb.GetPodResourcesResponse:
        for pod in self._pods():
            if (pod.namespace, pod.name) == (request.pod_namespace, request.pod_name):
                return pb.GetPodResourcesResponse(pod_resources=pod)
        raise rpc.Refused(
            "NOT_FOUND", f"pod {request.pod_name} in namespace {request.pod_namespace} not found"
        )

    def _get_allocatable(self, request: Any, context: Any) -> pb.AllocatableResourcesResponse:
        response = pb.AllocatableResourcesResponse()
        for resource, device, numa in self._allocatable():
            entry = response.devices.add(resource_name=resource, device_ids=[device])
            if numa is not None:
                entry.topology.nodes.add(ID=numa)
        return response

    def _pods(self) -> list[pb.PodResources]:
        pods: dict[str, pb.PodResources] = {}
        for held in self._held():
            namespace, _, name = held.pod.rpartition("/")
            pod = pods.setdefault(held.pod, pb.PodResources(name=name, namespace=namespace or "default"))
            container = next((one for one in pod.containers if one.name == held.container), None)
            container = container or pod.containers.add(name=held.container)
            for device in held.ids:  # the real one, too, gives each device an entry of its own
                container.devices.add(resource_name=held.resource, device_ids=[device])
        return list(pods.values())
