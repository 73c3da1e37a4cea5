"""`gpunode toolkit ...`: which commands and options there are; the commands are imported when they run."""

# no `from __future__ import annotations`: Typer reads these annotations as objects

from typing import TYPE_CHECKING, Annotated

import typer

from gpunode.commands.outcome import Session
from gpunode.commands.session import verb

if TYPE_CHECKING:
    from gpunode.output.result import Result

toolkit_app = typer.Typer(
    help="Install and configure the NVIDIA Container Toolkit.", no_args_is_help=True, rich_markup_mode=None
)
config_app = typer.Typer(help="Read and edit its config.toml.", no_args_is_help=True, rich_markup_mode=None)
toolkit_app.add_typer(config_app, name="config")

FileOption = Annotated[
    str,
    typer.Option(
        "--config",
        metavar="PATH",
        help="The file; without it the one that the toolkit's own programs would read.",
    ),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show the diff; change nothing.")]


@verb(config_app, "get", "ToolkitConfig")
def toolkit_config_get(
    session: Session,
    key: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY]...", help="Keys or tables; everything without.")
    ] = None,
    config: FileOption = "",
) -> "Result":
    """Show settings and where each value comes from. Exit 1 if the file holds what the toolkit doesn't take.

    gpunode toolkit config get nvidia-container-runtime.mode
    """
    from gpunode.commands import toolkit_config as command

    return command.run(session.host, command.Options(tuple(key or ()), config), session.progress)


@verb(config_app, "set", "ToolkitConfig")
def toolkit_config_set(
    session: Session,
    setting: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE...", help="A list is written with commas.")
    ],
    config: FileOption = "",
    create: Annotated[bool, typer.Option("--create", help="Make the file if it isn't there.")] = False,
    dry_run: DryRunOption = False,
) -> "Result":
    """Change settings; comments are kept and values checked. `gpunode rollback` takes it back.

    gpunode toolkit config set nvidia-container-runtime.mode=cdi
    """
    from gpunode.commands import toolkit_config as command

    options = command.SetOptions(tuple(setting), config, create, dry_run)
    return command.run_set(session.host, options, session.progress)


@verb(config_app, "unset", "ToolkitConfig")
def toolkit_config_unset(
    session: Session,
    key: Annotated[list[str], typer.Argument(metavar="KEY...", help="What gets its default back.")],
    config: FileOption = "",
    dry_run: DryRunOption = False,
) -> "Result":
    """Take settings out, so that the toolkit's own defaults hold again.

    gpunode toolkit config unset features.allow-ldconfig-from-container
    """
    from gpunode.commands import toolkit_config as command

    options = command.SetOptions(tuple(key), config, dry_run=dry_run)
    return command.unset(session.host, options, session.progress)
