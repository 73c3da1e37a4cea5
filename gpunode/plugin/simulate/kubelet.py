"""A stand-in for the kubelet in the demo: it accepts registrations and counts each resource's devices."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Condition, Thread

import grpc

from gpunode.daemons.grpc_client import channel_to
from gpunode.host import Host
from gpunode.plugin.kubelet import server
from gpunode.plugin.kubelet.link import listen_privately
from gpunode.plugin.proto import deviceplugin_pb2 as pb

_DIAL_SECONDS = 10.0  # the kubelet's own limit


class DemoKubelet:
    """Serves on kubelet.sock in a directory. As the kubelet does, it queries a plugin's options before it
    answers the registration, and opens ListAndWatch after that."""

    def __init__(self, host: Host, directory: str) -> None:
        self._host = host
        self._directory = directory
        self._changed = Condition()
        self._devices: dict[str, list[bool]] = {}  # by resource: whether each device is healthy
        handler = server.handlers(server.REGISTRATION, {"Register": self._register})
        self._server = grpc.server(ThreadPoolExecutor(thread_name_prefix="kubelet"), handlers=[handler])

    def start(self) -> None:
        self._host.make_dirs(self._directory, 0o750)
        socket = f"{self._directory}/kubelet.sock"
        address = server.target(self._host.path(socket))
        listen_privately(self._host, socket, lambda: self._server.add_insecure_port(address))
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait(2.0)

    def capacity(self, resource: str) -> int:
        """Devices in the plugin's last list, healthy or not."""
        with self._changed:
            return len(self._devices.get(resource, ()))

    def allocatable(self, resource: str) -> int:
        """Healthy devices in the plugin's last list."""
        with self._changed:
            return sum(self._devices.get(resource, ()))

    def wait_allocatable(self, resource: str, count: int, timeout: float) -> bool:
        """Wait at most `timeout` seconds until exactly `count` devices are allocatable."""
        with self._changed:
            return self._changed.wait_for(lambda: sum(self._devices.get(resource, ())) == count, timeout)

    def _register(self, request: pb.RegisterRequest, context: grpc.ServicerContext) -> pb.Empty:
        channel = channel_to(self._host.path(f"{self._directory}/{request.endpoint}"))
        try:
            query = server.method(channel, server.DEVICE_PLUGIN, "GetDevicePluginOptions")
            query(pb.Empty(), timeout=_DIAL_SECONDS, wait_for_ready=True)
        except grpc.RpcError as error:
            channel.close()
            raise server.RefusedRequest("UNKNOWN", f"can't reach the plugin: {error!r}") from error
        arguments = (channel, request.resource_name)
        Thread(target=self._list_and_watch, args=arguments, name="list-and-watch", daemon=True).start()
        return pb.Empty()

    def _list_and_watch(self, channel: grpc.Channel, resource: str) -> None:
        with channel, suppress(grpc.RpcError):  # the plugin has ended
            for response in server.method(channel, server.DEVICE_PLUGIN, "ListAndWatch")(pb.Empty()):
                with self._changed:
                    self._devices[resource] = [device.health == "Healthy" for device in response.devices]
                    self._changed.notify_all()
