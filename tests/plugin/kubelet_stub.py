"""A stand-in for the kubelet's device manager over real unix sockets.

It is a stand-in because Debian has no kubelet package, and a real one needs a cluster's credentials and a
container runtime. It behaves as the real one (Kubernetes 1.36) was observed to, as far as a plugin can see:

- at start it deletes every socket in its directory, then makes kubelet.sock; what it gave to containers it
  reads from its checkpoint;
- Register checks version and name, and dials the plugin back and asks for its options *before it answers*;
- then it opens ListAndWatch. Allocatable counts healthy devices, capacity all of them; when the stream ends
  capacity stays and allocatable is 0, and after five minutes the resource is dropped;
- the last plugin that registered a resource is allocated from; every plugin's list replaces the resource's
  devices, and the end of any one's stream marks them all unhealthy;
- for a container it asks for a preferred allocation where there is a choice (an error refuses the pod), then
  allocates, one resource and one container request at a time. It merges the answers, and gives a restarted
  container what it had without asking, unless a device has become unhealthy;
- sockets that appear in plugins_registry are asked what they are, and registered; one that is removed is
  deregistered. After a failed attempt on a path the next one waits, up to two minutes;
- PodResources (v1) reports which container has what, and lists every healthy device as allocatable.
"""

from __future__ import annotations

# nothing of tests/ is imported, because tests/machine/test_kubernetes.py copies this file alone into machines
import base64
import binascii
import json
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count as counter
from pathlib import Path
from threading import Condition, Event, Thread
from typing import Any, TypeVar

import grpc

from gpunode.daemons.grpc_client import channel_to
from gpunode.daemons.proto import podresources_pb2
from gpunode.facts.kubelet import NAME
from gpunode.host import Host
from gpunode.plugin.config.settings import resource_name_problem
from gpunode.plugin.kubelet import server
from gpunode.plugin.kubelet.link import listen_privately
from gpunode.plugin.kubelet.watcher import DEVICE_PLUGIN_TYPE, PLUGIN_REGISTRATION
from gpunode.plugin.proto import deviceplugin_pb2 as pb
from gpunode.plugin.proto import pluginregistration_pb2

_CALL_SECONDS = 30.0  # the kubelet has no limit; a busy machine must not be one

# What containers get: the answers of several resources merged, and remembered.

_Value = TypeVar("_Value")


class AdmissionError(ValueError):
    """The pod is refused; the message has the reason."""


@dataclass(frozen=True)
class Allocation:
    """What a container gets. Mounts are container path to (host path, read-only), devices container path to
    (host path, permissions). `conflicts` are values of a second resource that differ from the first one's.
    """

    ids: tuple[str, ...]
    envs: Mapping[str, str]
    mounts: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    devices: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    cdi: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Held:
    """What one container holds of one resource, with the plugin's answer as it came."""

    pod: str
    container: str
    resource: str
    ids: tuple[str, ...]
    response: bytes

    @property
    def answer(self) -> pb.ContainerAllocateResponse:
        return pb.ContainerAllocateResponse.FromString(self.response)


def merged(parts: Sequence[Held]) -> Allocation:
    """Environment by name, mounts and devices by container path, annotations by key, CDI devices by name: the
    first value counts, and a different one is a conflict that only the log would show."""
    envs: dict[str, str] = {}
    mounts: dict[str, tuple[str, bool]] = {}
    devices: dict[str, tuple[str, str]] = {}
    annotations: dict[str, str] = {}
    cdi: list[str] = []
    conflicts: list[str] = []
    for part in parts:
        answer = part.answer
        conflicts += _take(envs, dict(answer.envs))
        conflicts += _take(mounts, {m.container_path: (m.host_path, m.read_only) for m in answer.mounts})
        conflicts += _take(devices, {d.container_path: (d.host_path, d.permissions) for d in answer.devices})
        conflicts += _take(annotations, dict(answer.annotations))
        cdi += [item.name for item in answer.cdi_devices if item.name not in cdi]
    ids = tuple(device for part in parts for device in part.ids)
    return Allocation(ids, envs, mounts, devices, annotations, tuple(cdi), tuple(conflicts))


