"""`gpunode mps ...`: which commands and options there are; the commands are imported when they run."""

# no `from __future__ import annotations`: Typer reads these annotations as objects

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpunode.cli_settings import SettingsCommand
from gpunode.commands.outcome import Session
from gpunode.commands.session import verb

if TYPE_CHECKING:
    from gpunode.output.result import Result

mps_app = typer.Typer(help="Share GPUs between processes.", no_args_is_help=True, rich_markup_mode=None)


@verb(mps_app, "serve", "MpsRun", cls=SettingsCommand, service=lambda given: True)
def mps_serve(
    session: Session,
    resource: Annotated[
        list[str] | None,
        typer.Option(
            "--resource",
            metavar="NAME",
            envvar="GPUNODE_MPS_RESOURCE",
            help="Only daemons of this resource; any number. All that sharing.mps names by default.",
        ),
    ] = None,
    container_limits: Annotated[
        bool,
        typer.Option(
            "--container-limits",
            envvar="GPUNODE_MPS_CONTAINER_LIMITS",
            help="Leave limits to the containers, where the plugin is gpunode's and gives several shares.",
        ),
    ] = False,
    **given: Any,
) -> "Result":
    """Run the MPS control daemons alone. For a node whose plugin is NVIDIA's, or another service.

    Takes the config file and the options of `plugin serve`. Stays in the foreground until SIGTERM or Ctrl-C.

    gpunode mps serve --config-file /etc/gpunode/plugin.yaml
    """
    from gpunode.commands import mps_serve as command

    options = command.Options(given=given, resources=tuple(resource or ()), container_limits=container_limits)
    return command.run(session.host, options, session.progress)
