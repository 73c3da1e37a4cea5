"""`gpunode node ...`: which commands and options there are; the commands are imported when they run."""

# no `from __future__ import annotations`: Typer reads these annotations as objects

from typing import TYPE_CHECKING, Annotated

import typer

from gpunode.commands.options import ContextOption, KubeconfigOption, NodeOption, ServerOption
from gpunode.commands.outcome import Session
from gpunode.commands.session import verb

if TYPE_CHECKING:
    from gpunode.commands.node_change import Target
    from gpunode.output.result import Result

node_app = typer.Typer(
    help="Change this machine's Node object in Kubernetes.", no_args_is_help=True, rich_markup_mode=None
)
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show the exact patch; change nothing.")]


def _target(kubeconfig: str, context: str, server: str, node: str, dry_run: bool) -> "Target":
    from gpunode.commands.node_change import Target
    from gpunode.kubernetes.access import Access

    return Target(Access(kubeconfig, context, server), node, dry_run)


@verb(node_app, "advertise", "NodeChange")
def node_advertise(
    session: Session,
    resource: Annotated[
        str, typer.Option("--resource", metavar="NAME", help="An extended resource, such as nvidia.com/gpu.")
    ],
    count: Annotated[
        str, typer.Option("--count", metavar="N", help="How many; auto counts this machine's whole GPUs.")
    ] = "auto",
    remove: Annotated[bool, typer.Option("--remove", help="Take the resource off the node again.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Although a device plugin serves it, or somebody else set it.")
    ] = False,
    wait: Annotated[
        float,
        typer.Option("--wait", metavar="SECONDS", min=0, help="For the kubelet to make it allocatable."),
    ] = 30.0,
    kubeconfig: KubeconfigOption = "",
    kube_context: ContextOption = "",
    server: ServerOption = "",
    node: NodeOption = "",
    dry_run: DryRunOption = False,
) -> "Result":
    """Give the node a resource without a device plugin. Pods can be scheduled by it; no device comes with it.

    gpunode node advertise --resource example.com/gpu --count 8 --dry-run
    """
    from gpunode.commands import node_advertise as command

    target = _target(kubeconfig, kube_context, server, node, dry_run)
    options = command.Options(resource, count, remove, force, wait, target)
    return command.run(session.host, options, session.progress)
