"""The Container Runtime Interface, v1, of containerd (or CRI-O) over its unix socket.

Calls go through `grpc.Channel.unary_unary` with the messages' own serializers, so no generated service code
is needed; every call has a deadline. grpc takes 60 ms to import and is imported when a channel is opened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from gpunode.daemons.grpc_unary import fields, unary_call
from gpunode.daemons.http import decoded
from gpunode.daemons.proto import cri_pb2 as pb
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


# What an image of the CRI's store brings along, read without protobuf's and gRPC's libraries.
#
# The settings are no part of the protocol: containerd and CRI-O both tell them in the verbose status, as
# JSON.

_STATUS = "/runtime.v1.ImageService/ImageStatus"


def image_config(host: Host, socket: str, reference: str, timeout: float) -> dict[str, Any] | None:
    """The image's own settings (Env, Labels, Cmd, ...), None if the daemon doesn't hold it; never pulled.

    `DaemonError` if the daemon gives no answer.
    """
    state = host.socket_state(socket)
    answer = unary_call(host, socket, _STATUS, _request(reference), timeout) if state == "listening" else None
    if answer is None:
        raise DaemonError(f"no answer from {socket} ({state})", code=state)
    try:
        return parse_image(answer)
    except ValueError as error:
        raise DaemonError(f"{socket} answered with what is no image: {error}", code="malformed") from error


def _request(reference: str) -> bytes:
    """ImageStatusRequest: image = 1, a message with the name as its field 1, and verbose = 2."""
    name = reference.encode()
    image = b"\x0a" + _length(len(name)) + name
    return b"\x0a" + _length(len(image)) + image + b"\x10\x01"


def _length(number: int) -> bytes:
    """A base-128 number, as protobuf counts bytes."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def parse_image(answer: bytes) -> dict[str, Any] | None:
    """ImageStatusResponse: image = 1, info = 2 (a map's entries). ValueError for what is none."""
    held = False
    info: Any = None
    for number, value in fields(answer):
        if number == 1:
            held = True
        elif number == 2 and isinstance(value, bytes):
            entry = dict(fields(value))
            if entry.get(1) == b"info" and isinstance(entry.get(2), bytes):
                info = decoded(bytes(entry[2]))
    spec = info.get("imageSpec") if isinstance(info, dict) else None
    config = spec.get("config") if isinstance(spec, dict) else None
    return (config if isinstance(config, dict) else {}) if held else None


# The CRI's lists of what runs, read like cri_status.py without protobuf's and gRPC's libraries.

_CONTAINERS = "/runtime.v1.RuntimeService/ListContainers"
_SANDBOXES = "/runtime.v1.RuntimeService/ListPodSandbox"
# ListContainersRequest.filter (1) .state (2) .state (1) = CONTAINER_RUNNING (1)
_RUNNING = b"\x0a\x04\x12\x02\x08\x01"
_SECONDS = 2.0


@dataclass(frozen=True)
class CriContainer:
    """One running container. `handler` is its pod's runtime handler, empty for the engine's default one."""

    id: str
    name: str
    pod: str
    namespace: str
    image: str
    handler: str


def running_containers(host: Host, socket: str, timeout: float) -> tuple[CriContainer, ...]:
    """Every running container of this engine, in its order; `DaemonError` if it doesn't tell."""
    if not host.live:
        seen = host.recorded("daemons", socket)
        listed = seen.get("containers") if isinstance(seen, dict) else None
        if not isinstance(listed, list):
            raise DaemonError(f"no socket is contacted under --root {host.root}", code="not-live")
        return tuple(_recorded(entry) for entry in listed if isinstance(entry, dict))
    limit = min(timeout, _SECONDS)
    containers = unary_call(host, socket, _CONTAINERS, _RUNNING, limit)
    sandboxes = unary_call(host, socket, _SANDBOXES, b"", limit) if containers is not None else None
    if containers is None or sandboxes is None:
        raise DaemonError(f"{socket} doesn't list its containers", code="daemon")
    try:
        found = parse_lists(containers, sandboxes)
        host.heard("daemons", socket, {"containers": [vars(one) for one in found]})
        return found
    except ValueError as error:
        raise DaemonError(f"{socket} answered with no CRI message: {error}", code="protocol") from error


