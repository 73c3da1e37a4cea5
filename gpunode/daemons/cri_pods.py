"""Sandboxes, containers and images through the CRI: the calls for running one program in one pod.

The pod shares the node's network, so no CNI plugin is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from gpunode.daemons.cri import Cri
from gpunode.daemons.proto import cri_pb2 as pb

if TYPE_CHECKING:
    from google.protobuf.message import Message

LOG_NAME = "container.log"
_SLOW_SECONDS = 60.0
_Response = TypeVar("_Response", bound="Message")


class Pod(NamedTuple):
    """One pod of one container. `token` identifies it; `log_directory` is on the node.

    `handler` is empty for the engine's default one. `arguments` replace the image's command and keep its
    entry point. `cgroup_parent` is a slice where systemd manages the cgroups, empty where runc creates them
    itself. `devices` are CDI names.
    """

    token: str
    handler: str
    image: str
    log_directory: str
    arguments: tuple[str, ...] = ()
    cgroup_parent: str = ""
    env: Mapping[str, str] = MappingProxyType({})
    devices: tuple[str, ...] = ()
    labels: Mapping[str, str] = MappingProxyType({})

    @property
    def label(self) -> dict[str, str]:
        """The label that no other pod has."""
        return {"gpunode.token": self.token}


class Exit(NamedTuple):
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
    """Run the sandbox and start the container in it; return the container's id."""
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
    container_id = _runtime(cri, "CreateContainer", create, pb.CreateContainerResponse).container_id
    start = pb.StartContainerRequest(container_id=container_id)
    _runtime(cri, "StartContainer", start, pb.StartContainerResponse)
    return container_id


def container_exit(cri: Cri, container: str) -> Exit | None:
    """How it ended, None while it runs."""
    request = pb.ContainerStatusRequest(container_id=container)
    status = _runtime(cri, "ContainerStatus", request, pb.ContainerStatusResponse).status
    if status.state not in (pb.CONTAINER_EXITED, pb.CONTAINER_UNKNOWN):
        return None
    return Exit(status.exit_code, status.reason, status.message)


def sandboxes(cri: Cri, label: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Ids of the sandboxes with `label`, of every sandbox for an empty one, each with all its labels."""
    request = pb.ListPodSandboxRequest(filter=pb.PodSandboxFilter(label_selector=label))
    items = _runtime(cri, "ListPodSandbox", request, pb.ListPodSandboxResponse).items
    return {item.id: dict(item.labels) for item in items}


def remove_sandbox(cri: Cri, sandbox: str) -> None:
    """Kill its processes and remove it with its containers; both calls are idempotent by protocol."""
    stop = pb.StopPodSandboxRequest(pod_sandbox_id=sandbox)
    _runtime(cri, "StopPodSandbox", stop, pb.StopPodSandboxResponse)
    remove = pb.RemovePodSandboxRequest(pod_sandbox_id=sandbox)
    _runtime(cri, "RemovePodSandbox", remove, pb.RemovePodSandboxResponse)


def has_image(cri: Cri, reference: str) -> bool:
    """Whether the CRI has this image; nothing is pulled."""
    request = pb.ImageStatusRequest(image=pb.ImageSpec(image=reference))
    return cri.call("ImageService", "ImageStatus", request, pb.ImageStatusResponse).HasField("image")


def image_names(cri: Cri) -> tuple[str, ...]:
    """Every tag that the CRI has, sorted."""
    answer = cri.call("ImageService", "ListImages", pb.ListImagesRequest(), pb.ListImagesResponse)
    return tuple(sorted(tag for image in answer.images for tag in image.repo_tags))


def remove_image(cri: Cri, reference: str) -> None:
    """Remove the image of a name with all its names; the protocol allows a missing one."""
    request = pb.RemoveImageRequest(image=pb.ImageSpec(image=reference))
    cri.call("ImageService", "RemoveImage", request, pb.RemoveImageResponse, _SLOW_SECONDS)


def read_log(text: str) -> tuple[str, str]:
    """Split a CRI log (lines ``TIME STREAM P|F TEXT``; P: the line continues in the next) by stream."""
    parts: dict[str, list[str]] = {"stdout": [], "stderr": []}
    for line in text.split("\n"):  # str.splitlines also splits at other characters
        fields: Sequence[str] = line.split(" ", 3)
        if len(fields) == 4 and fields[1] in parts:
            parts[fields[1]].append(fields[3] + ("" if fields[2].startswith("P") else "\n"))
    return "".join(parts["stdout"]), "".join(parts["stderr"])


def _runtime(cri: Cri, method: str, request: Message, answer: type[_Response]) -> _Response:
    return cri.call("RuntimeService", method, request, answer, _SLOW_SECONDS)
