"""`--listen`: /metrics, /healthz and /readyz beside the plugin. A part of the service.

Off unless asked for. It has no password and tells no secret, but names of pods: listen on 127.0.0.1, or where
only the monitoring can reach it.
"""

from __future__ import annotations

from importlib.util import find_spec
from threading import Lock
from typing import TYPE_CHECKING

from gpunode.errors import PreconditionError, install_command

if TYPE_CHECKING:
    from gpunode.plugin.observe.http import Page
    from gpunode.plugin.observe.metrics import Metrics
    from gpunode.plugin.serve import PluginService

STUCK_SECONDS = 10.0


class Endpoints:
    """Takes the port at once, so that a start that can't have it fails; answers from the first turn on."""

    def __init__(self, service: PluginService) -> None:
        if find_spec("prometheus_client") is None:
            raise PreconditionError(
                "--listen needs the package prometheus-client, which is not installed",
                hint=f"install it beside gpunode: {install_command('metrics', 'prometheus-client')}",
            )
        from gpunode.plugin.observe.http import WebServer
        from gpunode.plugin.observe.metrics import Counters

        address, port = listen_address(service.settings.listen)
        listening = service.host.listen_tcp(address, port)
        self.port = int(listening.getsockname()[1])
        self._service = service
        self._counters = Counters()
        service.observers.append(self._counters.call)
        service.ledger.witnesses.append(self._counters.event)
        self._metrics: Metrics | None = None
        self._making = Lock()
        self._turn = service.host.monotonic()
        self._settings = service.settings
        self._began = self._configured = service.host.now()
        self._started = False
        routes = {"/metrics": self.metrics, "/healthz": self.healthz, "/readyz": self.readyz}
        self._server = WebServer(listening, routes, service.log)

    def tick(self, now: float) -> None:
        self._turn = now
        if self._service.settings is not self._settings:
            self._settings, self._configured = self._service.settings, self._service.host.now()
        if not self._started:
            self._started = True
            self._server.start()
            where = self._service.settings.listen
            self._service.log.info("serving metrics", listen=where, port=self.port)

    def close(self) -> None:
        self._server.close()

    def metrics(self, accept: str) -> Page:
        from gpunode.plugin.observe.http import Page

        with self._making:  # the library is imported by the first who asks
            if self._metrics is None:
                from gpunode.plugin.observe.metrics import Metrics, Times

                self._metrics = Metrics(
                    self._service, self._counters, lambda: Times(self._began, self._configured)
                )
        return Page(200, *self._metrics.page(accept))

    def healthz(self, _accept: str) -> Page:
        """Whether the process does its work; a GPU's health is no reason to start it anew."""
        from gpunode.plugin.observe.http import text

        idle = self._service.host.monotonic() - self._turn
        if idle > STUCK_SECONDS:
            return text(503, f"the kubelet's link has not had its turn for {idle:.0f} s")
        return text(200, "ok")

    def readyz(self, _accept: str) -> Page:
        """Whether pods can get GPUs from here."""
        from gpunode.plugin.observe.http import text

        return text(200 if self._service.ready else 503, self._service.status)


def listen_address(given: str) -> tuple[str, int]:
    """``127.0.0.1:9400``, ``[::1]:9400`` or ``:9400`` as address and port; an empty address is every one."""
    address, _, port = given.rpartition(":")
    return address.removeprefix("[").removesuffix("]"), int(port)
