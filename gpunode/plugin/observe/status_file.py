"""The serving plugin's own account of itself, a file: what it advertises, who is unhealthy and why.

`plugin status` reads it (see own_status.py). It is written when something changed, at most once a second, and
by a thread that lives only for that: a disk that is busy must not hold up the registration with the kubelet.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import groupby
from threading import Thread
from typing import TYPE_CHECKING, Any

from gpunode import __version__
from gpunode.errors import GpunodeError
from gpunode.facts.device_plugins import status_path
from gpunode.facts.processes import own_identity
from gpunode.plugin.model import Resource
from gpunode.plugin.observe.sockets import pod_resources_socket
from gpunode.plugin.settings import Settings
from gpunode.result import plain

if TYPE_CHECKING:
    from gpunode.plugin.serve import PluginService

FORMAT = 1
_LEAST_SECONDS = 1.0
_AGAIN_SECONDS = 30.0  # after a write that failed: the disk may have room by then
_BUSY_SECONDS = 0.1  # until the one who writes is asked again
_LAST_SECONDS = 1.0


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
        self._writer: Thread | None = None
        self._trouble = ""

    def tick(self, now: float) -> None:
        seen = self._seen()
        if now < self._next or (self._writer is not None and self._writer.is_alive()):
            if seen != self._shown:
                # no other news need follow, and the next turn without news is seconds away
                self._service.again_within(max(self._next - now, _BUSY_SECONDS))
            return
        if seen != self._shown or (self._trouble and now >= self._again):
            self._shown = seen
            self._next = now + _LEAST_SECONDS
            self._again = now + _AGAIN_SECONDS
            self._write(describe(self._service))

    def close(self) -> None:
        """Says that the plugin ended in order; the last news of the GPUs stays."""
        if self._writer is not None:
            self._writer.join(_LAST_SECONDS)
        self._write({**describe(self._service), "ready": False, "stopped": self._host.now()})
        assert self._writer is not None
        self._writer.join(_LAST_SECONDS)

    def _seen(self) -> object:
        """Whatever is cheap to compare and differs when the file would. Snapshots are the same objects while
        nothing changes, which makes comparing a thousand devices one comparison."""
        service = self._service
        return (
            [feed.snapshot() for feed in service.ledger.feeds.values()],
            [(link.registrations, link.watched, link.status) for link in service.links.values()],
            service.ready,
            service.status,
            service.ledger.plan.left_out,
            service.ledger.config_trouble,
            service.settings,
        )

    def _write(self, told: Mapping[str, Any]) -> None:
        document = {"format": FORMAT, **self._identity, "written": self._host.now(), **told}
        data = (json.dumps(document, indent=1) + "\n").encode()
        self._writer = Thread(target=self._replace, args=(data,), name="status-file", daemon=True)
        self._writer.start()

    def _replace(self, data: bytes) -> None:
        try:
            self._host.make_dirs(self._service.settings.state_dir)
            self._host.write_atomic(self._path, data, keep=False)
            self._trouble = ""
        except GpunodeError as error:
            if error.message != self._trouble:
                self._trouble = error.message
                self._service.log.warning(
                    "plugin status can't be told the reasons", reason=error.message, hint=error.hint
                )


def describe(service: PluginService) -> dict[str, Any]:
    """What the service advertises and how the kubelet takes it; plain JSON."""
    settings = service.settings
    return {
        "ready": service.ready,
        "status": service.status,
        "configError": service.ledger.config_trouble,
        "settings": _summary(settings),
        "resources": [
            _resource(service, name, feed.snapshot().resource) for name, feed in service.ledger.feeds.items()
        ],
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


def _resource(service: PluginService, name: str, resource: Resource) -> dict[str, Any]:
    link = service.links.get(name)
    by_unit = groupby(resource.devices, key=lambda device: device.unit)
    return {
        "name": name,
        "socket": link.socket if link else service.settings.socket(name),
        "sharing": resource.sharing,
        "registrations": link.registrations if link else 0,
        "watched": bool(link and link.watched),
        "status": link.status if link else "starting",
        "units": [_unit(unit, [device.problem for device in devices]) for unit, devices in by_unit],
    }


def _unit(unit: Any, problems: list[Any]) -> dict[str, Any]:
    """A unit with the number of devices (1, or its shares) and the first problem among them."""
    return {
        "id": unit.id,
        "gpu": unit.gpu,
        "index": unit.index,
        "name": unit.name,
        "profile": unit.profile,
        "pci": unit.pci,
        "memoryBytes": unit.memory_bytes,
        "devices": len(problems),
        "healthy": sum(problem is None for problem in problems),
        "problem": plain(next((problem for problem in problems if problem), None)),
    }
