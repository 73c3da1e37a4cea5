"""Registration through the kubelet's own socket, and detection of its loss.

`tick` compares the desired state with the actual one, each second while all is well and more often otherwise,
and never blocks:

- our socket exists where the kubelet looks for it (a starting kubelet deletes every socket in its directory);
- this kubelet has accepted our registration: the device, inode *and* change time of its socket are compared,
  as a restarted kubelet often gets the same inode number again;
- since that registration the kubelet has opened a ListAndWatch stream, and the stream is still open. When a
  stream ends the kubelet disconnects the client that it then has under the resource's name, so the cleanup
  after a first registration can tear down a quick second one, and only the missing stream shows it;
- the kubelet lists our devices. Another plugin that registers our resource replaces us without a word, and
  our stream stays open; when that plugin exits the kubelet has nothing to allocate, and our stream is open.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any

import grpc

from gpunode.daemons.grpc_client import CallError, channel_to
from gpunode.daemons.pod_resources import query_allocatable
from gpunode.errors import GpunodeError
from gpunode.facts.kubelet import NAME, read_checkpoint
from gpunode.host import Host
from gpunode.plugin.config.settings import Settings, pod_resources_socket
from gpunode.plugin.kubelet import server
from gpunode.plugin.kubelet.link import READ_ONLY, Link, Serving, identity, is_socket, registry_sockets
from gpunode.plugin.kubelet.server import LinkContext, plugin_options
from gpunode.plugin.ledger import Feed
from gpunode.plugin.proto import deviceplugin_pb2 as pb

_REGISTER_SECONDS = 15.0  # the kubelet dials back during the call and allows 10 s for that
_FIRST_DELAY = 0.1  # the kubelet's cleanup after a stream that ended is usually over by then
_LONGEST_DELAY = 15.0
_STEADY_SECONDS = 30.0  # a stream that lasted this long clears the record of failures
_QUIET_AFTER = 6  # failed registrations in a row
_POD_RESOURCES_SECONDS = 2.0
_SHOWN = 3  # device ids of another plugin in a message
_NONE_LISTED = "the kubelet lists none of our devices"


class AllocatableCheck:
    """Compares the devices that the kubelet lists for a resource with ours.

    The source is PodResources; where it can't be queried, the kubelet's checkpoint, if the kubelet has
    written that since our registration. PodResources counts only once it has listed a device of ours or of
    the checkpoint: it could be another kubelet's socket. Another plugin that uses our device ids is not
    detected.

    Another plugin's devices instead of ours are proof at the first check, which comes as soon as the kubelet
    has written its checkpoint: a later list of ours replaces them, and after that plugin's exit it hides the
    loss for as long as the kubelet waits for an endpoint to return (5 minutes). No devices at all, or those
    that we advertised before, are proof if a check at least `again` seconds later finds the same and our list
    didn't change in between, because our own list may be on its way.
    """

    settle = 0.5  # seconds until the first check: our own list may still be on its way
    again = 1.0
    every = 30.0  # seconds between checks without events
    alert = 2.0  # the same for some time after a loss: the kubelet gives no sign when the other plugin exits
    alert_for = 600.0

    def __init__(
        self, host: Host, settings: Settings, resource: str, feed: Feed, news: Callable[[], None]
    ) -> None:
        self._host = host
        self._resource = resource
        self._feed = feed
        self._news = news
        self._directory = settings.directory
        self._socket = pod_resources_socket(settings.kubelet_socket, settings.pod_resources_socket)
        self._trusted = False
        self._answer: SimpleQueue[frozenset[str] | None] | None = None  # of the query in progress
        self._before: tuple[int, int] | None = None
        self._written: tuple[int, int] | None = None
        self._next = 0.0
        self._settled = 0.0
        self._alert_until = 0.0
        self._missing_since: float | None = None  # the first of the checks that found none of our devices
        self._advertised: set[str] = set()  # ids that we have advertised at any time
        self._version = 0  # of the snapshot that was added last
        self.listed: frozenset[str] = frozenset()
        self.lost = False  # the kubelet allocates none of our devices: we must register again

    def registering(self) -> None:
        """Ignore checkpoints from before this moment."""
        self._before = self._written = self._checkpoint()

    def start(self, now: float) -> None:
        """The kubelet has opened its stream."""
        self.stop()
        self._next = self._settled = now + self.settle

    def stop(self) -> None:
        """Forget the previous checks, and the one in progress."""
        self._missing_since, self.lost = None, False
        self._answer = None

    def look(self, now: float) -> None:
        """Query the kubelet if it is due, and evaluate its answer if there is one."""
        snapshot = self._feed.snapshot()
        if snapshot.version != self._version:
            self._version = snapshot.version
            self._advertised.update(snapshot.by_id)
            self._missing_since = None
        if self._answer is not None:
            if self._answer.empty():
                return
            answer, self._answer = self._answer, None
            self._evaluate(now, answer.get())
        written = self._checkpoint()
        if written != self._written:  # the kubelet writes it after each list of any plugin
            self._written = written
            self._next = min(self._next, max(now, self._settled))
        if now >= self._next:
            if is_socket(self._host, self._socket):
                self._answer = SimpleQueue()
                Thread(target=self._query, args=(self._answer,), name="pod-resources", daemon=True).start()
            else:
                self._evaluate(now, None)

    def _query(self, answer: SimpleQueue[frozenset[str] | None]) -> None:
        """Runs in a thread of its own, because `look` must not block."""
        listed = None
        try:
            with channel_to(self._host.path(self._socket)) as channel:
                devices = query_allocatable(channel, _POD_RESOURCES_SECONDS)
            listed = frozenset(devices.get(self._resource, ()))
        except CallError:
            pass  # the kubelet's checkpoint is read instead
        finally:
            answer.put(listed)
            self._news()

    def _evaluate(self, now: float, listed: frozenset[str] | None) -> None:
        own_ids = {device.id for device in self._feed.snapshot().devices if device.healthy}
        if listed is None or not self._trusted:
            written = self._read_checkpoint()
            if listed and not listed.isdisjoint(written | own_ids):
                self._trusted = True
            else:  # the checkpoint counts if it was written since our registration
                listed = written if written and self._checkpoint() != self._before else None
        self.listed = listed or frozenset()
        if listed is None or not own_ids or not listed.isdisjoint(own_ids):
            self._missing_since, self.lost = None, False
            self._next = now + (self.alert if now < self._alert_until else self.every)
            return
        if self._missing_since is None:
            self._missing_since = now
        foreign = not listed <= self._advertised
        self.lost = foreign or now - self._missing_since >= self.again
        self._alert_until = now + self.alert_for
        self._next = now + self.again

    def _read_checkpoint(self) -> frozenset[str]:
        try:
            checkpoint = read_checkpoint(self._host, self._directory)
        except GpunodeError:
            return frozenset()
        return frozenset(checkpoint.healthy.get(self._resource, ()) if checkpoint else ())

    def _checkpoint(self) -> tuple[int, int] | None:
        try:
            status = self._host.stat(f"{self._directory}/{NAME}")
        except GpunodeError:
            return None
        return None if status is None else (status.st_ino, status.st_mtime_ns)


class KubeletLink(Link):
    """See `Link`."""

    def __init__(self, context: LinkContext, resource: str, feed: Feed) -> None:
        super().__init__(context, resource, Serving(context, context.settings.socket(resource), feed))
        self._allocatable = AllocatableCheck(context.host, context.settings, resource, feed, context.news)
        self._generation = 0
        self._kubelet: tuple[int, int, int] | None = None
        self._channel: grpc.Channel | None = None
        self._call: Any = None  # the Register in progress, on `_channel`
        self._mark = 0  # streams up to this number don't belong to the present registration
        self._registered_at: float | None = None
        self._streaming_since: float | None = None
        self._failures = 0
        self._next_try = 0.0

    def claim(self) -> None:
        self._make_directory()
        self._serving.claim(registry_sockets(self._host, self._settings, self._resource))

    def tick(self) -> None:
        now = self._host.monotonic()
        try:
            self._make_directory()
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
        """Whether the kubelet has an open stream since the last registration, and lists our devices."""
        return self._streaming_since is not None

    def close(self) -> None:
        self._drop_call()
        super().close()

    def _make_directory(self) -> None:
        """Wait for the kubelet to create its directory; without a kubelet create it."""
        if not self._settings.kubelet_socket and not self._host.is_dir(self._settings.directory):
            self._host.make_dirs(self._settings.directory, 0o750)

    # --- registration ----------------------------------------------------------------------------------

    def _register(self) -> None:
        self._mark = self._serving.streams.registering()
        self._allocatable.registering()
        request = pb.RegisterRequest(
            version=server.VERSION,
            endpoint=self._settings.endpoint(self._resource),
            resource_name=self._resource,
            options=plugin_options(),
        )
        self._channel = channel_to(self._host.path(self._settings.kubelet_socket))
        register = server.method(self._channel, server.REGISTRATION, "Register")
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
            self._report("registered with the kubelet")
            self.status = "registered, the kubelet has not requested devices yet"
            self._check_stream(now, now)
            return
        self._retry(now)
        if code == grpc.StatusCode.UNAVAILABLE:
            self._wait(f"waiting for the kubelet: no process listens on {self._settings.kubelet_socket}")
        else:
            self._wait(f"the kubelet refused the registration: {details} ({code.name})")

    def _check_stream(self, now: float, registered_at: float) -> None:
        if self._serving.streams.since(self._mark):
            if self._streaming_since is None:
                self.status = "registered with the kubelet"  # first: other threads read it once `watched`
                self._streaming_since = now
                self._allocatable.start(now)
                self._report("the kubelet watches")
            elif now - self._streaming_since > _STEADY_SECONDS:
                self._recovered()
            self._check_devices(now)
            return
        waited = self._settings.stream_wait_seconds
        if self._streaming_since is not None:
            reason = "the kubelet ended its ListAndWatch stream"
        elif now - registered_at > waited:
            reason = f"the kubelet opened no ListAndWatch stream within {waited:g} s"
        else:
            return
        self._register_again(now, reason)

    def _check_devices(self, now: float) -> None:
        """Register again if the kubelet has lost our devices: it doesn't notify the plugin of that."""
        self._allocatable.look(now)
        if not self._allocatable.lost:
            return
        devices = sorted(self._allocatable.listed)
        shown_ids = ", ".join(devices[:_SHOWN]) + (" ..." if len(devices) > _SHOWN else "")
        reason = f"the kubelet allocates another plugin's devices: {shown_ids}" if devices else _NONE_LISTED
        self._register_again(now, reason)
        self.status = f"registered, but {reason}"

    def _register_again(self, now: float, reason: str) -> None:
        if self._failures < _QUIET_AFTER:
            self._log.warning("registering again", resource=self._resource, reason=reason)
        elif self._failures == _QUIET_AFTER:
            self._log.warning(
                "registering repeatedly; further attempts are not logged",
                resource=self._resource,
                reason=reason,
                hint="another plugin may serve the same resource: "
                f"ss -xlp src {self._settings.directory}/*; journalctl -u kubelet",
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
        """Another kubelet, or a new socket of ours: the registration is void, and the delay is reset."""
        self._drop_call()
        self._unregister()
        self._failures = 0
        self._next_try = 0.0

    def _unregister(self) -> None:
        self._registered_at = None
        self._streaming_since = None
        self._allocatable.stop()

    def _drop_call(self) -> None:
        """Close its channel, which cancels it unless it is done."""
        if self._channel is not None:
            self._channel.close()
            self._channel = self._call = None

    def _report(self, message: str) -> None:
        if self._failures <= _QUIET_AFTER:
            self._log.info(message, resource=self._resource)
