"""The kubelet's plugin watcher: sockets in plugins_registry are asked what they are, and registered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

import grpc

from gpunode.host import Host
from gpunode.plugin.kubelet import rpc
from gpunode.plugin.kubelet.directory import identity
from gpunode.plugin.kubelet.watcher import DEVICE_PLUGIN_TYPE, PLUGIN_REGISTRATION
from gpunode.plugin.proto import pluginregistration_pb2 as pb

_LOOK_SECONDS = 0.05  # the real one is told by inotify, and reconciles once a second
_RETRY_SECONDS = 0.5
Identity = tuple[int, int, int]


class PluginWatcher:
    """`connect` takes resource and socket path and raises `ConnectionError` or `ValueError` with the reason
    for a refusal; `deregister` takes the resource.

    A socket that says nothing, or the wrong thing, is asked again. One that couldn't be connected counts as
    dealt with, as in the real one, and only a new socket in its place is another try.
    """

    def __init__(
        self,
        host: Host,
        directory: str,
        connect: Callable[[str, Path], None],
        deregister: Callable[[str], None],
    ) -> None:
        self._host = host
        self._directory = directory
        self._connect = connect
        self._deregister = deregister
        self._known: dict[str, tuple[Identity, str]] = {}
        self._refused: dict[str, tuple[Identity, float]] = {}
        self._stop = Event()
        self._thread: Thread | None = None

    def start(self) -> None:
        self._host.make_dirs(self._directory, 0o750)
        self._stop.clear()
        self._thread = Thread(target=self._run, name="plugin-watcher", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """A kubelet that ends deregisters nobody; the next one finds the sockets again."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5.0)
        self._known.clear()
        self._refused.clear()

    def _run(self) -> None:
        while not self._stop.is_set():
            found = {
                path: seen
                for path in self._host.glob(self._directory, "[!.]*")
                if (seen := identity(self._host, path)) is not None
            }
            for path in [path for path, (seen, _) in self._known.items() if found.get(path) != seen]:
                self._deregister(self._known.pop(path)[1])
            for path, seen in found.items():
                if path not in self._known and self._due(path, seen):
                    self._register(path, seen)
            self._stop.wait(_LOOK_SECONDS)

    def _due(self, path: str, seen: Identity) -> bool:
        before, until = self._refused.get(path, (seen, 0.0))
        return before != seen or self._host.monotonic() >= until

    def _register(self, path: str, seen: Identity) -> None:
        with rpc.channel(self._host.path(path, follow=False)) as channel:
            try:
                info = rpc.method(channel, PLUGIN_REGISTRATION, "GetInfo")(pb.InfoRequest(), timeout=1.0)
                if not (problem := _invalid(info, path)):
                    self._known[path] = (seen, info.name)
                    problem = self._connected(info, path)
                notify = rpc.method(channel, PLUGIN_REGISTRATION, "NotifyRegistrationStatus")
                notify(pb.RegistrationStatus(plugin_registered=not problem, error=problem), timeout=5.0)
            except grpc.RpcError:
                problem = "nobody answers"
        if problem:
            self._refused[path] = (seen, self._host.monotonic() + _RETRY_SECONDS)
        else:
            self._refused.pop(path, None)

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
