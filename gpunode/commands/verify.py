"""`gpunode verify`."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from gpunode.commands.options import (
    ConfigOption,
    ContextOption,
    KubeconfigOption,
    NameOption,
    NodeOption,
    ServerOption,
    SocketOption,
)
from gpunode.commands.outcome import Session
from gpunode.commands.session import verb

if TYPE_CHECKING:
    from gpunode.output.result import Result


verify_app = typer.Typer(rich_markup_mode=None)


class Place(StrEnum):
    """Where `verify` runs its kernel."""

    HOST = "host"
    DOCKER = "docker"
    CONTAINERD = "containerd"
    CRIO = "crio"
    PODMAN = "podman"
    K3S = "k3s"
    RKE2 = "rke2"
    K0S = "k0s"
    MICROK8S = "microk8s"
    KUBERNETES = "kubernetes"


TimeoutOption = Annotated[
    float | None,
    typer.Option("--timeout", metavar="SECONDS", min=1, help="For each device, 60; for the whole pod, 300."),
]
NamespaceOption = Annotated[
    str, typer.Option("--namespace", metavar="NAME", help="The pod's; that of the context if not given.")
]
ResourceOption = Annotated[
    str, typer.Option("--resource", metavar="NAME", help="What the pod asks for; nvidia.com/gpu.")
]
ClassOption = Annotated[
    str,
    typer.Option(
        "--runtime-class", metavar="NAME", help="The pod's; empty for none. auto: nvidia if there is one."
    ),
]


@verb(verify_app, "verify", "Verification")
def verify(
    session: Session,
    on: Annotated[Place, typer.Option("--on", help="Where the kernel runs.")] = Place.HOST,
    image: Annotated[
        str, typer.Option("--image", metavar="REF", help="Run this image's own vectoradd instead.")
    ] = "",
    runtime_name: NameOption = "nvidia",
    config: ConfigOption = "",
    socket: SocketOption = "",
    timeout: TimeoutOption = None,
    cdi: Annotated[
        bool, typer.Option("--cdi", help="Give the container its GPUs by CDI, whatever runtime there is.")
    ] = False,
    namespace: NamespaceOption = "",
    resource: ResourceOption = "",
    runtime_class: ClassOption = "auto",
    node: NodeOption = "",
    kubeconfig: KubeconfigOption = "",
    kube_context: ContextOption = "",
    server: ServerOption = "",
) -> "Result":
    """Prove it: compute on every GPU. A CUDA vector-add, compared element by element; MIG devices too.

    On kubernetes NVIDIA's sample runs as a pod of this node, on one GPU; it is followed and removed.

    gpunode verify

    gpunode verify --on containerd

    gpunode verify --on kubernetes --kubeconfig /etc/kubernetes/admin.conf
    """
    from gpunode.commands import verify_node as command

    asked = (namespace, resource, runtime_class, node, kubeconfig, kube_context, server, timeout or 0.0)
    options = command.Options(
        on=on.value,
        image=image,
        timeout=timeout or 60.0,
        runtime_name=runtime_name,
        socket=socket,
        config=config,
        cdi=cdi,
        pod=command.PodAsked(*asked),
    )
    if on is Place.KUBERNETES:
        from gpunode.commands import verify_kubernetes

        command.refuse_contradictions(options)
        return verify_kubernetes.run(session.host, verify_kubernetes.asked(options), session.progress)
    return command.run(session.host, options, session.progress)
