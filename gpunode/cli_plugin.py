"""`gpunode plugin ...`: which commands and options there are; the commands are imported when they run."""

# no `from __future__ import annotations`: Typer reads these annotations as objects

from typing import TYPE_CHECKING, Annotated

import typer

from gpunode.session import Session, verb

if TYPE_CHECKING:
    from gpunode.result import Result

plugin_app = typer.Typer(help="Serve GPUs to Kubernetes.", no_args_is_help=True, rich_markup_mode=None)


@verb(plugin_app, "serve", "PluginRun")
def plugin_serve(
    session: Session,
    kubelet_socket: Annotated[
        str, typer.Option("--kubelet-socket", metavar="PATH", help="Where the kubelet listens.")
    ] = "/var/lib/kubelet/device-plugins/kubelet.sock",
    resource_name: Annotated[
        str, typer.Option("--resource-name", help="The extended resource to advertise.")
    ] = "nvidia.com/gpu",
    rediscover_seconds: Annotated[
        float, typer.Option("--rediscover-seconds", help="How often NVML is asked which GPUs there are.")
    ] = 30.0,
) -> "Result":
    """Serve the GPUs to the kubelet. Stays in the foreground until SIGTERM or Ctrl-C.

    gpunode plugin serve
    """
    from gpunode.commands import plugin_serve as command

    options = command.Options(
        kubelet_socket=kubelet_socket, resource_name=resource_name, rediscover_seconds=rediscover_seconds
    )
    return command.run(session.host, options, session.progress)
