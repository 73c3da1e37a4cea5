"""A stand-in for the kubelet's device manager over a real unix socket, for the demo and the tests.

It is a stand-in because Debian has no kubelet package, and a real one needs a cluster's credentials and a
container runtime. It behaves as the real one (Kubernetes 1.36) was seen to, where a plugin can tell:

- at start it deletes every socket in its directory, then makes kubelet.sock;
- Register checks version and name, and dials the plugin back and asks for its options *before it answers*;
- then it opens ListAndWatch. Allocatable counts healthy devices, capacity all of them; when the stream ends
  capacity stays and allocatable is 0;
- when a stream ends it disconnects whatever is then registered under that resource's name, which need not be
  the plugin whose stream it was;
- for a container it asks for a preferred allocation where there is a choice, then allocates.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Condition, Thread
from typing import Any

import grpc

from gpunode.host import Host
from gpunode.plugin.kubelet import rpc
from gpunode.plugin.proto import deviceplugin_pb2 as pb
from gpunode.plugin.settings import resource_name_problem

_DIAL_SECONDS = 10.0


@dataclass(frozen=True)
class Registered:
    """One Register call that was accepted."""

    resource: str
    endpoint: str


@dataclass(frozen=True)
class Allocation:
    """What a container would get."""

    ids: tuple[str, ...]
    envs: Mapping[str, str]


class _Endpoint:
    """The kubelet's end of one registration."""

    def __init__(self, resource: str, channel: grpc.Channel, prefers: bool) -> None:
        self.resource = resource
        self.channel = channel
        self.prefers = prefers
        self.stopped = False

    def call(self, name: str) -> Any:
        return rpc.method(self.channel, rpc.DEVICE_PLUGIN, name)


