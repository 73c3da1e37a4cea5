"""The kubelet's plugin watcher: sockets in plugins_registry are asked what they are, and registered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

import grpc

from gpunode.dataclass import dataclass
from gpunode.host import Host
from gpunode.plugin.kubelet import rpc
from gpunode.plugin.kubelet.directory import identity
from gpunode.plugin.kubelet.watcher import DEVICE_PLUGIN_TYPE, PLUGIN_REGISTRATION
from gpunode.plugin.proto import pluginregistration_pb2 as pb

Identity = tuple[int, int, int]


@dataclass(frozen=True)
class Times:
    """Seconds. `reconcile` is 1.0 in the kubelet; the others are the kubelet's own."""

    dial: float = 10.0
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
                if (seen := identity(self._host, path)) is not None
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
        with rpc.channel(self._host.path(path, follow=False)) as channel:
            try:
                grpc.channel_ready_future(channel).result(self._times.dial)
                info = rpc.method(channel, PLUGIN_REGISTRATION, "GetInfo")(pb.InfoRequest(), timeout=1.0)
                if stop.is_set():
                    return False
                if not (problem := _invalid(info, path)):
                    self._known[path] = (seen, info.name)
                    problem = self._connected(info, path)
                notify = rpc.method(channel, PLUGIN_REGISTRATION, "NotifyRegistrationStatus")
                notify(pb.RegistrationStatus(plugin_registered=not problem, error=problem), timeout=5.0)
            except (grpc.FutureTimeoutError, grpc.RpcError):
                return False
        return not problem

    def _connected(self, info: pb.PluginInfo, path: str) -> str:
        try:
            self._connect(info.name, Path(info.endpoint) if info.endpoint else self._host.path(path))
        except (ConnectionError, ValueError) as error:
            return f"plugin registration failed with err: {error}"
        return ""


def _invalid(info: pb.PluginInfo, path: str) -> str:
    if info.type != DEVICE_PLUGIN_TYPE:
        return f"no handler registered for plugin type: {info.type} at socket {path}"
    if rpc.VERSION not in info.supported_versions:
        return f"manager version, {rpc.VERSION}, is not among plugin supported versions"
    return ""