def _take(values: dict[str, _Value], more: Mapping[str, _Value]) -> list[str]:
    differing = [key for key, value in more.items() if values.get(key, value) != value]
    for key, value in more.items():
        values.setdefault(key, value)
    return differing


def topped_up(hint: Sequence[str], free: set[str], count: int) -> list[str]:
    """The plugin's answer is a hint: devices that aren't free are dropped, missing ones are added."""
    selected = [item for item in dict.fromkeys(hint) if item in free][:count]
    return selected + sorted(free - set(selected))[: count - len(selected)]


# The kubelet's file of its allocations, ``kubelet_internal_checkpoint``.

NO_NUMA_NODE = -1


def write(
    host: Host,
    directory: str,
    held: Sequence[Held],
    healthy: Mapping[str, Iterable[str]],
    numa: Mapping[str, Mapping[str, int]],
) -> None:
    """Write it beside the sockets. `numa` is each resource's NUMA node by device."""
    data = {
        "PodDeviceEntries": [_entry(item, numa.get(item.resource, {})) for item in held] or None,
        "RegisteredDevices": {name: sorted(ids) for name, ids in healthy.items()},
    }
    # the real checksum is a hash of Go's own notation of the data; only the kubelet compares it
    document = {"Data": data, "Checksum": binascii.crc32(json.dumps(data, sort_keys=True).encode())}
    path = host.path(f"{directory}/{NAME}")
    new = path.with_name(f".{NAME}.new")  # not made durable: a test's kubelet writes it thousands of times
    new.write_text(json.dumps(document))
    new.replace(path)


def read(host: Host, directory: str) -> list[Held]:
    """The recorded allocations; none if there is no file."""
    text = host.read_text(f"{directory}/{NAME}")
    entries = (json.loads(text)["Data"]["PodDeviceEntries"] or ()) if text else ()
    return [
        Held(
            entry["PodUID"],
            entry["ContainerName"],
            entry["ResourceName"],
            tuple(sorted(device for ids in entry["DeviceIDs"].values() for device in ids)),
            base64.b64decode(entry["AllocResp"]),
        )
        for entry in entries
    ]


def _entry(holding: Held, numa: Mapping[str, int]) -> dict[str, Any]:
    by_node: dict[str, list[str]] = {}
    for device in holding.ids:
        by_node.setdefault(str(numa.get(device, NO_NUMA_NODE)), []).append(device)
    return {
        "PodUID": holding.pod,
        "ContainerName": holding.container,
        "ResourceName": holding.resource,
        "DeviceIDs": by_node,
        "AllocResp": base64.b64encode(holding.response).decode(),
    }


# The kubelet's clients of device plugins, and the devices that they reported.
#
# As in Kubernetes 1.36 (pkg/kubelet/cm/devicemanager): one endpoint per resource name, the last one
# registered, is allocated from, but every client continues to read its stream, and each list replaces the
# resource's devices. When a stream ends, the oldest client with the same name and socket is disconnected,
# which marks all of the resource's devices unhealthy and its endpoint stopped, whichever plugin they came
# from.


class Endpoint:
    """One registration."""

    def __init__(self, resource: str, path: Path, dial_seconds: float) -> None:
        """Dial a plugin and ask for its options. `ConnectionError` if it can't be reached."""
        self.resource = resource
        self.path = path
        self.stopped_at: float | None = None
        self.stream: Any = None
        self.channel = channel_to(path)
        try:
            grpc.channel_ready_future(self.channel).result(dial_seconds)
            options = self.call("GetDevicePluginOptions")(pb.Empty(), timeout=dial_seconds)
        except (grpc.FutureTimeoutError, grpc.RpcError) as error:
            self.channel.close()
            raise ConnectionError(f"can't reach the plugin on {path}: {error!r}") from error
        self.prefers = options.get_preferred_allocation_available

    def call(self, name: str) -> Any:
        return server.method(self.channel, server.DEVICE_PLUGIN, name)

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
            client = next((item for item in clients if path == item.path), clients[-1] if not path else None)
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
        """All devices, healthy or not; none once the resource was without an endpoint for too long."""
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


