"""The client of the device plugins' benchmark: a kubelet that registers a plugin and times its responses."""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Condition, Thread
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # a plugin that disconnects is ignored

import grpc

from gpunode.daemons.grpc_client import channel_to
from gpunode.plugin.kubelet import server
from gpunode.plugin.proto import deviceplugin_pb2 as pb

CALL_SECONDS = 30.0


@dataclass
class _Seen:
    """A response of the plugin, and when it came (monotonic seconds)."""

    registered: float = 0.0
    listed: float = 0.0
    endpoint: str = ""
    resource: str = ""
    devices: dict[str, str] = field(default_factory=dict)
    unhealthy: dict[str, float] = field(default_factory=dict)


class Kubelet:
    """Serves Registration in `directory`, dials the plugin back and watches its devices."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.socket = directory / "kubelet.sock"
        self.seen = _Seen()
        self._changed = Condition()
        self._channel: grpc.Channel | None = None
        self._watcher: Thread | None = None
        self._server = grpc.server(
            ThreadPoolExecutor(2),
            handlers=[server.handlers(server.REGISTRATION, {"Register": self._register})],
        )
        self._server.add_insecure_port(server.target(self.socket))
        self._server.start()

    def _register(self, request: pb.RegisterRequest, context: grpc.ServicerContext) -> pb.Empty:
        now = time.monotonic()
        if self._watcher is not None:
            return pb.Empty()  # a second resource, or once more: the first is measured
        self._channel = channel_to(self.directory / request.endpoint)
        grpc.channel_ready_future(self._channel).result(10.0)
        self.call("GetDevicePluginOptions", pb.Empty())
        self.seen.endpoint, self.seen.resource, self.seen.registered = (
            *(request.endpoint, request.resource_name),
            now,
        )
        self._watcher = Thread(target=self._watch, name="watch", daemon=True)
        self._watcher.start()
        return pb.Empty()

    def _watch(self) -> None:
        assert self._channel is not None
        try:
            for response in server.method(self._channel, server.DEVICE_PLUGIN, "ListAndWatch")(pb.Empty()):
                now = time.monotonic()
                with self._changed:
                    self.seen.listed = self.seen.listed or now
                    self.seen.devices = {device.ID: device.health for device in response.devices}
                    for device_id, health in self.seen.devices.items():
                        if health != "Healthy":
                            self.seen.unhealthy.setdefault(device_id, now)
                    self._changed.notify_all()
        except (grpc.RpcError, ValueError):  # the plugin has gone, or `close` was called
            pass

    def wait_listed(self, count: int, seconds: float) -> bool:
        """Wait until that many healthy devices are listed."""
        return self._wait(
            lambda: sum(health == "Healthy" for health in self.seen.devices.values()) >= count, seconds
        )

    def wait_unhealthy(self, device: str, seconds: float) -> float | None:
        """When the stream said so, None if it doesn't in time."""
        is_seen = self._wait(
            lambda: any(device_id.startswith(device) for device_id in self.seen.unhealthy), seconds
        )
        return (
            min(at for device_id, at in self.seen.unhealthy.items() if device_id.startswith(device))
            if is_seen
            else None
        )

    def _wait(self, ready: Callable[[], bool], seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(ready, seconds)

    # --- timed calls -----------------------------------------------------------------------------------

    def call(self, name: str, request: Any) -> Any:
        assert self._channel is not None
        return server.method(self._channel, server.DEVICE_PLUGIN, name)(request, timeout=CALL_SECONDS)

    def timed(self, name: str, request: Any) -> tuple[float, Any]:
        """Seconds, and the response."""
        assert self._channel is not None
        method = server.method(self._channel, server.DEVICE_PLUGIN, name)
        start = time.perf_counter()
        answer = method(request, timeout=CALL_SECONDS)
        return time.perf_counter() - start, answer

    def empty(self) -> float:
        """Seconds of an RPC that does nothing."""
        return self.timed("GetDevicePluginOptions", pb.Empty())[0]

    def allocate(self, ids: Sequence[str]) -> float:
        container_request = pb.ContainerAllocateRequest(devices_ids=ids)
        seconds, answer = self.timed("Allocate", pb.AllocateRequest(container_requests=[container_request]))
        if len(answer.container_responses) != 1:
            raise SystemExit(f"Allocate of {ids} answered {answer}")
        return seconds

    def prefer(self, available: Sequence[str], must: Sequence[str], size: int) -> float:
        """A wrong response ends the run: then nothing was measured."""
        container_request = pb.ContainerPreferredAllocationRequest(
            available_deviceIDs=available, must_include_deviceIDs=must, allocation_size=size
        )
        request = pb.PreferredAllocationRequest(container_requests=[container_request])
        seconds, answer = self.timed("GetPreferredAllocation", request)
        preferred = set(answer.container_responses[0].deviceIDs)
        if len(preferred) != size or not set(must) <= preferred <= set(available):
            raise SystemExit(f"GetPreferredAllocation of {size} out of {len(available)} answered {preferred}")
        return seconds

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        if self._watcher is not None:
            self._watcher.join(2.0)
        self._server.stop(None).wait(2.0)
        if self.socket.exists():
            os.unlink(self.socket)
