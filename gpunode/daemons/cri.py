"""The Container Runtime Interface, v1, of containerd (or CRI-O) over its unix socket.

Only the messages are generated (proto/cri.proto); calls name their method, and each has a deadline.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from gpunode.daemons.grpc_client import CallError, open_channel, recalled_list, unary_call
from gpunode.daemons.http import decoded
from gpunode.errors import DaemonError
from gpunode.host import Host
from gpunode.host.recording import naming_the_key
from gpunode.output.typed import as_dict, as_text, from_plain, plain

if TYPE_CHECKING:
    import grpc
    from google.protobuf.message import Message
    from typing_extensions import Self

    from gpunode.daemons.proto import cri_pb2 as pb


DEFAULT_SOCKET = "/run/containerd/containerd.sock"
ANSWER_SECONDS = 10.0
_Answer = TypeVar("_Answer", bound="Message")
_STATES = {
    "absent": "start {service}: systemctl start {service}",
    "refused": "no process listens on the socket: systemctl restart {service}",
    "denied": "run as root, for example with sudo",
    "not-a-socket": "another file is at the socket's path; see the daemon's --address",
}
_CODES = {
    "DEADLINE_EXCEEDED": ("timeout", "the daemon hangs: journalctl -u {service} -n 50"),
    "NOT_FOUND": ("not-found", ""),
    "UNAVAILABLE": (
        "refused",
        "the daemon closed the connection or is still starting: journalctl -u {service} -n 50",
    ),
    "CANCELLED": ("cancelled", "run it again"),
}


class CriStatus(NamedTuple):
    """The running daemon's own view: runtime handlers by name, the default one, and the CRI's configuration.

    `config` is empty where the daemon reports none (the protocol doesn't define it). `conditions` maps
    ``RuntimeReady``, ``NetworkReady``, ... to their status.
    """

    handlers: tuple[str, ...] = ()
    default_handler: str = ""
    config: Mapping[str, Any] = MappingProxyType({})
    conditions: Mapping[str, bool] = MappingProxyType({})

    def systemd_cgroup(self, handler: str) -> bool:
        """Whether this handler makes systemd create the cgroups (its option SystemdCgroup)."""
        runtimes = as_dict(as_dict(self.config.get("containerd")).get("runtimes"))
        return as_dict(as_dict(runtimes.get(handler)).get("options")).get("SystemdCgroup") is True


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
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()
        self._channel = None

    def version(self) -> tuple[str, str]:
        """Name and version of the runtime, such as ``("containerd", "1.7.2")``."""
        if not self.host.live:
            name, version = self._recalled("version", list)[:2]
            return str(name), str(version)
        from gpunode.daemons.proto import cri_pb2 as pb

        answer = self.call("RuntimeService", "Version", pb.VersionRequest(), pb.VersionResponse)
        version = (answer.runtime_name, answer.runtime_version)
        self.host.heard("daemons", self.socket, {"version": list(version)})
        return version

    def status(self) -> CriStatus:
        """What the running daemon has loaded (``Status`` with ``verbose``)."""
        if not self.host.live:
            with naming_the_key():
                where = f"daemons.{self.socket}.status"
                return from_plain(CriStatus, self._recalled("status", dict), where=where)
        from gpunode.daemons.proto import cri_pb2 as pb

        answer = self.call("RuntimeService", "Status", pb.StatusRequest(verbose=True), pb.StatusResponse)
        status = parse_status(
            answer.info.get("config", ""),
            tuple(handler.name for handler in answer.runtime_handlers),
            {condition.type: condition.status for condition in answer.status.conditions},
        )
        self.host.heard("daemons", self.socket, {"status": plain(status)})
        return status

    def call(
        self, service: str, method: str, request: Message, answer: type[_Answer], timeout: float | None = None
    ) -> _Answer:
        """One unary call of ``runtime.v1``. `DaemonError` for every failure."""
        try:
            path = f"/runtime.v1.{service}/{method}"
            return unary_call(self._open(), path, request, answer, timeout or self.timeout)
        except CallError as error:
            problem = explain(error, self.socket, method, self.service)
            problem_answer = {"code": problem.code, "message": problem.message}
            self.host.heard("daemons", self.socket, {"problem": problem_answer})
            raise problem from error

    def _open(self) -> grpc.Channel:
        if self._channel is None:
            # gRPC's error is "failed to connect to all addresses" for everything; test the socket first
            state = self.host.socket_state(self.socket)
            if state != "listening":
                hint = _STATES.get(state, "").format(service=self.service)
                raise DaemonError(f"can't reach the CRI at {self.socket}: {state}", hint=hint, code=state)
            self._channel = self._opened.enter_context(open_channel(self.host, self.socket))
        return self._channel

    def _recalled(self, what: str, kind: type[Any]) -> Any:
        seen = as_dict(self.host.recorded("daemons", self.socket))
        answer, problem = seen.get(what), seen.get("problem")
        if isinstance(problem, dict) and not answer:
            raise DaemonError(str(problem.get("message", "")), code=str(problem.get("code", "")))
        if not isinstance(answer, kind) or not answer:
            state = self.host.socket_state(self.socket)
            code = state if state in _STATES else "absent"
            hint = _STATES[code].format(service=self.service)
            raise DaemonError(f"no response from {self.socket} ({state})", hint=hint, code=code)
        return answer


def parse_status(config: str, names: tuple[str, ...], conditions: Mapping[str, bool]) -> CriStatus:
    """Read the verbose status: `config` is containerd's JSON, `names` the handlers of newer protocols.

    containerd 1.x and 2.x both have the runtimes under ``containerd.runtimes``. An empty name in `names`
    means the default handler and is left out.
    """
    tree = as_dict(decoded(config))
    engine = as_dict(tree.get("containerd"))
    handlers = dict.fromkeys([*as_dict(engine.get("runtimes")), *filter(None, names)])
    return CriStatus(tuple(handlers), as_text(engine.get("defaultRuntimeName")), tree, dict(conditions))


def explain(error: CallError, socket: str, method: str, service: str = "containerd") -> DaemonError:
    """A gRPC failure as an error for users; `code` is for programs."""
    if error.code == "UNIMPLEMENTED" and "unknown service" in error.details:
        return DaemonError(
            f"the daemon at {socket} runs without its CRI plugin ({error.details})",
            hint="take cri out of disabled_plugins: gpunode configure-runtime --runtime containerd",
            code="cri-disabled",
        )
    code, hint = _CODES.get(error.code, ("daemon", "journalctl -u {service} -n 50"))
    return DaemonError(f"{method}: {error.details}", hint=hint.format(service=service), code=code)


def running_version(host: Host, socket: str, timeout: float) -> str:
    """The running program's version, as in ``containerd --version``; empty for every kind of failure."""
    from gpunode.daemons.proto import cri_pb2 as pb

    try:
        with open_channel(host, socket) as channel:
            method = "/runtime.v1.RuntimeService/Version"
            return unary_call(
                channel, method, pb.VersionRequest(), pb.VersionResponse, timeout
            ).runtime_version
    except (DaemonError, CallError):
        return ""


# Settings of an image in the CRI's store.
#
# They aren't part of the protocol: containerd and CRI-O both put them into the verbose status, as JSON.


def image_config(host: Host, socket: str, reference: str, timeout: float) -> dict[str, Any] | None:
    """The image's own settings (Env, Labels, Cmd, ...), None if the daemon doesn't have it; never pulled.

    `DaemonError` if the daemon doesn't answer.
    """
    from gpunode.daemons.proto import cri_pb2 as pb

    with Cri(host, socket, timeout) as cri:
        request = pb.ImageStatusRequest(image=pb.ImageSpec(image=reference), verbose=True)
        answer = cri.call("ImageService", "ImageStatus", request, pb.ImageStatusResponse)
    if not answer.HasField("image"):
        return None
    spec = as_dict(decoded(answer.info.get("info", ""))).get("imageSpec")
    return as_dict(as_dict(spec).get("config"))


# Running containers, by the CRI's lists.

_LIST_SECONDS = 2.0


class CriContainer(NamedTuple):
    """One running container. `handler` is its pod's runtime handler, empty for the engine's default one."""

    id: str = ""
    name: str = ""
    pod: str = ""
    namespace: str = ""
    image: str = ""
    handler: str = ""


def running_containers(host: Host, socket: str, timeout: float) -> tuple[CriContainer, ...]:
    """Every running container of this engine, in its order; `DaemonError` if it doesn't report them."""
    if not host.live:
        return recalled_list(host, socket, "containers", CriContainer)
    from gpunode.daemons.proto import cri_pb2 as pb

    running = pb.ContainerFilter(state=pb.ContainerStateValue(state=pb.CONTAINER_RUNNING))
    request = pb.ListContainersRequest(filter=running)
    with Cri(host, socket, min(timeout, _LIST_SECONDS)) as cri:
        containers = cri.call("RuntimeService", "ListContainers", request, pb.ListContainersResponse)
        sandboxes = cri.call(
            "RuntimeService", "ListPodSandbox", pb.ListPodSandboxRequest(), pb.ListPodSandboxResponse
        )
    listed = combine(containers, sandboxes)
    host.heard("daemons", socket, {"containers": plain(listed)})
    return listed


def combine(
    containers: pb.ListContainersResponse, sandboxes: pb.ListPodSandboxResponse
) -> tuple[CriContainer, ...]:
    """Each container with the names and the runtime handler of its pod."""
    from gpunode.daemons.proto import cri_pb2 as pb

    pods = {pod.id: pod for pod in sandboxes.items}
    listed = []
    for container in containers.containers:
        pod = pods.get(container.pod_sandbox_id, pb.PodSandbox())
        listed.append(
            CriContainer(
                container.id,
                container.metadata.name,
                pod.metadata.name,
                pod.metadata.namespace,
                container.image.image,
                pod.runtime_handler,
            )
        )
    return tuple(listed)
