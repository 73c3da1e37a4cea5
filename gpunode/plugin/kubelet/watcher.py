"""Registration by the kubelet's plugin watcher, which finds our socket in plugins_registry.

One socket serves both: pluginregistration.Registration, which names the resource, and the device plugin. A
restarted kubelet finds the socket and registers it again by itself, so little is done here: report a refusal,
and use a new socket when the kubelet runs and yet doesn't register us.

The kubelet waits 1 s for GetInfo, 10 s for a connection, 5 s for NotifyRegistrationStatus, and doubles the
delay between its attempts on one path up to two minutes. It has made failed attempts on ours if it started
while we were down, so each of our sockets has a path of its own.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from gpunode.errors import GpunodeError
from gpunode.plugin.kubelet import server
from gpunode.plugin.kubelet.link import (
    READ_ONLY,
    Link,
    Serving,
    identity,
    registry_socket,
    registry_sockets,
)
from gpunode.plugin.kubelet.server import LinkContext
from gpunode.plugin.ledger import Feed
from gpunode.plugin.proto import pluginregistration_pb2 as pb

PLUGIN_REGISTRATION = server.Service(
    "pluginregistration.Registration",
    {
        "GetInfo": (pb.InfoRequest, pb.PluginInfo),
        "NotifyRegistrationStatus": (pb.RegistrationStatus, pb.RegistrationStatusResponse),
    },
)
DEVICE_PLUGIN_TYPE = "DevicePlugin"
_SOON = 1.0  # after a refusal, or a stream that this same kubelet has ended: it won't reconnect by itself
_STEADY_SECONDS = 30.0  # a stream that lasted this long clears the record of failures
_LONGEST = 60.0


class WatcherLink(Link):
    """See `Link`; the two RPCs run in gRPC's threads. The kubelet's list isn't compared with ours: here it
    refuses a second plugin of one name."""

    def __init__(self, context: LinkContext, resource: str, feed: Feed) -> None:
        extra = server.handlers(
            PLUGIN_REGISTRATION, {"GetInfo": self._info, "NotifyRegistrationStatus": self._notified}
        )
        socket = registry_socket(context.host, context.settings, resource)
        super().__init__(context, resource, Serving(context, socket, feed, [extra]))
        self._info_mark = 0  # streams up to this number are older than the kubelet's last GetInfo
        self._mark = 0  # streams up to this number are older than its last registration
        self._answer: pb.RegistrationStatus | None = None
        self._situation: tuple[object, int, bool] = (None, 0, False)
        self._since = 0.0
        # it polls once a second, and dials with a timeout of ten seconds
        self._usual = 2 * context.settings.stream_wait_seconds
        self._renewals = 0
        self._watched = False

    def claim(self) -> None:
        earlier = registry_sockets(self._host, self._settings, self._resource)
        self._serving.claim(chain([self._settings.socket(self._resource)], earlier))

    def tick(self) -> None:
        now = self._host.monotonic()
        try:
            problem = self._serving.keep(now)
            if problem:
                self._wait(problem)
                return
            self._follow(now)
        except GpunodeError as error:
            if error.code == READ_ONLY:
                raise
            self._wait(error.message)

    @property
    def watched(self) -> bool:
        return self._watched

    # --- the kubelet's RPCs -----------------------------------------------------------------------------

    def _info(self, request: pb.InfoRequest, context: Any) -> pb.PluginInfo:
        """The kubelet may call it at any time; only `_notified` counts as a registration."""
        self._info_mark = self._serving.streams.last
        return pb.PluginInfo(
            type=DEVICE_PLUGIN_TYPE,
            name=self._resource,
            endpoint=str(self._host.path(self.socket, follow=False)),
            supported_versions=[server.VERSION],
        )

    def _notified(self, request: pb.RegistrationStatus, context: Any) -> pb.RegistrationStatusResponse:
        if request.plugin_registered:
            self._mark = self._serving.streams.registered(self._info_mark)
        self._answer = request
        self._news()
        return pb.RegistrationStatusResponse()

    # --- reaction ---------------------------------------------------------------------------------------

    def _follow(self, now: float) -> None:
        self._take(self._answer)
        watched = self._serving.streams.since(self._mark)
        if watched != self._watched:
            self._watched = watched
            self._log.info(
                "the kubelet watches" if watched else "the kubelet ended its ListAndWatch stream",
                resource=self._resource,
            )
        if watched:
            self.status = "registered with the kubelet"
            self._say.reset()
        elif self._answer is not None:
            self._wait(f"the kubelet refused the registration: {self._answer.error}")
        else:
            self._wait(f"waiting for the kubelet to register {self.socket}")
        self._be_patient(now, watched)

    def _take(self, answer: pb.RegistrationStatus | None) -> None:
        if answer is not None and answer.plugin_registered:
            self._answer = None
            self.registrations += 1
            self._log.info("registered with the kubelet", resource=self._resource)

    def _be_patient(self, now: float, watched: bool) -> None:
        """Recreate the socket if this kubelet has ignored it for too long.

        This applies after a refusal, too: a kubelet that couldn't connect to the socket counts it as handled,
        and retries only with a new one (kubelet, pluginmanager/operationexecutor, AddPlugin).
        """
        kubelet = identity(self._host, self._settings.kubelet_socket)
        before, situation = self._situation, (kubelet, self._serving.generation, watched)
        if situation != before:
            self._ended = before == (kubelet, self._serving.generation, True)
            if kubelet != before[0]:
                self._renewals = 0
            self._situation, self._since = situation, now
        lasted = now - self._since
        first = _SOON if self._ended or self._answer is not None else self._usual
        if watched:
            if lasted > _STEADY_SECONDS:
                self._renewals = 0
        elif kubelet is not None and lasted > min(first * 2**self._renewals, _LONGEST):
            self._log.warning(
                "the kubelet has not registered us: using a new socket", resource=self._resource
            )
            self._renewals = min(self._renewals + 1, 10)
            self._serving.move(registry_socket(self._host, self._settings, self._resource))
