"""The serving plugin's own status, a file: what it advertises, which devices are unhealthy and why.

`plugin status` reads it (`read_own_status`). It is written when something changed, at most once a second, and
by a thread that exists only for that: a busy disk must not delay the registration with the kubelet.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from gpunode import __version__
from gpunode.errors import ConfigError, GpunodeError, Unreadable
from gpunode.facts.device_plugins import status_path
from gpunode.facts.processes import own_identity, start_ticks
from gpunode.gpu.driver_traces import boot_id
from gpunode.host import Host
from gpunode.output.typed import from_plain, plain
from gpunode.plugin.background import BackgroundTask
from gpunode.plugin.config.settings import Settings, pod_resources_socket
from gpunode.plugin.model import LeftOut, Problem, Resource, Unit

if TYPE_CHECKING:
    from gpunode.plugin.serve import PluginService


# Reader of the serving plugin's status file, and whether the plugin still runs.
#
# The file is untrusted: a field of the wrong type counts as missing.


@dataclass(frozen=True)
class OwnUnit:
    """A unit that our plugin advertises. `devices` is 1, or the number of its shares."""

    id: str
    gpu: str
    index: str
    name: str
    profile: str
    pci: str
    memory_bytes: int
    devices: int
    healthy: int
    problem: Problem | None


@dataclass(frozen=True)
class OwnResource:
    """A resource of our plugin. `status` describes its registration with the kubelet, for people."""

    name: str
    socket: str
    sharing: str
    registrations: int
    watched: bool
    status: str
    units: tuple[OwnUnit, ...]


@dataclass(frozen=True)
class OwnStatus:
    """`state`: serving, ended (in order), gone (killed) or unknown. Times are seconds since the epoch.

    `status` is the plugin's own line for people.
    """

    state: str
    version: str
    pid: int
    started: float
    written: float
    stopped: float
    ready: bool
    status: str
    config_error: str
    settings: Mapping[str, Any]
    resources: tuple[OwnResource, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def current(self) -> bool:
        """Whether its content is still valid, as far as can be determined."""
        return self.state in ("serving", "unknown")


def read_own_status(host: Host, state_dir: str) -> OwnStatus | None:
    """None if no plugin of gpunode's has served here. `Unreadable`, or `ConfigError` for a damaged file."""
    path = status_path(state_dir)
    text = host.read_text(path)
    if text is None:
        return None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {error}", hint="the plugin rewrites it") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is damaged: no object", hint="the plugin rewrites it")
    own = from_plain(OwnStatus, data, lenient=True)
    return replace(own, state=_state(host, own, from_plain(_Identity, data, lenient=True)))


@dataclass(frozen=True)
class _Identity:
    """What distinguishes the plugin's process from another one with the same pid."""

    boot_id: str
    pid_namespace: str
    start_ticks: int | None


def _state(host: Host, own: OwnStatus, process: _Identity) -> str:
    """A process number is valid only in its own PID namespace; elsewhere its sockets must show it."""
    if own.stopped:
        return "ended"
    booted = boot_id(host)
    if booted and process.boot_id not in ("", booted):
        return "gone"
    namespace = process.pid_namespace
    if host.live and namespace and namespace == host.readlink("/proc/self/ns/pid"):
        began = start_ticks(host, own.pid)  # another process may have the number now
        return "serving" if began is not None and began == process.start_ticks else "gone"
    states = {host.socket_state(resource.socket) for resource in own.resources if resource.socket}
    if "listening" in states:
        return "serving"
    return "gone" if states and host.live else "unknown"


# The device plugins' sockets in the kubelet's directory: who listens, and which are dead.
#
# Each is only connected to; no data is sent. See `Host.listener`.

_KUBELET = "kubelet.sock"


@dataclass(frozen=True)
class PluginSocket:
    """`state` as in `Host.socket_state`; `pid` and `program` of the listener, 0 and empty if unknown.

    `resource` is the one that a socket of this name serves by NVIDIA's convention and ours, else empty.
    """

    path: str
    state: str
    pid: int
    program: str
    resource: str


def plugin_sockets(host: Host, directory: str, resources: Iterable[str]) -> tuple[PluginSocket, ...]:
    """By name; `Unreadable` if the directory may not be listed."""
    settings = Settings()
    endpoints = {settings.endpoint(name): name for name in resources}
    sockets = []
    for name in host.listdir(directory):
        path = f"{directory}/{name}"
        if name == _KUBELET or not _is_socket(host, path, name):
            continue
        state, pid = host.listener(path)
        sockets.append(PluginSocket(path, state, pid, program(host, pid), endpoints.get(name, "")))
    return tuple(sockets)


def program(host: Host, pid: int) -> str:
    """The name of a process (proc(5)); empty if there is none or it is unknown."""
    try:
        return (host.read_text(f"/proc/{pid}/comm") or "").strip() if pid else ""
    except Unreadable:
        return ""


def _is_socket(host: Host, path: str, name: str) -> bool:
    """A recorded machine has its sockets in the recording, and at most a name in the tree."""
    if not host.live:
        return name.endswith(".sock")
    status = host.stat(path)
    return status is not None and stat.S_ISSOCK(status.st_mode)


