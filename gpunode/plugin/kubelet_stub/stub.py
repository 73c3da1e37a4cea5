"""The stand-in as a whole: its life, what a node shows, admitting pods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count as counter
from pathlib import Path
from threading import Condition

import grpc

from gpunode.dataclass import dataclass
from gpunode.host import Host
from gpunode.plugin.kubelet import rpc
from gpunode.plugin.kubelet.server import listen_privately
from gpunode.plugin.kubelet_stub import checkpoint
from gpunode.plugin.kubelet_stub.allocations import AdmissionError, Allocation, Held, merged, topped_up
from gpunode.plugin.kubelet_stub.endpoints import Endpoint, Endpoints
from gpunode.plugin.kubelet_stub.plugin_watcher import PluginWatcher, Times
from gpunode.plugin.kubelet_stub.pod_resources import PodResources
from gpunode.plugin.proto import deviceplugin_pb2 as pb
from gpunode.plugin.settings import resource_name_problem


@dataclass(frozen=True)
class Registered:
    """One registration that was accepted; `endpoint` is a path where the plugin watcher found it."""

    resource: str
    endpoint: str


class KubeletStub:
    """Start it in a directory. `refuse` is the reason every registration is refused for; with `watch` off the
    kubelet accepts a registration and never opens ListAndWatch. `times` shortens the kubelet's waits.
    """

    def __init__(
        self, host: Host, directory: str = "/var/lib/kubelet/device-plugins", times: Times | None = None
    ) -> None:
        self._host = host
        self._directory = directory
        root = directory.rpartition("/")[0]
        self.socket = f"{directory}/kubelet.sock"
        self.pod_resources_socket = f"{root}/pod-resources/kubelet.sock"
        self.refuse = ""
        self.watch = True
        self.registrations: list[Registered] = []
        self.inodes: list[int] = []
        self._changed = Condition()
        self._held: list[Held] = []
        self._pods = counter(1)
        self.endpoints = Endpoints(self._changed, self._save)
        self._times = times or Times()
        self.watcher = PluginWatcher(
            host, f"{root}/plugins_registry", self._found, self.endpoints.disconnect, self._times
        )
        self._servers: list[grpc.Server] = []

    # --- life ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Remember only the checkpoint, delete every socket of the directory and serve on kubelet.sock."""
        self.endpoints.forget()
        self._host.make_dirs(self._directory, 0o750)
        for path in self._host.glob(self._directory, "*"):
            if self._host.path(path, follow=False).is_socket():
                self._host.remove(path)
        with self._changed:
            self._held = checkpoint.read(self._host, self._directory)
        self._listen(self.socket, rpc.handlers(rpc.REGISTRATION, {"Register": self._register}))
        seen = self._host.stat(self.socket)
        self.inodes.append(seen.st_ino if seen is not None else 0)
        self._host.make_dirs(self.pod_resources_socket.rpartition("/")[0], 0o750)
        self._host.remove(self.pod_resources_socket)
        self._listen(self.pod_resources_socket, PodResources(self.held, self._to_be_had).handler)
        self.watcher.start()

    def stop(self) -> None:
        """Go away: every connection to a plugin ends, and so does kubelet.sock."""
        self._save()
        self.watcher.stop()
        servers, self._servers = self._servers, []
        for server in servers:
            server.stop(None).wait(2.0)
        self.endpoints.close()

    def restart(self) -> None:
        """As a kubelet does. `inodes` shows which inode numbers kubelet.sock has had; they may repeat."""
        self.stop()
        self.start()

    def tear_down(self, resource: str) -> None:
        """What the cleanup after an older stream does to the registration that it meets (before 1.34)."""
        self.endpoints.disconnect(resource)

    # --- what a node shows -----------------------------------------------------------------------------

    def capacity(self, resource: str) -> int:
        """Devices known, healthy or not."""
        return len(self.endpoints.devices(resource))

    def allocatable(self, resource: str) -> int:
        """Healthy devices; 0 once a plugin's stream has ended."""
        return len(self.endpoints.healthy(resource))

    def unhealthy(self, resource: str) -> tuple[str, ...]:
        """Ids that the node would not hand out, sorted."""
        with self._changed:
            return tuple(sorted(set(self.endpoints.devices(resource)) - self.endpoints.healthy(resource)))

    def numa_nodes(self, resource: str) -> dict[str, int]:
        """The NUMA node of each device that has one."""
        devices = self.endpoints.devices(resource)
        return {key: device.topology.nodes[0].ID for key, device in devices.items() if device.topology.nodes}

    def wait_allocatable(self, resource: str, count: int, timeout: float) -> bool:
        """Wait at most `timeout` seconds until exactly `count` devices are allocatable."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self.endpoints.healthy(resource)) == count, timeout)

    def held(self) -> list[Held]:
        """What containers hold, in the order in which they got it."""
        with self._changed:
            return list(self._held)

    # --- pods ------------------------------------------------------------------------------------------

    def allocate(self, resource: str, count: int, must_include: Sequence[str] = ()) -> Allocation:
        """Devices for one container. `AdmissionError`: too few are free. `grpc.RpcError`: the plugin refuses.

        Not thread-safe, as the kubelet's admission isn't: one pod after the other.
        """
        held = self._allocate(f"default/pod-{next(self._pods)}", "main", resource, count, must_include)
        return merged([held])

    def release(self, resource: str, ids: Sequence[str]) -> None:
        """The pods that hold any of these are gone; written when something else is, as the real one does."""
        gone = set(ids)
        with self._changed:
            self._held = [
                one for one in self._held if one.resource != resource or not gone.intersection(one.ids)
            ]

    def admit(self, pod: str, container: str, requests: Mapping[str, int]) -> Allocation:
        """A container with several resources. One that was admitted before gets what it had, unasked.

        `AdmissionError` as the pod's event would have it: too few devices, a plugin's error, or a device from
        before that has become unhealthy.
        """
        before = [one for one in self.held() if (one.pod, one.container) == (pod, container)]
        if before:
            self._check_again(before)
            return merged(before)
        try:
            parts = [self._allocate(pod, container, name, count, ()) for name, count in requests.items()]
        except grpc.RpcError as error:
            raise AdmissionError(f"Allocate failed due to {error.details()}, which is unexpected") from error
        return merged(parts)

    def remove(self, pod: str) -> None:
        """The pod has ended."""
        with self._changed:
            self._held = [one for one in self._held if one.pod != pod]
        self._save()

    def _check_again(self, before: Sequence[Held]) -> None:
        for one in before:
            if not set(one.ids) <= self.endpoints.healthy(one.resource):
                raise AdmissionError(
                    f"previously allocated devices are no longer healthy; cannot allocate unhealthy devices"
                    f" {one.resource}"
                )

    def _allocate(
        self, pod: str, container: str, resource: str, count: int, must_include: Sequence[str]
    ) -> Held:
        endpoint = self.endpoints.find(resource)
        taken = {device for one in self.held() if one.resource == resource for device in one.ids}
        free = self.endpoints.healthy(resource) - taken
        if endpoint is None or len(free) < count:
            raise AdmissionError(f"{len(free)} of {count} {resource} available")
        chosen = sorted(free)[:count]
        if endpoint.prefers and count < len(free):
            chosen = topped_up(self._ask_preferred(endpoint, free, must_include, count), free, count)
        request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=chosen)])
        response = endpoint.call("Allocate")(request, timeout=5.0)
        if not response.container_responses:
            raise AdmissionError(f"no containers return in allocation response for {resource}")
        answer = response.container_responses[0].SerializeToString()  # the kubelet reads no other
        held = Held(pod, container, resource, tuple(chosen), answer)
        with self._changed:
            self._held.append(held)
        self._save()
        return held

    def _ask_preferred(
        self, endpoint: Endpoint, free: set[str], must_include: Sequence[str], count: int
    ) -> list[str]:
        asked = pb.ContainerPreferredAllocationRequest(
            available_deviceIDs=sorted(free), must_include_deviceIDs=must_include, allocation_size=count
        )
        request = pb.PreferredAllocationRequest(container_requests=[asked])
        response = endpoint.call("GetPreferredAllocation")(request, timeout=5.0)
        return list(response.container_responses[0].deviceIDs)

    # --- the protocol ----------------------------------------------------------------------------------

    def _listen(self, socket: str, handler: grpc.GenericRpcHandler) -> None:
        server = grpc.server(ThreadPoolExecutor(8, thread_name_prefix="kubelet"), handlers=[handler])
        address = rpc.target(self._host.path(socket))
        listen_privately(self._host, socket, lambda: server.add_insecure_port(address))
        server.start()
        self._servers.append(server)

    def _register(self, request: pb.RegisterRequest, context: grpc.ServicerContext) -> pb.Empty:
        if request.version != rpc.VERSION:
            raise rpc.Refused("UNKNOWN", f"version {request.version!r} is not supported, only {rpc.VERSION}")
        path = self._host.path(f"{self._directory}/{request.endpoint}")
        try:
            self._connect(request.resource_name, path, request.endpoint)
        except (ConnectionError, ValueError) as error:
            raise rpc.Refused("UNKNOWN", str(error)) from error
        return pb.Empty()

    def _found(self, resource: str, path: Path) -> None:
        self._connect(resource, path, str(path))

    def _connect(self, resource: str, path: Path, endpoint: str) -> None:
        problem = self.refuse or resource_name_problem(resource)
        if problem:
            raise ValueError(problem)
        dialled = Endpoint(resource, path, self._times.dial)
        with self._changed:  # nobody sees its devices before its registration
            self.endpoints.connect(dialled, self.watch)
            self.registrations.append(Registered(resource, endpoint))
            self._changed.notify_all()

    def _save(self) -> None:
        with self._changed:
            names = self.endpoints.resources()
            healthy = {name: self.endpoints.healthy(name) for name in names}
            numa = {name: self.numa_nodes(name) for name in names}
            if self._host.is_dir(self._directory):
                checkpoint.write(self._host, self._directory, self._held, healthy, numa)

    def _to_be_had(self) -> list[tuple[str, str, int | None]]:
        with self._changed:
            return [
                (name, device, self.numa_nodes(name).get(device))
                for name in self.endpoints.resources()
                for device in sorted(self.endpoints.healthy(name))
            ]
