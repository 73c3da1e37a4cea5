"""The kubelet's ends of the registrations, and what their streams have said."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from threading import Condition, Thread
from typing import Any

import grpc

from gpunode.plugin.kubelet import rpc
from gpunode.plugin.proto import deviceplugin_pb2 as pb

DIAL_SECONDS = 10.0


class Endpoint:
    """One registration."""

    def __init__(self, resource: str, path: Path) -> None:
        """Dial a plugin and ask for its options. `ConnectionError` if it can't be reached."""
        self.resource = resource
        self.stopped = False
        self.stream: Any = None
        self.channel = rpc.channel(path)
        try:
            grpc.channel_ready_future(self.channel).result(DIAL_SECONDS)
            options = self.call("GetDevicePluginOptions")(pb.Empty(), timeout=DIAL_SECONDS)
        except (grpc.FutureTimeoutError, grpc.RpcError) as error:
            self.channel.close()
            raise ConnectionError(f"can't reach the plugin on {path}: {error!r}") from error
        self.prefers = options.get_preferred_allocation_available

    def call(self, name: str) -> Any:
        return rpc.method(self.channel, rpc.DEVICE_PLUGIN, name)


class Endpoints:
    """By resource name. `changed` is notified of everything; `listed` is called after every list."""

    def __init__(self, changed: Condition, listed: Callable[[], None]) -> None:
        self._changed = changed
        self._listed = listed
        self._endpoints: dict[str, Endpoint] = {}
        self._devices: dict[str, dict[str, pb.Device]] = {}
        self._stopped_at: dict[str, float] = {}
        self.grace_seconds = 300.0  # endpointStopGracePeriod

    def connect(self, endpoint: Endpoint, watch: bool) -> None:
        """Take it in the place of whoever had the resource's name."""
        with self._changed:
            self._endpoints[endpoint.resource] = endpoint
            self._stopped_at.pop(endpoint.resource, None)
            self._changed.notify_all()
        if watch:
            name = "list-and-watch"
            Thread(target=self._list_and_watch, args=(endpoint,), name=name, daemon=True).start()

    def find(self, resource: str) -> Endpoint | None:
        with self._changed:
            return self._endpoints.get(resource)

    def disconnect(self, resource: str) -> None:
        """Whatever is found under the name; its devices stay known, and none of them is healthy."""
        with self._changed:
            endpoint = self._endpoints.pop(resource, None)
            if endpoint is None:
                return
            endpoint.stopped = True
            self._stopped_at[resource] = time.monotonic()
            self._changed.notify_all()
        if endpoint.stream is not None:
            endpoint.stream.cancel()
        # gRPC takes up to a fifth of a second for it
        Thread(target=endpoint.channel.close, name="hang-up", daemon=True).start()

    def close(self) -> None:
        with self._changed:
            resources = list(self._endpoints)
        for resource in resources:
            self.disconnect(resource)

    def forget(self) -> None:
        with self._changed:
            self._devices.clear()
            self._changed.notify_all()

    def devices(self, resource: str) -> dict[str, pb.Device]:
        """All of them, healthy or not; none once the resource was without an endpoint for too long."""
        with self._changed:
            stopped = self._stopped_at.get(resource)
            if stopped is not None and time.monotonic() - stopped > self.grace_seconds:
                self._devices.pop(resource, None)
            return self._devices.get(resource, {})

    def healthy(self, resource: str) -> set[str]:
        """Ids that could be handed out."""
        with self._changed:
            if resource not in self._endpoints:
                return set()
            return {key for key, device in self.devices(resource).items() if device.health == "Healthy"}

    def resources(self) -> tuple[str, ...]:
        with self._changed:
            return tuple(self._devices)

    def _list_and_watch(self, endpoint: Endpoint) -> None:
        try:
            endpoint.stream = endpoint.call("ListAndWatch")(pb.Empty())
            for response in endpoint.stream:
                with self._changed:
                    if not endpoint.stopped:
                        self._devices[endpoint.resource] = {item.ID: item for item in response.devices}
                    self._changed.notify_all()
                self._listed()
        except (grpc.RpcError, ValueError):  # the plugin is gone, or the channel was closed under the call
            pass
        finally:
            if not endpoint.stopped:
                self.disconnect(endpoint.resource)