# The kubelet's plugin watcher: it queries sockets in plugins_registry, and registers them.

Identity = tuple[int, int, int]


@dataclass
class Times:
    """Seconds. `reconcile` is 1.0 in the kubelet; the others are the kubelet's own."""

    dial: float = 10.0
    info: float = 1.0
    reconcile: float = 0.05
    first_retry: float = 0.5
    longest_retry: float = 122.0


class Operation:
    """The attempts on one path: one at a time, with a growing delay after each that failed."""

    def __init__(self) -> None:
        self.thread: Thread | None = None
        self.delay = 0.0
        self.not_before = 0.0

    def may_start(self, now: float) -> bool:
        return now >= self.not_before and (self.thread is None or not self.thread.is_alive())

    def failed(self, now: float, times: Times) -> None:
        self.delay = min(2 * self.delay, times.longest_retry) or times.first_retry
        self.not_before = now + self.delay


class PluginWatcher:
    """`connect` takes resource and socket path and raises `ConnectionError` or `ValueError` with the reason
    for a refusal; `deregister` takes the resource and the path.

    An attempt dials for `Times.dial`, so that it may reach a socket that was created after it began; then the
    socket counts as replaced, and is deregistered and registered again. A plugin that couldn't be connected
    counts as registered, and only a new socket in its place is another attempt. A kubelet that stops
    deregisters none, and the next one has no memory of failed attempts.
    """

    def __init__(
        self,
        host: Host,
        directory: str,
        connect: Callable[[str, Path], None],
        deregister: Callable[[str, Path], None],
        times: Times,
    ) -> None:
        self._host = host
        self._directory = directory
        self._connect = connect
        self._deregister = deregister
        self._times = times
        self._known: dict[str, tuple[Identity, str]] = {}
        self._operations: dict[str, Operation] = {}
        self._stop = Event()
        self._thread: Thread | None = None

    def start(self) -> None:
        self._host.make_dirs(self._directory, 0o750)
        self._stop = Event()
        self._known, self._operations = {}, {}
        self._thread = Thread(target=self._run, args=(self._stop,), name="plugin-watcher", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5.0)

    def delays(self, name: str) -> bool:
        """Whether the next attempt on a socket has to wait after a failed one."""
        operation = self._operations.get(f"{self._directory}/{name}")
        return operation is not None and self._host.monotonic() < operation.not_before

    def dials(self, name: str) -> bool:
        """Whether an attempt on a socket is under way."""
        operation = self._operations.get(f"{self._directory}/{name}")
        return operation is not None and operation.thread is not None and operation.thread.is_alive()

    def _run(self, stop: Event) -> None:
        while not stop.is_set():
            now = self._host.monotonic()
            sockets = {
                path: seen
                for path in self._host.glob(self._directory, "[!.]*")
                if (seen := _creation(self._host, path)) is not None
            }
            for path, (seen, resource) in list(self._known.items()):
                if sockets.get(path) != seen and self._operation(path).may_start(now):
                    del self._known[path]
                    self._deregister(resource, self._host.path(path, follow=False))
            for path, seen in sockets.items():
                operation = self._operation(path)
                if path not in self._known and operation.may_start(now):
                    arguments = (path, seen, operation, stop)
                    operation.thread = Thread(
                        target=self._attempt, args=arguments, name="register", daemon=True
                    )
                    operation.thread.start()
            stop.wait(self._times.reconcile)

    def _operation(self, path: str) -> Operation:
        return self._operations.setdefault(path, Operation())

    def _attempt(self, path: str, seen: Identity, operation: Operation, stop: Event) -> None:
        if self._register(path, seen, stop):
            operation.delay = operation.not_before = 0.0
        else:
            operation.failed(self._host.monotonic(), self._times)

    def _register(self, path: str, seen: Identity, stop: Event) -> bool:
        with channel_to(self._host.path(path, follow=False)) as channel:
            try:
                grpc.channel_ready_future(channel).result(self._times.dial)
                info = server.method(channel, PLUGIN_REGISTRATION, "GetInfo")(
                    pluginregistration_pb2.InfoRequest(), timeout=self._times.info
                )
                if stop.is_set():
                    return False
                if not (problem := _invalid(info, path)):
                    self._known[path] = (seen, info.name)
                    problem = self._connected(info, path)
                notify = server.method(channel, PLUGIN_REGISTRATION, "NotifyRegistrationStatus")
                notify(
                    pluginregistration_pb2.RegistrationStatus(plugin_registered=not problem, error=problem),
                    timeout=5.0,
                )
            except (grpc.FutureTimeoutError, grpc.RpcError):
                return False
        return not problem

    def _connected(self, info: pluginregistration_pb2.PluginInfo, path: str) -> str:
        try:
            self._connect(info.name, Path(info.endpoint) if info.endpoint else self._host.path(path))
        except (ConnectionError, ValueError) as error:
            return f"plugin registration failed with err: {error}"
        return ""


