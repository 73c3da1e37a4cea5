"""The Container Runtime Interface, v1, of containerd (or CRI-O) over its unix socket.

Calls go through `grpc.Channel.unary_unary` with the messages' own serializers, so no generated service code
is needed; every call has a deadline. grpc takes 60 ms to import and is imported when a channel is opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from gpunode.dataclass import dataclass, field
from gpunode.errors import DaemonError
from gpunode.host import Host

if TYPE_CHECKING:
    import grpc
    from google.protobuf.message import Message

DEFAULT_SOCKET = "/run/containerd/containerd.sock"
ANSWER_SECONDS = 10.0
_Answer = TypeVar("_Answer", bound="Message")
_STATES = {
    "absent": "start {service}: systemctl start {service}",
    "refused": "the socket is there but nobody listens: systemctl restart {service}",
    "denied": "run as root, for example with sudo",
    "not-a-socket": "something else lies where the socket belongs; see the daemon's --address",
}
_CODES = {
    "DEADLINE_EXCEEDED": ("timeout", "the daemon hangs: journalctl -u {service} -n 50"),
    "NOT_FOUND": ("not-found", ""),
    "UNAVAILABLE": ("refused", "it broke off or is starting: journalctl -u {service} -n 50"),
    "CANCELLED": ("cancelled", "run it again"),
}


@dataclass(frozen=True)
class CriStatus:
    """The running daemon's own view: runtime handlers by name, the default one, and the CRI's configuration.

    `config` is empty where the daemon tells none (it is no part of the protocol). `conditions` maps
    ``RuntimeReady``, ``NetworkReady``, ... to whether they hold.
    """

    handlers: tuple[str, ...]
    default_handler: str
    config: dict[str, Any] = field(default_factory=dict)
    conditions: dict[str, bool] = field(default_factory=dict)

    def systemd_cgroup(self, handler: str) -> bool:
        """Whether this handler lets systemd make the cgroups (its option SystemdCgroup)."""
        runtimes = _table(_table(self.config.get("containerd")).get("runtimes"))
        return _table(_table(runtimes.get(handler)).get("options")).get("SystemdCgroup") is True


class Cri:
    """One CRI server, as a context manager; a recorded machine answers `version` and `status`.

    `service` is the systemd service that hints name.
    """

    def __init__(
        self,
        host: Host,
        socket: str = DEFAULT_SOCKET,
        timeout: float = ANSWER_SECONDS,
        service: str = "containerd",
    ) -> None:
        self.host = host
        self.socket = socket
        self.timeout = timeout
        self.service = service
        self._channel: grpc.Channel | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel; nothing happens if none was opened."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def version(self) -> tuple[str, str]:
        """Name and version of the runtime, such as ``("containerd", "1.7.2")``."""
        if not self.host.live:
            name, version = self._recalled("version", list)[:2]
            return str(name), str(version)
        from gpunode.daemons.proto import cri_pb2 as pb

        answer = self.call("RuntimeService", "Version", pb.VersionRequest(), pb.VersionResponse)
        told = (answer.runtime_name, answer.runtime_version)
        self.host.heard("daemons", self.socket, {"version": list(told)})
        return told

    def status(self) -> CriStatus:
        """What the running daemon has loaded (``Status`` with ``verbose``)."""
        if not self.host.live:
            return recorded_status(self._recalled("status", dict))
        if self._channel is None:
            from gpunode.daemons.cri_status import quick_status

            quick = quick_status(self.host, self.socket, self.timeout)
            if quick is not None:
                return self._heard(parse_status(*quick))
        from gpunode.daemons.proto import cri_pb2 as pb

        answer = self.call("RuntimeService", "Status", pb.StatusRequest(verbose=True), pb.StatusResponse)
        status = parse_status(
            answer.info.get("config", ""),
            tuple(handler.name for handler in answer.runtime_handlers),
            {condition.type: condition.status for condition in answer.status.conditions},
        )
        return self._heard(status)

    def _heard(self, status: CriStatus) -> CriStatus:
        told: dict[str, Any] = {
            "handlers": list(status.handlers),
            "defaultHandler": status.default_handler,
            "config": status.config,
            "conditions": status.conditions,
        }
        self.host.heard("daemons", self.socket, {"status": told})
        return status

    def call(
        self, service: str, method: str, request: Message, answer: type[_Answer], timeout: float | None = None
    ) -> _Answer:
        """One unary call of ``runtime.v1``. `DaemonError` for whatever goes wrong."""
        import grpc

        invoke = self._open().unary_unary(
            f"/runtime.v1.{service}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        try:
            result: _Answer = invoke(request, timeout=timeout or self.timeout)
        except grpc.RpcError as error:
            told = explain(error, self.socket, method, self.service)
            problem = {"code": told.code, "message": told.message}
            self.host.heard("daemons", self.socket, {"problem": problem})
            raise told from error
        return result

    def _open(self) -> grpc.Channel:
        if self._channel is None:
            import grpc

            # gRPC itself says "failed to connect to all addresses" for everything; ask the socket first
            state = self.host.socket_state(self.socket)
            if state != "listening":
                hint = _STATES.get(state, "").format(service=self.service)
                raise DaemonError(f"can't reach the CRI at {self.socket}: {state}", hint=hint, code=state)
            # Go's server refuses the percent-encoded socket path that gRPC would send as :authority
            options = (("grpc.default_authority", "localhost"), ("grpc.enable_http_proxy", 0))
            self._channel = grpc.insecure_channel(f"unix:{self.socket}", options=options)
        return self._channel

    def _recalled(self, what: str, kind: type[Any]) -> Any:
        seen = self.host.recorded("daemons", self.socket)
        answer = seen.get(what) if isinstance(seen, dict) else None
        problem = seen.get("problem") if isinstance(seen, dict) else None
        if isinstance(problem, dict) and not answer:
            raise DaemonError(str(problem.get("message", "")), code=str(problem.get("code", "")))
        if not isinstance(answer, kind) or not answer:
            state = self.host.socket_state(self.socket)
            code = state if state in _STATES else "absent"
            hint = _STATES[code].format(service=self.service)
            raise DaemonError(f"no answer from {self.socket} ({state})", hint=hint, code=code)
        return answer


def parse_status(config: str, named: tuple[str, ...], conditions: Mapping[str, bool]) -> CriStatus:
    """Read the verbose status: `config` is containerd's JSON, `named` the handlers of newer protocols.

    containerd 1.x and 2.x both hold the runtimes under ``containerd.runtimes``. An empty name in `named`
    stands for the default handler and is left out.
    """
    import json

    try:
        loaded = json.loads(config) if config else {}
    except (ValueError, RecursionError):
        loaded = {}
    tree = _table(loaded)
    engine = _table(tree.get("containerd"))
    default = engine.get("defaultRuntimeName")
    handlers = dict.fromkeys([*_table(engine.get("runtimes")), *filter(None, named)])
    return CriStatus(tuple(handlers), default if isinstance(default, str) else "", tree, dict(conditions))


def recorded_status(data: Mapping[str, Any]) -> CriStatus:
    """A status as docs/recorded-machines.md describes it; entries of another type count as absent."""
    names = data.get("handlers")
    default = data.get("defaultHandler")
    return CriStatus(
        tuple(name for name in names if isinstance(name, str)) if isinstance(names, list) else (),
        default if isinstance(default, str) else "",
        _table(data.get("config")),
        {name: bool(holds) for name, holds in _table(data.get("conditions")).items()},
    )


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def explain(error: grpc.RpcError, socket: str, method: str, service: str = "containerd") -> DaemonError:
    """A gRPC failure as a person needs it; `code` is what programs branch on."""
    status = error.code() if hasattr(error, "code") else None
    name = status.name if status is not None else "UNKNOWN"
    told = (error.details() if hasattr(error, "details") else "") or name
    if name == "UNIMPLEMENTED" and "unknown service" in told:
        return DaemonError(
            f"the daemon at {socket} runs without its CRI plugin ({told})",
            hint="take cri out of disabled_plugins: gpunode configure-runtime --runtime containerd",
            code="cri-disabled",
        )
    code, hint = _CODES.get(name, ("daemon", "journalctl -u {service} -n 50"))
    return DaemonError(f"{method}: {told}", hint=hint.format(service=service), code=code)
