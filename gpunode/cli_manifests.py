"""`gpunode manifests ...`: which objects can be printed; the commands are imported when they run."""

# no `from __future__ import annotations`: Typer reads these annotations as objects

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from gpunode.commands.outcome import Session
from gpunode.commands.session import verb

if TYPE_CHECKING:
    from gpunode.output.result import Result

manifests_app = typer.Typer(help="Print Kubernetes objects.", no_args_is_help=True, rich_markup_mode=None)


class Vendor(StrEnum):
    """Whose GPUs."""

    NVIDIA = "nvidia"
    AMD = "amd"


class Mig(StrEnum):
    """MIG strategies of the plugin."""

    NONE = "none"
    SINGLE = "single"
    MIXED = "mixed"


class Sink(StrEnum):
    """Where the plugin keeps the node's labels."""

    NODE = "node"
    NODE_FEATURE = "node-feature"
    FILE = "file"


ImageOption = Annotated[
    str,
    typer.Option(
        "--image",
        metavar="REF",
        help="An image with gpunode in it; without it gpunode:VERSION, which the nodes must have.",
    ),
]
VendorOption = Annotated[Vendor, typer.Option("--vendor", help="Whose GPUs.")]
NamespaceOption = Annotated[str, typer.Option("--namespace", metavar="NAME", help="Where the plugin lives.")]
ClassOption = Annotated[
    str,
    typer.Option(
        "--runtime-class", metavar="NAME", help="The RuntimeClass; empty where nvidia is the default."
    ),
]
MigOption = Annotated[Mig | None, typer.Option("--mig", help="How MIG devices are advertised.")]
MpsOption = Annotated[
    int, typer.Option("--mps", metavar="N", min=0, max=48, help="Share each GPU by MPS, with N clients.")
]
CdiOption = Annotated[bool, typer.Option("--cdi", help="Give containers their GPUs by CDI.")]
FileOption = Annotated[
    str, typer.Option("--config-file", metavar="FILE", help="A config file of the plugin, for its ConfigMap.")
]
DriverRootOption = Annotated[
    str, typer.Option("--driver-root", metavar="PATH", help="Where the driver is installed on the nodes.")
]
KubeletRootOption = Annotated[
    str, typer.Option("--kubelet-root", metavar="PATH", help="The kubelet's --root-dir.")
]
PortOption = Annotated[
    int,
    typer.Option(
        "--metrics-port", metavar="PORT", min=0, max=65535, help="Serve metrics and probes; 0: neither."
    ),
]
SecretOption = Annotated[
    str, typer.Option("--image-pull-secret", metavar="NAME", help="The registry's secret.")
]
TaintOption = Annotated[bool, typer.Option("--taint", help="Keep pods without GPUs off the node.")]
LabelsOption = Annotated[
    list[Sink] | None,
    typer.Option("--labels", help="Keep the node's labels as well: there (repeatable)."),
]
ResourceOption = Annotated[str, typer.Option("--resource", metavar="NAME", help="What the pod asks for.")]


@verb(manifests_app, "all", "Manifests")
def manifests_all(
    session: Session,
    image: ImageOption = "",
    vendor: VendorOption = Vendor.NVIDIA,
    namespace: NamespaceOption = "kube-system",
    runtime_class: ClassOption = "nvidia",
    mig: MigOption = None,
    mps: MpsOption = 0,
    cdi: CdiOption = False,
    config_file: FileOption = "",
    driver_root: DriverRootOption = "",
    kubelet_root: KubeletRootOption = "/var/lib/kubelet",
    metrics_port: PortOption = 0,
    image_pull_secret: SecretOption = "",
    labels: LabelsOption = None,
    node: Annotated[
        str, typer.Option("--node", metavar="NAME", help="Print this Node too, and bind the pod to it.")
    ] = "",
    taint: TaintOption = False,
    test_image: Annotated[
        str, typer.Option("--test-image", metavar="REF", help="The pod's; NVIDIA's newest sample without.")
    ] = "",
    resource: ResourceOption = "",
) -> "Result":
    """Print everything: RuntimeClass, account, plugin, pod. In an order that a cluster takes.

    gpunode manifests all --image registry.example.com/gpunode:1.0 | kubectl apply -f -
    """
    from gpunode.commands import manifests as command

    options = command.PluginOptions(
        image=image,
        vendor=vendor.value,
        namespace=namespace,
        runtime_class=runtime_class,
        mig=mig.value if mig else "",
        mps=mps,
        cdi=cdi,
        config_file=config_file,
        driver_root=driver_root,
        kubelet_root=kubelet_root,
        metrics_port=metrics_port,
        pull_secret=image_pull_secret,
        labels=tuple(one.value for one in labels or ()),
    )
    return command.everything(session.host, options, node, taint, test_image, resource)