class KubeletStub:
    """Start it in a directory. `refuse` is the reason every registration is refused for; with `watch` off the
    kubelet accepts a registration and never opens ListAndWatch.
    """

    def __init__(self, host: Host, directory: str = "/var/lib/kubelet/device-plugins") -> None:
        self._host = host
        self._directory = directory
        self.socket = f"{directory}/kubelet.sock"
        self.refuse = ""
        self.watch = True
        self.registrations: list[Registered] = []
        self.inodes: list[int] = []
        self._changed = Condition()
        self._endpoints: dict[str, _Endpoint] = {}
        self._devices: dict[str, dict[str, pb.Device]] = {}
        self._in_use: dict[str, set[str]] = {}
        self._watchers: list[Thread] = []
        self._server: grpc.Server | None = None

    # --- life ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Remember nothing, delete every socket of the directory and serve on kubelet.sock."""
        with self._changed:
            self._devices.clear()
            self._in_use.clear()
            self._changed.notify_all()
        self._host.make_dirs(self._directory, 0o750)
        for path in self._host.glob(self._directory, "*"):
            if self._host.path(path, follow=False).is_socket():
                self._host.remove(path)
        self._server = grpc.server(
            ThreadPoolExecutor(8, thread_name_prefix="kubelet"),
            handlers=[rpc.handlers(rpc.REGISTRATION, {"Register": self._register})],
        )
        before = os.umask(0o177)
        try:
            self._server.add_insecure_port(rpc.target(self._host.path(self.socket)))
        finally:
            os.umask(before)
        self._server.start()
        seen = self._host.stat(self.socket)
        self.inodes.append(seen.st_ino if seen is not None else 0)

    def stop(self) -> None:
        """Go away: every connection to a plugin ends, and so does kubelet.sock."""
        server, self._server = self._server, None
        if server is not None:
            server.stop(None).wait(2.0)
        with self._changed:
            endpoints = list(self._endpoints.values())
        for endpoint in endpoints:
            self._disconnect(endpoint)
        for thread in self._watchers:
            thread.join(2.0)
        self._watchers.clear()

    def restart(self) -> None:
        """As a kubelet does. `inodes` shows which inode numbers kubelet.sock has had; they may repeat."""
        self.stop()
        self.start()

    def tear_down(self, resource: str) -> None:
        """What the clean-up after an older stream does to the registration that it finds."""
        with self._changed:
            found = self._endpoints.get(resource)
        if found is not None:
            self._disconnect(found)

    # --- what a node shows -----------------------------------------------------------------------------

    def capacity(self, resource: str) -> int:
        """Devices known, healthy or not."""
        with self._changed:
            return len(self._devices.get(resource, {}))

    def allocatable(self, resource: str) -> int:
        """Healthy devices; 0 once the plugin's stream has ended."""
        return len(self._healthy(resource))

    def unhealthy(self, resource: str) -> tuple[str, ...]:
        """Ids that the node would not hand out, sorted."""
        with self._changed:
            known = set(self._devices.get(resource, {}))
        return tuple(sorted(known - self._healthy(resource)))

    def numa_nodes(self, resource: str) -> dict[str, int]:
        """The NUMA node of each device that has one."""
        with self._changed:
            devices = self._devices.get(resource, {})
            return {
                key: device.topology.nodes[0].ID for key, device in devices.items() if device.topology.nodes
            }

    def wait_allocatable(self, resource: str, count: int, timeout: float) -> bool:
        """Wait at most `timeout` seconds until exactly `count` devices are allocatable."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._healthy_now(resource)) == count, timeout)

    def allocate(self, resource: str, count: int, must_include: Sequence[str] = ()) -> Allocation:
        """Devices for one container. `ValueError`: too few are free. `grpc.RpcError`: the plugin refuses."""
        with self._changed:
            endpoint = self._endpoints.get(resource)
            free = self._healthy_now(resource) - self._in_use.get(resource, set())
        if endpoint is None or len(free) < count:
            raise ValueError(f"{len(free)} of {count} {resource} available")
        chosen = sorted(free)[:count]
        if endpoint.prefers and count < len(free):
            chosen = _topped_up(self._ask_preferred(endpoint, free, must_include, count), free, count)
        request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=chosen)])
        response = endpoint.call("Allocate")(request, timeout=5.0)
        with self._changed:
            self._in_use.setdefault(resource, set()).update(chosen)
        return Allocation(tuple(chosen), dict(response.container_responses[0].envs))

    def release(self, resource: str, ids: Sequence[str]) -> None:
        """The container is gone."""
        with self._changed:
            self._in_use.get(resource, set()).difference_update(ids)

    # --- the protocol ----------------------------------------------------------------------------------

    def _register(self, request: pb.RegisterRequest, context: grpc.ServicerContext) -> pb.Empty:
        problem = self.refuse or resource_name_problem(request.resource_name)
        if request.version != rpc.VERSION:
            problem = problem or f"version {request.version!r} is not supported, only {rpc.VERSION}"
        if problem:
            context.abort(grpc.StatusCode.UNKNOWN, problem)
        path = self._host.path(f"{self._directory}/{request.endpoint}")
        channel = rpc.channel(path)
        try:
            grpc.channel_ready_future(channel).result(_DIAL_SECONDS)
            ask = rpc.method(channel, rpc.DEVICE_PLUGIN, "GetDevicePluginOptions")
            options = ask(pb.Empty(), timeout=_DIAL_SECONDS)
        except (grpc.FutureTimeoutError, grpc.RpcError) as error:
            channel.close()
            context.abort(grpc.StatusCode.UNKNOWN, f"can't reach the plugin on {path}: {error!r}")
        self._connected(
            request, _Endpoint(request.resource_name, channel, options.get_preferred_allocation_available)
        )
        return pb.Empty()

    def _connected(self, request: pb.RegisterRequest, endpoint: _Endpoint) -> None:
        with self._changed:
            self._endpoints[endpoint.resource] = endpoint
            self.registrations.append(Registered(request.resource_name, request.endpoint))
            self._changed.notify_all()
        if self.watch:
            thread = Thread(target=self._list_and_watch, args=(endpoint,), name="list-and-watch", daemon=True)
            self._watchers.append(thread)
            thread.start()

    def _list_and_watch(self, endpoint: _Endpoint) -> None:
        try:
            for response in endpoint.call("ListAndWatch")(pb.Empty()):
                with self._changed:
                    if not endpoint.stopped:
                        self._devices[endpoint.resource] = {item.ID: item for item in response.devices}
                    self._changed.notify_all()
        except (grpc.RpcError, ValueError):  # the plugin is gone, or the channel was closed under the call
            pass
        finally:
            with self._changed:
                found = self._endpoints.get(endpoint.resource)
            if found is not None:
                self._disconnect(found)

    def _disconnect(self, endpoint: _Endpoint) -> None:
        with self._changed:
            endpoint.stopped = True
            if self._endpoints.get(endpoint.resource) is endpoint:
                del self._endpoints[endpoint.resource]
            self._changed.notify_all()
        endpoint.channel.close()

    def _ask_preferred(
        self, endpoint: _Endpoint, free: set[str], must_include: Sequence[str], count: int
    ) -> list[str]:
        asked = pb.ContainerPreferredAllocationRequest(
            available_deviceIDs=sorted(free), must_include_deviceIDs=must_include, allocation_size=count
        )
        request = pb.PreferredAllocationRequest(container_requests=[asked])
        response = endpoint.call("GetPreferredAllocation")(request, timeout=5.0)
        return list(response.container_responses[0].deviceIDs)

    def _healthy(self, resource: str) -> set[str]:
        with self._changed:
            return self._healthy_now(resource)

    def _healthy_now(self, resource: str) -> set[str]:
        if resource not in self._endpoints:
            return set()
        devices = self._devices.get(resource, {})
        return {key for key, device in devices.items() if device.health == "Healthy"}


def _topped_up(hint: Sequence[str], free: set[str], count: int) -> list[str]:
    """The plugin's answer is a hint: what is not free is dropped, what is lacking is added."""
    chosen = [item for item in hint if item in free][:count]
    return chosen + sorted(free - set(chosen))[: count - len(chosen)]
