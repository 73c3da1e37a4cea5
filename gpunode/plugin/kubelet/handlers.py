"""The five RPCs of a device plugin: thin, with all policy behind `Policy`, and no bug gets out of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import grpc

from gpunode.plugin.kubelet.rpc import Handler, Refused
from gpunode.plugin.kubelet.streams import Streams
from gpunode.plugin.ledger import Feed
from gpunode.plugin.logfmt import Log, Rarely
from gpunode.plugin.model import AllocationError, Answer, Snapshot
from gpunode.plugin.proto import deviceplugin_pb2 as pb

_STATUS = {"not-found": "NOT_FOUND", "invalid": "INVALID_ARGUMENT", "unhealthy": "FAILED_PRECONDITION"}
_REASON = 500  # characters of a reason in the log
_LISTED = 16  # devices of an allocation in the log


class Policy(Protocol):
    """What the handlers ask: which devices to prefer, and what a container gets. `AllocationError` says why
    not."""

    def answer(self, snapshot: Snapshot, ids: Sequence[str]) -> Answer: ...

    def prefer(
        self, snapshot: Snapshot, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> Sequence[str]: ...


class Call(NamedTuple):
    """One RPC that was answered. `code` is gRPC's (OK, NOT_FOUND, ...), `devices` how many were asked for.

    A ListAndWatch is told when its stream has ended. `fallback` is set where a preference came from the
    simple rule because the good one failed.
    """

    resource: str
    method: str
    code: str
    seconds: float
    devices: int = 0
    fallback: bool = False


Observer = Callable[[Call], None]


def plugin_options() -> pb.DevicePluginOptions:
    """What the kubelet may ask of this plugin."""
    return pb.DevicePluginOptions(pre_start_required=False, get_preferred_allocation_available=True)


def device_list(table: Snapshot) -> pb.ListAndWatchResponse:
    """The whole list as the kubelet wants it: exactly one NUMA node, or no topology at all."""
    response = pb.ListAndWatchResponse()
    for device in table.devices:
        item = response.devices.add(ID=device.id, health="Healthy" if device.healthy else "Unhealthy")
        if device.unit.numa is not None:
            item.topology.nodes.add(ID=device.unit.numa)
    return response


def container_response(answer: Answer) -> pb.ContainerAllocateResponse:
    """The answer as the kubelet takes it."""
    return pb.ContainerAllocateResponse(
        envs=answer.envs,
        mounts=[
            pb.Mount(container_path=item.container, host_path=item.host, read_only=item.read_only)
            for item in answer.mounts
        ],
        devices=[
            pb.DeviceSpec(container_path=item.container, host_path=item.host, permissions=item.permissions)
            for item in answer.nodes
        ],
        annotations=answer.annotations,
        cdi_devices=[pb.CDIDevice(name=name) for name in answer.cdi],
    )


class DevicePlugin:
    """The RPC handlers of one resource."""

    def __init__(self, feed: Feed, streams: Streams, policy: Policy, log: Log, observe: Observer) -> None:
        self._feed = feed
        self._streams = streams
        self._policy = policy
        self._log = log
        self._rarely = Rarely(60.0)
        self._observe = observe

    @property
    def functions(self) -> dict[str, Handler]:
        """By method name, each one watched over."""
        return {
            "GetDevicePluginOptions": self._guarded("GetDevicePluginOptions", lambda _: plugin_options()),
            "ListAndWatch": self.list_and_watch,
            "GetPreferredAllocation": self.get_preferred,
            "Allocate": self._guarded("Allocate", self.allocate),
            "PreStartContainer": self._guarded("PreStartContainer", lambda _: pb.PreStartContainerResponse()),
        }

    def list_and_watch(
        self, request: pb.Empty, context: grpc.ServicerContext
    ) -> Iterator[pb.ListAndWatchResponse]:
        """The list now, and again after every change, until either side ends the stream."""
        started = time.perf_counter()
        number = self._streams.open()
        if not context.add_callback(lambda: self._streams.close(number)):
            self._streams.close(number)  # the client has gone already
        version = -1
        try:
            while snapshot := self._feed.wait_newer(version, lambda: self._streams.is_open(number)):
                version = snapshot.version
                yield device_list(snapshot)
        finally:
            self._streams.close(number)
            self._tell("ListAndWatch", "OK", started)

    def get_preferred(
        self, request: pb.PreferredAllocationRequest, context: grpc.ServicerContext
    ) -> pb.PreferredAllocationResponse:
        """Never an error: the kubelet would refuse the pod for it."""
        started, failed = time.perf_counter(), False
        table = self._feed.snapshot()
        response = pb.PreferredAllocationResponse()
        for asked in request.container_requests:
            available, must = asked.available_deviceIDs, asked.must_include_deviceIDs
            try:
                ids = self._policy.prefer(table, available, must, asked.allocation_size)
                answer = pb.ContainerPreferredAllocationResponse(deviceIDs=ids)
            except Exception as error:  # noqa: BLE001 - any devices are better than a pod that is refused
                failed = True
                self._bug("choosing devices failed: the first ones are preferred", error)
                ids = simply(available, must, asked.allocation_size)
                answer = pb.ContainerPreferredAllocationResponse(deviceIDs=ids)
            response.container_responses.append(answer)
        self._tell("GetPreferredAllocation", "OK", started, _asked(request), failed)
        return response

    def allocate(self, request: pb.AllocateRequest) -> pb.AllocateResponse:
        table = self._feed.snapshot()
        response = pb.AllocateResponse()
        try:
            for asked in request.container_requests:
                answer = self._policy.answer(table, asked.devices_ids)
                response.container_responses.append(container_response(answer))
                devices = _shortened(asked.devices_ids)
                self._log.info("allocated", resource=table.resource.name, devices=devices)
        except AllocationError as error:
            raise Refused(_STATUS.get(error.code, "INVALID_ARGUMENT"), error.message) from error
        return response

    # --- watching over them ----------------------------------------------------------------------------

    def _guarded(self, name: str, function: Callable[[Any], Any]) -> Handler:
        """A unary RPC: timed, and a bug becomes an error that names its cause."""

        def call(request: Any, context: grpc.ServicerContext) -> Any:
            started, code = time.perf_counter(), "OK"
            try:
                return function(request)
            except Refused as refused:
                code = refused.status
                self._warn(f"{name} refused", refused.message[:_REASON])
                raise
            except Exception as error:
                code = "INTERNAL"
                self._bug(f"{name} failed", error)
                raise Refused(code, f"a bug in gpunode: {type(error).__name__}: {error}") from error
            finally:
                self._tell(name, code, started, _asked(request))

        return call

    @property
    def _resource(self) -> str:
        return self._feed.snapshot().resource.name

    def _warn(self, message: str, reason: str) -> None:
        if times := self._rarely.times((message, reason)):
            self._log.warning(message, resource=self._resource, reason=reason, times=times)

    def _bug(self, message: str, error: Exception) -> None:
        where = error.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        at = f"{where.tb_frame.f_code.co_filename}:{where.tb_lineno}" if where is not None else ""
        reason = f"{type(error).__name__}: {error}"[:_REASON]
        if times := self._rarely.times((message, reason, at)):
            self._log.error(message, resource=self._resource, reason=reason, at=at, times=times)

    def _tell(self, method: str, code: str, started: float, devices: int = 0, fallback: bool = False) -> None:
        self._observe(Call(self._resource, method, code, time.perf_counter() - started, devices, fallback))


def simply(available: Sequence[str], must_include: Sequence[str], size: int) -> tuple[str, ...]:
    """What must be there, then what comes first."""
    return tuple(dict.fromkeys([*must_include, *available]))[: max(0, size)]


def _shortened(ids: Sequence[str]) -> str:
    """The ids for a log line; whose they are the kubelet doesn't tell a plugin."""
    more = f" and {len(ids) - _LISTED} more" if len(ids) > _LISTED else ""
    return ",".join(ids[:_LISTED]) + more


def _asked(request: Any) -> int:
    """How many devices a request is about, where it is about any."""
    if isinstance(request, pb.AllocateRequest):
        return sum(len(one.devices_ids) for one in request.container_requests)
    if isinstance(request, pb.PreferredAllocationRequest):
        return sum(one.allocation_size for one in request.container_requests)
    return 0
