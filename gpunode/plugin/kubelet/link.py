"""Registration by the kubelet's own socket, and noticing when it has to be done again.

Nothing here waits or reacts to events; `tick` compares what should be with what is, a few times a second:

- our socket is where the kubelet looks for it (a starting kubelet deletes every socket in its directory);
- this very kubelet has accepted our registration: its socket's device, inode *and* change time are
  compared, as a restarted kubelet often gets the same inode number again;
- since that registration the kubelet has opened a ListAndWatch stream, and it is still open. When the
  kubelet ends a stream it disconnects whatever it then finds under the resource's name, so a quick second
  registration can be torn down by the clean-up after the first, and nothing but the missing stream tells.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import grpc

from gpunode.errors import GpunodeError
from gpunode.host import Host
from gpunode.plugin.kubelet import rpc
from gpunode.plugin.kubelet.directory import identity, registry_socket
from gpunode.plugin.kubelet.handlers import Observer, Policy, plugin_options
from gpunode.plugin.kubelet.rival import Rival
from gpunode.plugin.kubelet.serving import READ_ONLY, Serving
from gpunode.plugin.ledger import Feed
from gpunode.plugin.logfmt import Log, OnChange
from gpunode.plugin.proto import deviceplugin_pb2 as pb
from gpunode.plugin.settings import Settings

_REGISTER_SECONDS = 15.0  # the kubelet dials back during the call and gives that 10 s
_FIRST_DELAY = 0.1  # the kubelet's clean-up after a stream that ended is over by then, mostly
_LONGEST_DELAY = 15.0
_STEADY_SECONDS = 30.0  # a stream that lasted this long clears the record of failures
_QUIET_AFTER = 6  # failed registrations in a row


class KubeletLink:
    """Owns one resource's server and registration. All methods belong to one thread; `status` may be read by
    any."""

    def __init__(
        self,
        host: Host,
        settings: Settings,
        resource: str,
        feed: Feed,
        policy: Policy,
        log: Log,
        observe: Observer,
        news: Callable[[], None],
        own: Callable[[], Collection[str]] = frozenset,
    ) -> None:
        self._host = host
        self._settings = settings
        self._resource = resource
        self._serving = Serving(host, settings.socket(resource), feed, policy, log, observe, news)
        self._rival = Rival(host, settings, resource, feed, own)
        self._taken = ""
        self._log = log
        self._news = news
        self._say = OnChange(log)
        self._generation = 0
        self._kubelet: tuple[int, int, int] | None = None
        self._call: Any = None
        self._channel: grpc.Channel | None = None
        self._mark = 0  # streams up to this number don't belong to the present registration
        self._registered_at: float | None = None
        self._streaming_since: float | None = None
        self._failures = 0
        self._next_try = 0.0
        self.registrations = 0
        self.status = "starting"

    def claim(self) -> None:
        """Start serving if the kubelet's directory is there. `PreconditionError` if we never could."""
        self._serving.claim(registry_socket(self._settings, self._resource))

    def tick(self) -> None:
        """Bring things one step closer to: serving, registered, watched.

        `PreconditionError` as `Serving.keep` has it.
        """
        now = self._host.monotonic()
        try:
            problem = self._serving.keep(now)
            if problem or not self._settings.kubelet_socket:
                self._forget()
                self._wait(problem or "serving without a registration")
                return
            kubelet = identity(self._host, self._settings.kubelet_socket)
        except GpunodeError as error:
            if error.code == READ_ONLY:
                raise
            self._forget()
            self._wait(error.message)
            return
        if kubelet != self._kubelet or self._generation != self._serving.generation:
            self._kubelet, self._generation = kubelet, self._serving.generation
            self._forget()
        if kubelet is None:
            self._wait(f"waiting for the kubelet: {self._settings.kubelet_socket} is not there")
        elif self._call is not None:
            self._finish(now)
        elif self._registered_at is not None:
            self._check_stream(now, self._registered_at)
        elif now >= self._next_try:
            self._register()

    @property
    def watched(self) -> bool:
        """Whether the kubelet has opened its stream since the last registration, and still holds it."""
        return self._streaming_since is not None

    @property
    def contested(self) -> bool:
        """Whether another plugin seems to have taken the name."""
        return self._rival.suspected

    def close(self) -> None:
        self._drop_call()
        self._serving.close()

    # --- registration ----------------------------------------------------------------------------------

    def _register(self) -> None:
        self._mark = self._serving.streams.registering()
        self._channel = rpc.channel(self._host.path(self._settings.kubelet_socket))
        request = pb.RegisterRequest(
            version=rpc.VERSION,
            endpoint=self._settings.endpoint(self._resource),
            resource_name=self._resource,
            options=plugin_options(),
        )
        register = rpc.method(self._channel, rpc.REGISTRATION, "Register")
        self._call = register.future(request, timeout=_REGISTER_SECONDS)
        self._call.add_done_callback(lambda _: self._news())

    def _finish(self, now: float) -> None:
        if not self._call.done():
            return
        code, details = self._call.code(), self._call.details()
        self._drop_call()
        if code == grpc.StatusCode.OK:
            self._registered_at = now
            self._streaming_since = None
            self.registrations += 1
            self._say.reset()
            self._tell("registered with the kubelet")
            self.status = "registered, the kubelet has not asked for devices yet"
            self._check_stream(now, now)
            return
        self._retry(now)
        if code == grpc.StatusCode.UNAVAILABLE:
            self._wait(f"waiting for the kubelet: nobody answers on {self._settings.kubelet_socket}")
        else:
            self._wait(f"the kubelet refused the registration: {details} ({code.name})")

    def _check_stream(self, now: float, registered_at: float) -> None:
        if self._serving.streams.since(self._mark):
            if self._streaming_since is None:
                self._streaming_since = now
                self.status = "registered with the kubelet"
                self._tell("the kubelet watches")
            elif now - self._streaming_since > _STEADY_SECONDS:
                self._recovered()
            self._check_rival(now)
            return
        waited = self._settings.stream_wait_seconds
        if self._streaming_since is not None:
            reason = "the kubelet ended its ListAndWatch stream"
        elif now - registered_at > waited:
            reason = f"the kubelet opened no ListAndWatch stream within {waited:g} s"
        else:
            return
        self._register_again(now, reason)

    def _check_rival(self, now: float) -> None:
        """Say who has taken our name, and take it back when they are gone: nobody else will tell us."""
        taken = self._rival.look(now)
        if self._rival.gone:
            self._register_again(now, f"the other plugin that had registered {self._resource} is gone")
        elif taken != self._taken:
            self._taken = taken
            self.status = taken or "registered with the kubelet"
            if taken:
                hint = f"one of them has to go: ss -xlp src {self._settings.directory}/*"
                self._log.warning(taken, resource=self._resource, hint=hint)

    def _register_again(self, now: float, reason: str) -> None:
        if self._failures < _QUIET_AFTER:
            self._log.warning("registering again", resource=self._resource, reason=reason)
        elif self._failures == _QUIET_AFTER:
            self._log.warning(
                "registering again and again, without another word",
                resource=self._resource,
                reason=reason,
                hint="another plugin may be serving the same resource: "
                f"ls {self._settings.directory}; journalctl -u kubelet",
            )
        self.status = f"not registered: {reason}"
        self._unregister()
        self._retry(now)

    def _recovered(self) -> None:
        if self._failures > _QUIET_AFTER:
            self._log.info("the kubelet keeps watching again", resource=self._resource)
        self._failures = 0

    def _retry(self, now: float) -> None:
        self._next_try = now + min(_FIRST_DELAY * 2**self._failures, _LONGEST_DELAY)
        self._failures = min(self._failures + 1, 10)

    def _forget(self) -> None:
        """Another kubelet, or another socket of ours: what was agreed is void, and so is the waiting."""
        self._drop_call()
        self._unregister()
        self._failures = 0
        self._next_try = 0.0

    def _unregister(self) -> None:
        self._registered_at = None
        self._streaming_since = None
        self._taken = ""
        self._rival.forget()

    def _drop_call(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _tell(self, message: str) -> None:
        if self._failures <= _QUIET_AFTER:
            self._log.info(message, resource=self._resource)

    def _wait(self, reason: str) -> None:
        self.status = reason
        self._say.warning(reason)
