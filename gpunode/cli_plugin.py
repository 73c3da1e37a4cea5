"""`gpunode plugin ...`: which commands and options there are; the commands are imported when they run."""

# no `from __future__ import annotations`: Typer reads these annotations as objects

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpunode.cli_settings import SettingsCommand
from gpunode.commands.outcome import Session
from gpunode.commands.session import verb

if TYPE_CHECKING:
    from gpunode.output.result import Result


class Foreign(StrEnum):
    """Device plugins with a configuration that can be translated."""

    GKE = "gke"


plugin_app = typer.Typer(help="Serve GPUs to Kubernetes.", no_args_is_help=True, rich_markup_mode=None)


@verb(plugin_app, "serve", "PluginRun", cls=SettingsCommand, service=lambda given: True)
def plugin_serve(session: Session, **given: Any) -> "Result":
    """Serve the GPUs to the kubelet. Stays in the foreground until SIGTERM or Ctrl-C.

    Takes the flags, variables and config file of NVIDIA's device plugin. SIGHUP reads the file again.

    Every option is also a variable of its own: --mig-strategy is GPUNODE_PLUGIN_SERVE_MIG_STRATEGY.

    gpunode plugin serve

    gpunode plugin serve --config-file /etc/gpunode/plugin.yaml --device-list-strategy cdi-cri
    """
    from gpunode.commands import plugin_serve as command

    return command.run(session.host, command.Options(given), session.progress)


@verb(plugin_app, "check-config", "PluginConfig", cls=SettingsCommand)
def plugin_check_config(
    session: Session,
    file: Annotated[str, typer.Argument(metavar="[FILE]", help="The config file, as --config-file.")] = "",
    source: Annotated[
        Foreign | None, typer.Option("--from", help="FILE is GKE's: print it as a config file of gpunode.")
    ] = None,
    **given: Any,
) -> "Result":
    """Check a config file. Shows each value with where it comes from, and the devices that would be served.

    Takes what `plugin serve` takes; serves nothing.

    gpunode plugin check-config /etc/gpunode/plugin.yaml

    gpunode plugin check-config --from gke /etc/nvidia/gpu_config.json > plugin.yaml
    """
    from gpunode.commands import plugin_check_config as command

    asked = command.Options(given, file, source.value if source else "")
    return command.run(session.host, asked, session.progress)
