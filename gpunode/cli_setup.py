"""`gpunode setup`: the whole way, for containers or for Kubernetes; commands are imported when they run."""

# no `from __future__ import annotations`: Typer reads these annotations as objects

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from gpunode.cli_options import (
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
from gpunode.session import Session, verb

if TYPE_CHECKING:
    from gpunode.result import Result

setup_app = typer.Typer(rich_markup_mode=None)


class PluginWay(StrEnum):
    """How `--kubernetes` brings the device plugin."""

    SYSTEMD = "systemd"
    DAEMONSET = "daemonset"


@verb(setup_app, "setup", "SetupReport")
def setup(
    session: Session,
    runtime: RuntimeOption = "auto",
    set_as_default: DefaultOption = False,
    config: ConfigOption = "",
    socket: SocketOption = "",
    restart_command: RestartCommandOption = "",
    cdi: CdiOption = False,
    kubernetes: Annotated[
        bool,
        typer.Option("--kubernetes", help="Up to a GPU pod: toolkit, runtime, RuntimeClass, device plugin."),
    ] = False,
    plugin: Annotated[
        PluginWay, typer.Option("--plugin", help="With --kubernetes: how the device plugin comes.")
    ] = PluginWay.SYSTEMD,
    image: Annotated[
        str, typer.Option("--image", metavar="REF", help="The image of the plugin's DaemonSet.")
    ] = "",
    test_image: Annotated[
        str,
        typer.Option("--test-image", metavar="REF", help="With --kubernetes: the image of the proof's pod."),
    ] = "",
    kubeconfig: KubeconfigOption = "",
    kube_context: ContextOption = "",
    server: ServerOption = "",
    node: NodeOption = "",
    wait: Annotated[
        float,
        typer.Option("--wait", metavar="SECONDS", min=1, help="With --kubernetes: for the kubelet's GPUs."),
    ] = 60.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what each step would do; change nothing.")
    ] = False,
    yes: YesOption = False,
) -> "Result":
    """Run every step up to a proof. Stops at the first failure and says what to do.

    gpunode setup --runtime containerd

    gpunode setup --runtime podman --cdi

    gpunode setup --kubernetes --dry-run
    """
    if kubernetes:
        from gpunode.commands import setup_kubernetes
        from gpunode.kubernetes.access import Access

        wanted = setup_kubernetes.Options(
            runtime=runtime,
            set_as_default=set_as_default,
            config=config,
            socket=socket,
            restart_command=restart_command,
            yes=yes,
            cdi=cdi,
            plugin=plugin.value,
            image=image,
            test_image=test_image,
            access=Access(kubeconfig, kube_context, server),
            node=node,
            wait=wait,
            dry_run=dry_run,
        )
        return setup_kubernetes.run(session.host, wanted, session.progress)
    from gpunode.commands import setup as command

    given = {"--image": image, "--test-image": test_image, "--kubeconfig": kubeconfig}
    command.refuse_without_kubernetes(
        {**given, "--context": kube_context, "--server": server, "--node": node}
    )
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
    return command.run(session.host, options, session.progress)
