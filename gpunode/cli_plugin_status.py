"""`gpunode plugin status`: its options; the command is imported when it runs."""

# no `from __future__ import annotations`: Typer reads these annotations as objects

from typing import TYPE_CHECKING, Annotated

import typer

from gpunode.cli_plugin import plugin_app
from gpunode.commands.outcome import Session
from gpunode.commands.session import verb

if TYPE_CHECKING:
    from gpunode.output.result import Result


@verb(plugin_app, "status", "PluginStatus")
def plugin_status(
    session: Session,
    kubelet_socket: Annotated[
        str, typer.Option("--kubelet-socket", metavar="PATH", help="Where the kubelet listens.")
    ] = "",
    pod_resources_socket: Annotated[
        str,
        typer.Option("--pod-resources-socket", metavar="PATH", help="Where it tells what pods hold."),
    ] = "",
    state_dir: Annotated[
        str, typer.Option("--state-dir", metavar="DIR", help="Where gpunode's plugin tells of itself.")
    ] = "/var/lib/gpunode/plugin",
    nvml: Annotated[
        bool, typer.Option("--nvml/--no-nvml", help="Ask NVML where the plugin doesn't tell everything.")
    ] = True,
    every: Annotated[
        bool,
        # its parameter can't be called `all`, and the variable would be named after that
        typer.Option(
            "--all", envvar="GPUNODE_PLUGIN_STATUS_ALL", help="Show resources that aren't GPUs, too."
        ),
    ] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0.1, help="For each question.")
    ] = 5.0,
) -> "Result":
    """Show which pod holds which GPU. What is registered, and which GPUs are unhealthy and why.

    Works with any device plugin; changes nothing.

    gpunode plugin status
    """
    from gpunode.commands import plugin_status as command

    options = command.Options(kubelet_socket, pod_resources_socket, state_dir, nvml, every, timeout)
    return command.run(session.host, options, session.progress)