NameOption = Annotated[
    str,
    typer.Option(
        *("--nvidia-runtime-name", "--runtime-class"),
        metavar="NAME",
        help="What the runtime is called in the engine, and its RuntimeClass too.",
    ),
]


@verb(manifests_app, "runtime-class", "Manifests")
def manifests_runtime_class(
    session: Session,
    nvidia_runtime_name: NameOption = "nvidia",
    also: Annotated[
        str,
        typer.Option("--also", metavar="VARIANTS", help="Variants to print too: cdi, legacy; or cdi,legacy."),
    ] = "",
) -> "Result":
    """Print RuntimeClass objects. By them pods choose the nvidia runtime; nothing is contacted.

    gpunode manifests runtime-class --also cdi | kubectl apply -f -
    """
    from gpunode.commands import manifests as command

    return command.run(session.host, command.Options(nvidia_runtime_name, also), session.progress)


@verb(manifests_app, "daemon-set", "Manifests")
def manifests_daemon_set(
    session: Session,
    image: ImageOption = "",
    vendor: VendorOption = Vendor.NVIDIA,
    namespace: NamespaceOption = "kube-system",
    runtime_class: ClassOption = "nvidia",
    mig: MigOption = None,
    mps: MpsOption = 0,
    cdi: CdiOption = False,
    config_file: FileOption = "",
    driver_root: DriverRootOption = "",
    kubelet_root: KubeletRootOption = "/var/lib/kubelet",
    metrics_port: PortOption = 0,
    image_pull_secret: SecretOption = "",
    labels: LabelsOption = None,
) -> "Result":
    """Print the device plugin. With the rights that what is asked for takes, and no other.

    Its service account is printed by gpunode manifests rbac.

    gpunode manifests daemon-set --image registry.example.com/gpunode:1.0 --mig mixed
    """
    from gpunode.commands import manifests as command

    options = command.PluginOptions(
        image=image,
        vendor=vendor.value,
        namespace=namespace,
        runtime_class=runtime_class,
        mig=mig.value if mig else "",
        mps=mps,
        cdi=cdi,
        config_file=config_file,
        driver_root=driver_root,
        kubelet_root=kubelet_root,
        metrics_port=metrics_port,
        pull_secret=image_pull_secret,
        labels=tuple(one.value for one in labels or ()),
    )
    return command.run_plugin(session.host, options)


@verb(manifests_app, "rbac", "Manifests")
def manifests_rbac(
    session: Session,
    namespace: Annotated[
        str,
        typer.Option(
            "--namespace",
            metavar="NAME",
            help="The account's; kube-system, with --for verify gpunode-verify, which is printed too.",
        ),
    ] = "",
    uses: Annotated[
        list[str] | None,
        typer.Option(
            "--for",
            metavar="USE",
            help="plugin, labels, node-feature, mig, advertise, verify (repeatable).",
        ),
    ] = None,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="What the account is called.")] = "",
) -> "Result":
    """Print a service account and its rights. The plugin needs none; other uses only theirs.

    gpunode manifests rbac --for verify --for advertise
    """
    from gpunode.commands import manifests as command

    return command.rbac(namespace, tuple(uses or ("plugin",)), name)


@verb(manifests_app, "vector-add", "Manifests")
def manifests_vector_add(
    session: Session,
    image: Annotated[
        str, typer.Option("--image", metavar="REF", help="NVIDIA's newest sample without.")
    ] = "",
    resource: ResourceOption = "nvidia.com/gpu",
    namespace: Annotated[str, typer.Option("--namespace", metavar="NAME", help="The pod's.")] = "",
    node: Annotated[str, typer.Option("--node", metavar="NAME", help="Run on this node only.")] = "",
    runtime_class: ClassOption = "nvidia",
) -> "Result":
    """Print the vector-add pod. gpunode verify --on kubernetes runs it and tells what became of it.

    gpunode manifests vector-add --node gpu-1 | kubectl apply -f -
    """
    from gpunode.commands import manifests as command

    options = command.PodOptions(image, resource, namespace, node, runtime_class)
    return command.vector_add(options)