def _creation(host: Host, path: str) -> Identity | None:
    """What changes when a socket is created again, of which the kubelet gets an event. It gets none when the
    plugin then sets the mode, which is a change of the inode."""
    status = host.stat(path)
    if status is None or not stat.S_ISSOCK(status.st_mode):
        return None
    return (status.st_dev, status.st_ino, status.st_mtime_ns)


def _invalid(info: pluginregistration_pb2.PluginInfo, path: str) -> str:
    if info.type != DEVICE_PLUGIN_TYPE:
        return f"no handler registered for plugin type: {info.type} at socket {path}"
    if server.VERSION not in info.supported_versions:
        return f"manager version, {server.VERSION}, is not among plugin supported versions"
    return ""


# The kubelet's PodResources service, v1.

POD_RESOURCES = server.Service(
    "v1.PodResourcesLister",
    {
        "List": (podresources_pb2.ListPodResourcesRequest, podresources_pb2.ListPodResourcesResponse),
        "GetAllocatableResources": (
            podresources_pb2.AllocatableResourcesRequest,
            podresources_pb2.AllocatableResourcesResponse,
        ),
        "Get": (podresources_pb2.GetPodResourcesRequest, podresources_pb2.GetPodResourcesResponse),
    },
)


class PodResources:
    """`held` is what containers hold, `allocatable` (resource, id, NUMA node) of what could be held.

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
        return server.handlers(POD_RESOURCES, functions)

    def _list(self, request: Any, context: Any) -> podresources_pb2.ListPodResourcesResponse:
        return podresources_pb2.ListPodResourcesResponse(pod_resources=self._pods())

    def _get(
        self, request: podresources_pb2.GetPodResourcesRequest, context: Any
    ) -> podresources_pb2.GetPodResourcesResponse:
        for pod in self._pods():
            if (pod.namespace, pod.name) == (request.pod_namespace, request.pod_name):
                return podresources_pb2.GetPodResourcesResponse(pod_resources=pod)
        raise server.RefusedRequest(
            "NOT_FOUND", f"pod {request.pod_name} in namespace {request.pod_namespace} not found"
        )

    def _get_allocatable(self, request: Any, context: Any) -> podresources_pb2.AllocatableResourcesResponse:
        response = podresources_pb2.AllocatableResourcesResponse()
        for resource, device, numa in self._allocatable():
            entry = response.devices.add(resource_name=resource, device_ids=[device])
            if numa is not None:
                entry.topology.nodes.add(ID=numa)
        return response

    def _pods(self) -> list[podresources_pb2.PodResources]:
        pods: dict[str, podresources_pb2.PodResources] = {}
        for holding in self._held():
            namespace, _, name = holding.pod.rpartition("/")
            pod = pods.setdefault(
                holding.pod, podresources_pb2.PodResources(name=name, namespace=namespace or "default")
            )
            container = next((item for item in pod.containers if item.name == holding.container), None)
            container = container or pod.containers.add(name=holding.container)
            for device in holding.ids:  # the real one, too, gives each device an entry of its own
                container.devices.add(resource_name=holding.resource, device_ids=[device])
        return list(pods.values())


# The whole simulated kubelet: start and stop, the node's state, admission of pods.


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
            host, f"{root}/plugins_registry", self._socket_seen, self.endpoints.disconnect, self._times
        )
        self._servers: list[grpc.Server] = []

    # --- life -------------------------------------------------------------------------------------------

    def __enter__(self) -> KubeletStub:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Remember only the checkpoint, delete every socket of the directory and serve on kubelet.sock."""
        self.endpoints.forget()
        self._host.make_dirs(self._directory, 0o750)
        for path in self._host.glob(self._directory, "*"):
            if self._host.path(path, follow=False).is_socket():
                self._host.remove(path)
        with self._changed:
            self._held = read(self._host, self._directory)
        self._listen(self.socket, server.handlers(server.REGISTRATION, {"Register": self._register}))
        seen = self._host.stat(self.socket)
        self.inodes.append(seen.st_ino if seen is not None else 0)
        self._host.make_dirs(self.pod_resources_socket.rpartition("/")[0], 0o750)
        self._host.remove(self.pod_resources_socket)
        self._listen(self.pod_resources_socket, PodResources(self.held, self._to_be_had).handler)
        self.watcher.start()

    def stop(self) -> None:
        """Stop: every connection to a plugin ends, and kubelet.sock is removed."""
        self._save()
        self.watcher.stop()
        servers, self._servers = self._servers, []
        for running in servers:
            running.stop(None).wait(2.0)
        self.endpoints.close()

    def restart(self) -> None:
        """Restart as a kubelet does. `inodes` has the inode numbers that kubelet.sock has had; they may
        repeat."""
        self.stop()
        self.start()

    def tear_down(self, resource: str) -> None:
        """Do what the cleanup after an older stream does to a present registration (before 1.34)."""
        self.endpoints.disconnect(resource)

    # --- the node's state -------------------------------------------------------------------------------

    def capacity(self, resource: str) -> int:
        """Devices known, healthy or not."""
        return len(self.endpoints.devices(resource))

    def allocatable(self, resource: str) -> int:
        """Healthy devices; 0 once a plugin's stream has ended."""
        return len(self.endpoints.healthy(resource))

    def unhealthy(self, resource: str) -> tuple[str, ...]:
        """Ids that the node would not allocate, sorted."""
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

    def wait_other(self, resource: str, count: int) -> int:
        """Wait until the number of allocatable devices is no longer `count`, and return it."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.endpoints.healthy(resource)) != count)
            return len(self.endpoints.healthy(resource))

    def held(self) -> list[Held]:
        """Present allocations, in the order in which containers got them."""
        with self._changed:
            return list(self._held)

    # --- pods -------------------------------------------------------------------------------------------

    def allocate(self, resource: str, count: int) -> Allocation:
        """Devices for one container. `AdmissionError`: too few are free. `grpc.RpcError`: the plugin refuses.

        Not thread-safe, as the kubelet's admission isn't: one pod after the other.
        """
        holding = self._allocate(f"default/pod-{next(self._pods)}", "main", resource, count)
        return merged([holding])

    def release(self, resource: str, ids: Sequence[str]) -> None:
        """Remove the pods that hold any of these; the file is written at the next change, as by the real
        kubelet."""
        released = set(ids)
        with self._changed:
            self._held = [
                holding
                for holding in self._held
                if holding.resource != resource or not released.intersection(holding.ids)
            ]

    def admit(self, pod: str, container: str, requests: Mapping[str, int]) -> Allocation:
        """A container with several resources. A restarted one gets its previous devices without another
        Allocate.

        `AdmissionError` as the pod's event would have it: too few devices, a plugin's error, or a device from
        before that has become unhealthy.
        """
        before = [holding for holding in self.held() if (holding.pod, holding.container) == (pod, container)]
        if before:
            self._check_again(before)
            return merged(before)
        try:
            parts = [self._allocate(pod, container, name, count) for name, count in requests.items()]
        except grpc.RpcError as error:
            raise AdmissionError(f"Allocate failed due to {error.details()}, which is unexpected") from error
        return merged(parts)

    def remove(self, pod: str) -> None:
        """End the pod."""
        with self._changed:
            self._held = [holding for holding in self._held if holding.pod != pod]
        self._save()

    def _check_again(self, before: Sequence[Held]) -> None:
        for holding in before:
            if not set(holding.ids) <= self.endpoints.healthy(holding.resource):
                raise AdmissionError(
                    f"previously allocated devices are no longer healthy; cannot allocate unhealthy devices"
                    f" {holding.resource}"
                )

    def _allocate(self, pod: str, container: str, resource: str, count: int) -> Held:
        endpoint = self.endpoints.find(resource)
        allocated = {device for item in self.held() if item.resource == resource for device in item.ids}
        free = self.endpoints.healthy(resource) - allocated
        if endpoint is None or len(free) < count:
            raise AdmissionError(f"{len(free)} of {count} {resource} available")
        device_ids = sorted(free)[:count]
        if endpoint.prefers and count < len(free):
            device_ids = topped_up(self._query_preferred(endpoint, free, count), free, count)
        request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=device_ids)])
        response = endpoint.call("Allocate")(request, timeout=_CALL_SECONDS)
        if not response.container_responses:
            raise AdmissionError(f"no containers return in allocation response for {resource}")
        answer = response.container_responses[0].SerializeToString()  # the kubelet reads no other one
        holding = Held(pod, container, resource, tuple(device_ids), answer)
        with self._changed:
            self._held.append(holding)
        self._save()
        return holding

    def _query_preferred(self, endpoint: Endpoint, free: set[str], count: int) -> list[str]:
        preferred = pb.ContainerPreferredAllocationRequest(
            available_deviceIDs=sorted(free), allocation_size=count
        )
        request = pb.PreferredAllocationRequest(container_requests=[preferred])
        response = endpoint.call("GetPreferredAllocation")(request, timeout=_CALL_SECONDS)
        return list(response.container_responses[0].deviceIDs)

    # --- the protocol -----------------------------------------------------------------------------------

    def _listen(self, socket: str, handler: grpc.GenericRpcHandler) -> None:
        listener = grpc.server(ThreadPoolExecutor(8, thread_name_prefix="kubelet"), handlers=[handler])
        address = server.target(self._host.path(socket))
        listen_privately(self._host, socket, lambda: listener.add_insecure_port(address))
        listener.start()
        self._servers.append(listener)

    def _register(self, request: pb.RegisterRequest, context: grpc.ServicerContext) -> pb.Empty:
        if request.version != server.VERSION:
            raise server.RefusedRequest(
                "UNKNOWN", f"version {request.version!r} is not supported, only {server.VERSION}"
            )
        path = self._host.path(f"{self._directory}/{request.endpoint}")
        try:
            self._connect(request.resource_name, path, request.endpoint)
        except (ConnectionError, ValueError) as error:
            raise server.RefusedRequest("UNKNOWN", str(error)) from error
        return pb.Empty()

    def _socket_seen(self, resource: str, path: Path) -> None:
        self._connect(resource, path, str(path))

    def _connect(self, resource: str, path: Path, endpoint: str) -> None:
        problem = self.refuse or resource_name_problem(resource)
        if problem:
            raise ValueError(problem)
        dialled = Endpoint(resource, path, self._times.dial)
        with self._changed:  # no client sees its devices before its registration
            self.endpoints.connect(dialled, self.watch)
            self.registrations.append(Registered(resource, endpoint))
            self._changed.notify_all()

    def _save(self) -> None:
        with self._changed:
            names = self.endpoints.resources()
            healthy = {name: self.endpoints.healthy(name) for name in names}
            numa = {name: self.numa_nodes(name) for name in names}
            if self._host.is_dir(self._directory):
                write(self._host, self._directory, self._held, healthy, numa)

    def _to_be_had(self) -> list[tuple[str, str, int | None]]:
        with self._changed:
            return [
                (name, device, self.numa_nodes(name).get(device))
                for name in self.endpoints.resources()
                for device in sorted(self.endpoints.healthy(name))
            ]
