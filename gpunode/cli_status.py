"""`gpunode status ...`: which commands and options there are; the commands are imported when they run."""

# no `from __future__ import annotations`: Typer reads these annotations as objects

from typing import TYPE_CHECKING

import typer

from gpunode.commands.options import ConfigOption, RestartCommandOption, RuntimesOption, SocketOption
from gpunode.commands.outcome import Session
from gpunode.commands.session import verb

if TYPE_CHECKING:
    from gpunode.output.result import Result

status_app = typer.Typer(help="What is in force on this node.", no_args_is_help=True, rich_markup_mode=None)


@verb(status_app, "runtime", "RuntimeStatus")
def status_runtime(
    session: Session,
    runtime: RuntimesOption = None,
    config: ConfigOption = "",
    socket: SocketOption = "",
    restart_command: RestartCommandOption = "",
) -> "Result":
    """Show the container engines. Their files, who wrote them, their handlers, and what isn't in force yet.

    Changes nothing.

    gpunode status runtime
    """
    from gpunode.commands import status as command

    options = command.Options(tuple(runtime or ()), config, socket, restart_command)
    return command.run(session.host, options, session.progress)