def parse_lists(containers: bytes, sandboxes: bytes) -> tuple[CriContainer, ...]:
    """ListContainersResponse.containers (1) and ListPodSandboxResponse.items (1), put together."""
    pods = {}
    for item in _messages(sandboxes):
        metadata = dict(fields(_bytes(item.get(2, b""))))
        pods[_text(item, 1)] = (_text(metadata, 1), _text(metadata, 3), _text(item, 7))
    found = []
    for item in _messages(containers):
        pod, namespace, handler = pods.get(_text(item, 2), ("", "", ""))
        name = _text(dict(fields(_bytes(item.get(3, b"")))), 1)
        image = _text(dict(fields(_bytes(item.get(4, b"")))), 1)
        found.append(CriContainer(_text(item, 1), name, pod, namespace, image, handler))
    return tuple(found)


def _messages(answer: bytes) -> list[dict[int, int | bytes]]:
    """Field 1, repeated; of each message the last value of a field, as protobuf takes it."""
    return [dict(fields(_bytes(value))) for number, value in fields(answer) if number == 1]


def _text(message: dict[int, int | bytes], number: int) -> str:
    return _bytes(message.get(number, b"")).decode("utf-8", "replace")


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where the protocol has a text or a message")
    return value


def _recorded(entry: dict[str, Any]) -> CriContainer:
    names = ("id", "name", "pod", "namespace", "image", "handler")
    return CriContainer(*(str(entry.get(key, "")) for key in names))


# Sandboxes, containers and images through the CRI: what it takes to run one program in one pod.
#
# The pod shares the node's network, so no CNI plugin is asked.

LOG_NAME = "container.log"
_SLOW_SECONDS = 60.0
_PodAnswer = TypeVar("_PodAnswer", bound="Message")


@dataclass(frozen=True)
class Pod:
    """One pod of one container. `token` tells it from every other one; `log_directory` is on the node.

    `handler` is empty for the engine's default one. `arguments` replace the image's command and keep its
    entry point. `cgroup_parent` is a slice where systemd keeps the cgroups, empty where runc makes them
    itself. `devices` are CDI names.
    """

    token: str
    handler: str
    image: str
    log_directory: str
    arguments: tuple[str, ...] = ()
    cgroup_parent: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> dict[str, str]:
        """What no other pod carries."""
        return {"gpunode.token": self.token}


@dataclass(frozen=True)
class Exit:
    """How a container ended."""

    code: int
    reason: str
    message: str


def _sandbox(pod: Pod) -> pb.PodSandboxConfig:
    return pb.PodSandboxConfig(
        metadata=pb.PodSandboxMetadata(name="gpunode-verify", uid=pod.token, namespace="gpunode"),
        log_directory=pod.log_directory,
        labels={**pod.labels, **pod.label},
        linux=pb.LinuxPodSandboxConfig(
            cgroup_parent=pod.cgroup_parent,
            security_context=pb.LinuxSandboxSecurityContext(namespace_options=_namespaces()),
        ),
    )


def _namespaces() -> pb.NamespaceOption:
    return pb.NamespaceOption(network=pb.NODE, pid=pb.CONTAINER, ipc=pb.POD)


