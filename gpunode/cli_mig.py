"""`gpunode mig ...`: which commands and options there are; the commands are imported when they run."""

# no `from __future__ import annotations`: Typer reads these annotations as objects

from typing import TYPE_CHECKING, Annotated

import typer

from gpunode.commands.outcome import Session
from gpunode.commands.session import verb

if TYPE_CHECKING:
    from gpunode.output.result import Result

mig_app = typer.Typer(help="Cut GPUs into MIG devices.", no_args_is_help=True, rich_markup_mode=None)


@verb(mig_app, "list", "MigLayout")
def mig_list(
    session: Session,
    profiles: Annotated[
        bool, typer.Option("--profiles", help="Show what each GPU can be cut into, and where that may lie.")
    ] = False,
) -> "Result":
    """List how the GPUs are cut. Modes, instances with their places, and the UUIDs of the MIG devices.

    Reading instances needs root, or the capability mig/monitor.

    gpunode mig list

    gpunode mig list --profiles
    """
    from gpunode.commands import mig_list as command

    return command.run(session.host, command.Options(profiles), session.progress)


@verb(mig_app, "export", "MigExport")
def mig_export(
    session: Session,
    label: Annotated[
        str, typer.Option("-l", "--config-label", metavar="LABEL", help="The configuration's name.")
    ] = "current",
    format_name: Annotated[str, typer.Option("--format", metavar="FORMAT", help="yaml or json.")] = "yaml",
) -> "Result":
    """Print the present layout as a configuration. In mig-parted's form, as `mig apply` takes it.

    gpunode mig export --config-label today > mig.yaml
    """
    from gpunode.commands import mig_export as command

    return command.run(session.host, command.Options(label, format_name), session.progress)