FORMAT = 1
_LEAST_SECONDS = 1.0
_AGAIN_SECONDS = 30.0  # after a write that failed: the disk may have space by then
_BUSY_SECONDS = 0.1  # until the writer is checked again
_LAST_SECONDS = 1.0
_FIRST_SECONDS = 0.2  # the longest time that registration waits for a busy disk


class StatusFile:
    """A part of the service."""

    def __init__(self, service: PluginService) -> None:
        self._service = service
        self._host = service.host
        self._path = status_path(service.settings.state_dir)
        self._identity = {
            "version": __version__,
            **own_identity(service.host),
            "started": service.host.now(),
        }
        self._shown: object = None
        self._next = self._again = 0.0
        self._writer = BackgroundTask("status-file")
        self._trouble = ""
        service.before_registering.append(self._announce)

    def _announce(self) -> None:
        """Write new resources before they are registered: until then `plugin status` reports them as another
        plugin's."""
        if not self._writer.join(_FIRST_SECONDS):
            return  # the disk is busy: `tick` writes them when it can
        self._shown = self._fingerprint()
        self._next = self._host.monotonic() + _LEAST_SECONDS
        self._write(describe(self._service))
        self._writer.join(_FIRST_SECONDS)

    def tick(self, now: float) -> float | None:
        seen = self._fingerprint()
        if now < self._next or self._writer.busy:
            # no other event need follow
            return max(self._next - now, _BUSY_SECONDS) if seen != self._shown else None
        if seen != self._shown or (self._trouble and now >= self._again):
            self._shown = seen
            self._next = now + _LEAST_SECONDS
            self._again = now + _AGAIN_SECONDS
            self._write(describe(self._service))
        return None

    def close(self) -> None:
        """Write that the plugin ended in order; the last state of the GPUs stays."""
        self._writer.join(_LAST_SECONDS)
        self._write({**describe(self._service), "ready": False, "stopped": self._host.now()})
        self._writer.join(_LAST_SECONDS)

    def _fingerprint(self) -> object:
        """A value that is cheap to compare and differs whenever the file would. Snapshots are the same
        objects while nothing changes, so a thousand devices are compared at once."""
        service = self._service
        return (
            [feed.snapshot() for feed in service.ledger.feeds.values()],
            [(link.registrations, link.watched, link.status) for link in service.links.values()],
            service.backend.waiting,
            service.ledger.trouble,
            service.ledger.plan.left_out,
            service.ledger.config_trouble,
            service.settings,
        )

    def _write(self, content: Mapping[str, Any]) -> None:
        document = {"format": FORMAT, **self._identity, "written": self._host.now(), **content}
        data = (json.dumps(document, indent=1) + "\n").encode()
        self._writer.start(partial(self._replace, data))

    def _replace(self, data: bytes) -> None:
        try:
            self._host.make_dirs(self._service.settings.state_dir)
            self._host.write_atomic(self._path, data, keep=False)
            self._trouble = ""
        except GpunodeError as error:
            if error.message != self._trouble:
                self._trouble = error.message
                self._service.log.warning(
                    "the status file can't be written: plugin status shows no reasons",
                    reason=error.message,
                    hint=error.hint,
                )


def describe(service: PluginService) -> dict[str, Any]:
    """The advertised resources and their registration with the kubelet; plain JSON."""
    settings = service.settings
    return {
        "ready": service.ready,
        "status": service.status,
        "configError": service.ledger.config_trouble,
        "settings": _summary(settings),
        "resources": plain(
            [
                _resource(service, name, feed.snapshot().resource)
                for name, feed in service.ledger.feeds.items()
            ]
        ),
        "leftOut": plain(service.ledger.plan.left_out),
    }


def _summary(settings: Settings) -> dict[str, Any]:
    return {
        "vendor": settings.vendor,
        "simulate": settings.simulate,
        "configFile": settings.config_file,
        "kubeletSocket": settings.kubelet_socket,
        "podResourcesSocket": pod_resources_socket(settings.kubelet_socket, settings.pod_resources_socket),
        "migStrategy": settings.mig_strategy,
        "sharing": settings.sharing.strategy if settings.sharing else "none",
        "listen": settings.listen,
    }


def _resource(service: PluginService, name: str, resource: Resource) -> OwnResource:
    link = service.links.get(name)
    by_unit = groupby(resource.devices, key=lambda device: device.unit)
    return OwnResource(
        name,
        link.socket if link else service.settings.socket(name),
        resource.sharing,
        link.registrations if link else 0,
        bool(link and link.watched),
        link.status if link else "starting",
        tuple(_unit(unit, [device.problem for device in devices]) for unit, devices in by_unit),
    )


def _unit(unit: Unit, problems: list[Problem | None]) -> OwnUnit:
    """A unit with the number of devices (1, or its shares) and the first problem among them."""
    return OwnUnit(
        *(unit.id, unit.gpu, unit.index, unit.name, unit.profile, unit.pci, unit.memory_bytes),
        devices=len(problems),
        healthy=sum(problem is None for problem in problems),
        problem=next((problem for problem in problems if problem), None),
    )
