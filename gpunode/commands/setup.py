"""`gpunode setup`."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from gpunode.commands.options import (
    CdiOption,
    ConfigOption,
    ContextOption,
    DefaultOption,
    KubeconfigOption,
    NodeOption,
    RestartCommandOption,
    RuntimeOption,
    ServerOption,
    SocketOption,
    YesOption,
)
from gpunode.commands.outcome import Session
from gpunode.commands.session import verb

if TYPE_CHECKING:
    from gpunode.output.result import Result


setup_app = typer.Typer(rich_markup_mode=None)


class PluginWay(StrEnum):
    """How `--kubernetes` brings the device plugin."""

    SYSTEMD = "systemd"
    DAEMONSET = "daemonset"


KubernetesOption = Annotated[
    bool,
    typer.Option("--kubernetes", help="Up to a GPU pod: toolkit, runtime, RuntimeClass, device plugin."),
]
PluginOption = Annotated[
    PluginWay, typer.Option("--plugin", help="With --kubernetes: how the device plugin comes.")
]
ImageOption = Annotated[
    str, typer.Option("--image", metavar="REF", help="The image of the plugin's DaemonSet.")
]
TestImageOption = Annotated[
    str, typer.Option("--test-image", metavar="REF", help="With --kubernetes: the image of the proof's pod.")
]
WaitOption = Annotated[
    float,
    typer.Option("--wait", metavar="SECONDS", min=1, help="With --kubernetes: for the kubelet's GPUs."),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Show what each step would do; change nothing.")
]


@verb(setup_app, "setup", "SetupReport")
def setup(
    session: Session,
    runtime: RuntimeOption = "auto",
    set_as_default: DefaultOption = False,
    config: ConfigOption = "",
    socket: SocketOption = "",
    restart_command: RestartCommandOption = "",
    cdi: CdiOption = False,
    kubernetes: KubernetesOption = False,
    plugin: PluginOption = PluginWay.SYSTEMD,
    image: ImageOption = "",
    test_image: TestImageOption = "",
    kubeconfig: KubeconfigOption = "",
    kube_context: ContextOption = "",
    server: ServerOption = "",
    node: NodeOption = "",
    wait: WaitOption = 60.0,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
) -> "Result":
    """Run every step up to a proof. Stops at the first failure and says what to do.

    gpunode setup --runtime containerd

    gpunode setup --runtime podman --cdi

    gpunode setup --kubernetes --dry-run
    """
    from gpunode.commands import setup_containers as command

    options = command.Options(
        runtime=runtime,
        set_as_default=set_as_default,
        config=config,
        socket=socket,
        restart_command=restart_command,
        yes=yes,
        cdi=cdi,
        dry_run=dry_run,
    )
    if kubernetes:
        from gpunode.commands import setup_kubernetes as whole

        access = whole.Access(kubeconfig, kube_context, server)
        wanted = whole.KubernetesOptions(options, plugin.value, image, test_image, access, node, wait)
        return whole.run(session.host, wanted, session.progress, session.show)
    cluster = {"kubeconfig": kubeconfig, "context": kube_context, "server": server, "node": node}
    way = plugin.value if plugin is not PluginWay.SYSTEMD else ""
    command.refuse_without_kubernetes({"plugin": way, "image": image, "test-image": test_image, **cluster})
    return command.run(session.host, options, session.progress, session.show)
