"""The kubelet's clients of device plugins, and the devices that they reported.

As in Kubernetes 1.36 (pkg/kubelet/cm/devicemanager): one endpoint per resource name, the last one registered,
is allocated from, but every client goes on reading its stream, and each list replaces the resource's devices.
When a stream ends, the oldest client with the same name and socket is disconnected, which marks all of the
resource's devices unhealthy and its endpoint stopped, whichever plugin they came from.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from threading import Condition, Thread
from typing import Any

import grpc

from gpunode.plugin.kubelet import rpc
from gpunode.plugin.proto import deviceplugin_pb2 as pb


class Endpoint:
    """One registration."""

    def __init__(self, resource: str, path: Path, dial_seconds: float) -> None:
        """Dial a plugin and ask for its options. `ConnectionError` if it can't be reached."""
        self.resource = resource
        self.path = path
        self.stopped_at: float | None = None
        self.stream: Any = None
        self.channel = rpc.channel(path)
        try:
            grpc.channel_ready_future(self.channel).result(dial_seconds)
            options = self.call("GetDevicePluginOptions")(pb.Empty(), timeout=dial_seconds)
        except (grpc.FutureTimeoutError, grpc.RpcError) as error:
            self.channel.close()
            raise ConnectionError(f"can't reach the plugin on {path}: {error!r}") from error
        self.prefers = options.get_preferred_allocation_available

    def call(self, name: str) -> Any:
        return rpc.method(self.channel, rpc.DEVICE_PLUGIN, name)

    def close(self) -> None:
        if self.stream is not None:
            self.stream.cancel()
        # gRPC takes up to a fifth of a second for it
        Thread(target=self.channel.close, name="hang-up", daemon=True).start()


class Endpoints:
    """By resource name. `changed` is notified of everything; `listed` is called after every list."""

    def __init__(self, changed: Condition, listed: Callable[[], None]) -> None:
        self._changed = changed
        self._listed = listed
        self._endpoints: dict[str, Endpoint] = {}
        self._clients: dict[str, list[Endpoint]] = {}
        self._devices: dict[str, dict[str, pb.Device]] = {}
        self.grace_seconds = 300.0  # endpointStopGracePeriod

    def connect(self, endpoint: Endpoint, watch: bool) -> None:
        """Allocate from it instead of the previous endpoint of this resource."""
        with self._changed:
            self._endpoints[endpoint.resource] = endpoint
            self._clients.setdefault(endpoint.resource, []).append(endpoint)
            self._changed.notify_all()
        if watch:
            name = "list-and-watch"
            Thread(target=self._list_and_watch, args=(endpoint,), name=name, daemon=True).start()

    def find(self, resource: str) -> Endpoint | None:
        """The endpoint to allocate from; None if it is stopped."""
        with self._changed:
            endpoint = self._endpoints.get(resource)
            return None if endpoint is None or endpoint.stopped_at is not None else endpoint

    def disconnect(self, resource: str, path: Path | None = None) -> None:
        """Close the oldest client with this socket (without one: the last client); its devices stay known."""
        with self._changed:
            clients = self._clients.get(resource, [])
            client = next((one for one in clients if path == one.path), clients[-1] if not path else None)
            if client is None:
                return
            clients.remove(client)
            self._endpoints[resource].stopped_at = time.monotonic()
            for device in self._devices.get(resource, {}).values():
                device.health = "Unhealthy"
            self._changed.notify_all()
        client.close()

    def close(self) -> None:
        with self._changed:
            clients = [client for clients in self._clients.values() for client in clients]
            self._clients.clear()
            self._endpoints.clear()
            self._changed.notify_all()
        for client in clients:
            client.close()

    def forget(self) -> None:
        with self._changed:
            self._devices.clear()
            self._changed.notify_all()

    def devices(self, resource: str) -> dict[str, pb.Device]:
        """All of them, healthy or not; none once the resource was without an endpoint for too long."""
        with self._changed:
            endpoint = self._endpoints.get(resource)
            stopped = endpoint.stopped_at if endpoint is not None else None
            if stopped is not None and time.monotonic() - stopped > self.grace_seconds:
                self._devices.pop(resource, None)
            return self._devices.get(resource, {})

    def healthy(self, resource: str) -> set[str]:
        """Ids that the node counts as allocatable."""
        with self._changed:
            return {key for key, device in self.devices(resource).items() if device.health == "Healthy"}

    def resources(self) -> tuple[str, ...]:
        with self._changed:
            return tuple(self._devices)

    def _list_and_watch(self, endpoint: Endpoint) -> None:
        try:
            endpoint.stream = endpoint.call("ListAndWatch")(pb.Empty())
            for response in endpoint.stream:
                with self._changed:
                    if endpoint in self._clients.get(endpoint.resource, ()):
                        self._devices[endpoint.resource] = {item.ID: item for item in response.devices}
                    self._changed.notify_all()
                self._listed()
        except (grpc.RpcError, ValueError):  # the plugin is gone, or the channel was closed under the call
            pass
        finally:
            if endpoint in self._clients.get(endpoint.resource, ()):
                self.disconnect(endpoint.resource, endpoint.path)