def start_pod(cri: Cri, pod: Pod) -> str:
    """Run the sandbox and start the container in it; the container's id."""
    config = _sandbox(pod)
    run = pb.RunPodSandboxRequest(config=config, runtime_handler=pod.handler)
    sandbox = _runtime(cri, "RunPodSandbox", run, pb.RunPodSandboxResponse).pod_sandbox_id
    container = pb.ContainerConfig(
        metadata=pb.ContainerMetadata(name="verify"),
        image=pb.ImageSpec(image=pod.image),
        args=pod.arguments,
        envs=[pb.KeyValue(key=key, value=value) for key, value in pod.env.items()],
        labels={**pod.labels, **pod.label},
        log_path=LOG_NAME,
        linux=pb.LinuxContainerConfig(
            security_context=pb.LinuxContainerSecurityContext(namespace_options=_namespaces())
        ),
        CDI_devices=[pb.CDIDevice(name=name) for name in pod.devices],
    )
    create = pb.CreateContainerRequest(pod_sandbox_id=sandbox, config=container, sandbox_config=config)
    made = _runtime(cri, "CreateContainer", create, pb.CreateContainerResponse).container_id
    start = pb.StartContainerRequest(container_id=made)
    _runtime(cri, "StartContainer", start, pb.StartContainerResponse)
    return made


def container_exit(cri: Cri, container: str) -> Exit | None:
    """How it ended, None while it hasn't."""
    request = pb.ContainerStatusRequest(container_id=container)
    status = _runtime(cri, "ContainerStatus", request, pb.ContainerStatusResponse).status
    if status.state not in (pb.CONTAINER_EXITED, pb.CONTAINER_UNKNOWN):
        return None
    return Exit(status.exit_code, status.reason, status.message)


def sandboxes(cri: Cri, label: Mapping[str, str]) -> tuple[str, ...]:
    """Ids of the sandboxes that carry `label`; every sandbox for an empty one."""
    return tuple(labelled_sandboxes(cri, label))


def labelled_sandboxes(cri: Cri, label: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """The same sandboxes, each with all its labels."""
    request = pb.ListPodSandboxRequest(filter=pb.PodSandboxFilter(label_selector=label))
    items = _runtime(cri, "ListPodSandbox", request, pb.ListPodSandboxResponse).items
    return {item.id: dict(item.labels) for item in items}


def remove_sandbox(cri: Cri, sandbox: str) -> None:
    """Kill what runs in it and remove it with its containers; both calls are idempotent by protocol."""
    stop = pb.StopPodSandboxRequest(pod_sandbox_id=sandbox)
    _runtime(cri, "StopPodSandbox", stop, pb.StopPodSandboxResponse)
    remove = pb.RemovePodSandboxRequest(pod_sandbox_id=sandbox)
    _runtime(cri, "RemovePodSandbox", remove, pb.RemovePodSandboxResponse)


def has_image(cri: Cri, reference: str) -> bool:
    """Whether the CRI knows this image; nothing is pulled."""
    request = pb.ImageStatusRequest(image=pb.ImageSpec(image=reference))
    return cri.call("ImageService", "ImageStatus", request, pb.ImageStatusResponse).HasField("image")


def image_names(cri: Cri) -> tuple[str, ...]:
    """Every tag that the CRI knows, sorted."""
    answer = cri.call("ImageService", "ListImages", pb.ListImagesRequest(), pb.ListImagesResponse)
    return tuple(sorted(tag for image in answer.images for tag in image.repo_tags))


def remove_image(cri: Cri, reference: str) -> None:
    """Remove the image behind a name with all its names; one that is gone already is fine by protocol."""
    request = pb.RemoveImageRequest(image=pb.ImageSpec(image=reference))
    cri.call("ImageService", "RemoveImage", request, pb.RemoveImageResponse, _SLOW_SECONDS)


def read_log(text: str) -> tuple[str, str]:
    """Split a CRI log (``TIME STREAM P|F TEXT`` a line; P: the line goes on in the next) by stream."""
    parts: dict[str, list[str]] = {"stdout": [], "stderr": []}
    for line in text.split("\n"):  # a program may print what str.splitlines takes for an end of line
        fields: Sequence[str] = line.split(" ", 3)
        if len(fields) == 4 and fields[1] in parts:
            parts[fields[1]].append(fields[3] + ("" if fields[2].startswith("P") else "\n"))
    return "".join(parts["stdout"]), "".join(parts["stderr"])


def _runtime(cri: Cri, method: str, request: Message, answer: type[_PodAnswer]) -> _PodAnswer:
    return cri.call("RuntimeService", method, request, answer, _SLOW_SECONDS)
