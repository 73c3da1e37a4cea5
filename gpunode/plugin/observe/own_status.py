"""Reading back what the serving plugin wrote of itself (status_file.py), and whether it still lives.

The file is input like any other: a field of the wrong kind counts as one that isn't there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gpunode.dataclass import dataclass
from gpunode.errors import ConfigError
from gpunode.facts.device_plugins import status_path
from gpunode.facts.processes import start_ticks
from gpunode.gpu.traces import boot_id
from gpunode.host import Host
from gpunode.plugin.model import LeftOut, Problem


@dataclass(frozen=True)
class OwnUnit:
    """A unit that our plugin advertises. `devices` is 1, or the number of its shares."""

    id: str
    gpu: str
    index: str
    name: str
    profile: str
    devices: int
    healthy: int
    problem: Problem | None


@dataclass(frozen=True)
class OwnResource:
    """A resource of our plugin. `status` says for people how the kubelet takes it."""

    name: str
    socket: str
    sharing: str
    registrations: int
    watched: bool
    status: str
    units: tuple[OwnUnit, ...]


@dataclass(frozen=True)
class OwnStatus:
    """`state`: serving, ended (in order), gone (without a word) or unknown. Times are seconds of the epoch.

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
        """Whether what it says still holds, as far as can be told."""
        return self.state in ("serving", "unknown")


def read_own_status(host: Host, state_dir: str) -> OwnStatus | None:
    """None if no plugin of ours has served here. `Unreadable`, or `ConfigError` for a damaged file."""
    path = status_path(state_dir)
    text = host.read_text(path)
    if text is None:
        return None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {error}", hint="the plugin writes it anew") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is damaged: no object", hint="the plugin writes it anew")
    resources = tuple(_resource(item) for item in _items(data, "resources"))
    settings = data.get("settings")
    return OwnStatus(
        _state(host, data, resources),
        _text(data, "version"),
        _number(data, "pid"),
        _time(data, "started"),
        _time(data, "written"),
        _time(data, "stopped"),
        data.get("ready") is True,
        _text(data, "status"),
        _text(data, "configError"),
        settings if isinstance(settings, dict) else {},
        resources,
        tuple(
            LeftOut(_text(item, "index"), _text(item, "id"), _text(item, "reason"))
            for item in _items(data, "leftOut")
        ),
    )


def _state(host: Host, data: Mapping[str, Any], resources: tuple[OwnResource, ...]) -> str:
    """A process number means something in its own namespace only; elsewhere its sockets have to tell."""
    if _time(data, "stopped"):
        return "ended"
    booted = boot_id(host)
    if booted and _text(data, "bootId") not in ("", booted):
        return "gone"
    namespace = _text(data, "pidNamespace")
    if host.live and namespace and namespace == host.readlink("/proc/self/ns/pid"):
        began = start_ticks(host, _number(data, "pid"))  # another process may have got the number
        return "serving" if began is not None and began == data.get("startTicks") else "gone"
    states = {host.socket_state(resource.socket) for resource in resources if resource.socket}
    if "listening" in states:
        return "serving"
    return "gone" if states and host.live else "unknown"


def _resource(item: Mapping[str, Any]) -> OwnResource:
    return OwnResource(
        _text(item, "name"),
        _text(item, "socket"),
        _text(item, "sharing"),
        _number(item, "registrations"),
        item.get("watched") is True,
        _text(item, "status"),
        tuple(_unit(one) for one in _items(item, "units")),
    )


def _unit(item: Mapping[str, Any]) -> OwnUnit:
    problem = item.get("problem")
    return OwnUnit(
        _text(item, "id"),
        _text(item, "gpu"),
        _text(item, "index"),
        _text(item, "name"),
        _text(item, "profile"),
        _number(item, "devices"),
        _number(item, "healthy"),
        Problem(
            _text(problem, "code"), _text(problem, "reason"), _time(problem, "since"), _text(problem, "mend")
        )
        if isinstance(problem, dict)
        else None,
    )


def _items(data: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    found = data.get(key)
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


def _text(data: Mapping[str, Any], key: str) -> str:
    found = data.get(key)
    return found if isinstance(found, str) else ""


def _number(data: Mapping[str, Any], key: str) -> int:
    found = data.get(key)
    return found if isinstance(found, int) else 0


def _time(data: Mapping[str, Any], key: str) -> float:
    found = data.get(key)
    return float(found) if isinstance(found, int | float) else 0.0
