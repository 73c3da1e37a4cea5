"""The way to the kubelet: our own server, registration, and noticing when either has to be done again.

Nothing here waits or reacts to events; `tick` compares what should be with what is, a few times a second:

- our socket is where the kubelet looks for it (a starting kubelet deletes every socket in its directory);
- this very kubelet has accepted our registration: its socket's device, inode *and* change time are
  compared, as a restarted kubelet often gets the same inode number again;
- since that registration the kubelet has opened a ListAndWatch stream, and it is still open. When the
  kubelet ends a stream it disconnects whatever it then finds under the resource's name, so a quick second
  registration can be torn down by the clean-up after the first, and nothing but the missing stream tells.
"""

from __future__ import annotations

import stat
from typing import Any

import grpc

from gpunode.errors import GpunodeError, PreconditionError, Unreadable
from gpunode.host import Host
from gpunode.plugin.kubelet import rpc
from gpunode.plugin.kubelet.server import PluginServer, Policy, plugin_options
from gpunode.plugin.ledger import Feed
from gpunode.plugin.logfmt import Log, OnChange
from gpunode.plugin.proto import deviceplugin_pb2 as pb
from gpunode.plugin.settings import Settings

_REGISTER_SECONDS = 15.0  # the kubelet dials back during the call and gives that 10 s
_FIRST_DELAY = 0.5
_LONGEST_DELAY = 15.0
_STEADY_SECONDS = 30.0  # a stream that lasted this long clears the record of failures
_BIND_DELAY = 1.0
_QUIET_AFTER = 6  # failed registrations in a row
_READ_ONLY = "directory-not-writable"


class KubeletLink:
    """Owns one resource's server and registration. All methods belong to one thread; `status` may be read by
    any."""

    def __init__(
        self, host: Host, settings: Settings, resource: str, feed: Feed, policy: Policy, log: Log
    ) -> None:
        self._host = host
        self._settings = settings
        self._resource = resource
        self._socket = settings.socket(resource)
        self._feed = feed
        self._policy = policy
        self._log = log
        self._say = OnChange(log)
        self._server: PluginServer | None = None
        self._kubelet: tuple[int, int, int] | None = None
        self._call: Any = None
        self._channel: grpc.Channel | None = None
        self._mark = 0  # streams up to this number don't belong to the present registration
        self._registered_at: float | None = None
        self._streaming_since: float | None = None
        self._failures = 0
        self._next_try = 0.0
        self._next_bind = 0.0
        self.registrations = 0
        self.status = "starting"

    def claim(self) -> None:
        """Start serving if the kubelet's directory is there. `PreconditionError` if we never could."""
        rpc.target(self._host.path(self._socket))
        if check_directory(self._host, self._settings):
            self._serve()

    def tick(self) -> None:
        """Bring things one step closer to: serving, registered, watched.

        `PreconditionError` if the directory can't be written (any more): a service's sandbox still holds the
        old one after somebody made it anew, and only a new start opens the new one.
        """
        now = self._host.monotonic()
        try:
            if not self._keep_serving(now):
                return
            kubelet = _identity(self._host, self._settings.kubelet_socket)
        except GpunodeError as error:
            if error.code == _READ_ONLY:
                raise
            self._wait(error.message)
            return
        if kubelet != self._kubelet:
            self._kubelet = kubelet
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
    def expecting(self) -> bool:
        """Whether the kubelet is about to answer or to call: the next tick should come soon."""
        return self._call is not None or (self._registered_at is not None and self._streaming_since is None)

    def close(self) -> None:
        """Stop serving; our socket goes away, which is how the kubelet learns of it."""
        self._drop_call()
        if self._server is not None:
            self._server.stop()

    # --- our socket ------------------------------------------------------------------------------------

    def _has_directory(self) -> bool:
        return _is_directory(self._host, self._settings.directory)

    def _serve(self) -> None:
        if not self._host.writable(self._settings.directory):
            raise PreconditionError(
                f"can't create a socket in {self._settings.directory}",
                hint="run as root, for example with sudo",
                code=_READ_ONLY,
            )
        server = PluginServer(self._host, self._socket, self._feed, self._policy)
        server.start()
        self._server = server
        self._log.info("serving", resource=self._resource, socket=self._socket)

    def _keep_serving(self, now: float) -> bool:
        if self._server is not None:
            state = self._server.socket_is()
            if state == "ours":
                return True
            self._forget()
            if state == "foreign":
                self._wait(f"another device plugin has put its socket at {self._socket}")
                return False
            self._log.warning("our socket was deleted: serving anew", socket=self._socket)
            self._server.stop()
            self._server = None
        if not self._has_directory():
            self._wait(f"waiting for the kubelet: {self._settings.directory} is not there")
            return False
        if now < self._next_bind:
            return False
        self._next_bind = now + _BIND_DELAY
        self._serve()
        self._next_bind = 0.0
        return True

    # --- registration ----------------------------------------------------------------------------------

    def _register(self) -> None:
        assert self._server is not None
        self._mark = self._server.streams.registering()
        self._channel = rpc.channel(self._host.path(self._settings.kubelet_socket))
        request = pb.RegisterRequest(
            version=rpc.VERSION,
            endpoint=self._settings.endpoint(self._resource),
            resource_name=self._resource,
            options=plugin_options(),
        )
        register = rpc.method(self._channel, rpc.REGISTRATION, "Register")
        self._call = register.future(request, timeout=_REGISTER_SECONDS)

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
            return
        self._retry(now)
        if code == grpc.StatusCode.UNAVAILABLE:
            self._wait(f"waiting for the kubelet: nobody answers on {self._settings.kubelet_socket}")
        else:
            self._wait(f"the kubelet refused the registration: {details} ({code.name})")

    def _check_stream(self, now: float, registered_at: float) -> None:
        assert self._server is not None
        if self._server.streams.since(self._mark):
            if self._streaming_since is None:
                self._streaming_since = now
                self.status = "registered with the kubelet"
                self._tell("the kubelet watches")
            elif now - self._streaming_since > _STEADY_SECONDS:
                self._recovered()
            return
        waited = self._settings.stream_wait_seconds
        if self._streaming_since is not None:
            reason = "the kubelet ended its ListAndWatch stream"
        elif now - registered_at > waited:
            reason = f"the kubelet opened no ListAndWatch stream within {waited:g} s"
        else:
            return
        if self._failures < _QUIET_AFTER:
            self._log.warning("registering again", reason=reason)
        elif self._failures == _QUIET_AFTER:
            self._log.warning("registering again and again, without another word", reason=reason)
        self.status = f"not registered: {reason}"
        self._registered_at = None
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
        self._registered_at = None
        self._streaming_since = None
        self._failures = 0
        self._next_try = 0.0

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


def _identity(host: Host, path: str) -> tuple[int, int, int] | None:
    """What changes when a socket is made anew; None if there is no socket."""
    found = host.stat(path)
    if found is None or not stat.S_ISSOCK(found.st_mode):
        return None
    return (found.st_dev, found.st_ino, found.st_ctime_ns)


def check_directory(host: Host, settings: Settings) -> bool:
    """Whether the plugin directory is there. `PreconditionError` if it may not even be looked at."""
    try:
        return _is_directory(host, settings.directory)
    except Unreadable as error:
        raise PreconditionError(error.message, hint="run as root, for example with sudo") from error


def _is_directory(host: Host, path: str) -> bool:
    found = host.stat(path)
    return found is not None and stat.S_ISDIR(found.st_mode)
