"""`gpunode help` and `gpunode version`."""

# no `from __future__ import annotations`: Typer reads these annotations as objects

import sys
from typing import Annotated, Any, NamedTuple

import typer

from gpunode import __version__
from gpunode.commands.help_page import WIDTH, HelpCommand, HelpGroup, printed, unbroken
from gpunode.commands.session import Session, verb
from gpunode.commands.variables import commands, variables
from gpunode.output.result import Result, Text

ENVIRONMENT = "environment"
_VARIABLE = 42  # columns for a variable's name; a longer one gets a line of its own
_LEAST = 80  # columns that the longest option needs beside it: users copy names, so none is folded


def _environment(context: Any, of: str) -> str:
    """The variables of every command, or of the command `of` and its subcommands; empty if it has none."""
    from itertools import groupby

    context.max_content_width = WIDTH
    formatter = context.make_formatter()
    formatter.write_text("Each variable sets one option; a flag on the command line takes precedence.")
    formatter.write_text(
        "Values: true or false for a flag; several values with commas between. GPUNODE_STATE_DIR is the"
        " directory of the journal, by default /var/lib/gpunode, and ~/.local/state/gpunode without root."
    )
    formatter.write_text(
        "Only the command above a name reads it; plugin check-config reads those of plugin serve. Names"
        " without GPUNODE_ are those of NVIDIA's programs. NODE_NAME is also the default of --node in setup,"
        " verify, reset, mig apply and node advertise."
    )
    formatter.write_text(
        "sudo drops variables: sudo GPUNODE_OUTPUT=json gpunode doctor. Only gpunode's systemd units read"
        " /etc/gpunode/env."
    )
    formatter.width = max(formatter.width, _LEAST)
    listed = [
        variable
        for variable in variables(context.command)
        if f"{variable.command} ".startswith(f"{of} ".lstrip())
    ]
    for command, group in groupby(listed, key=lambda variable: variable.command):
        with formatter.section(f"gpunode {command}" if command else "Every command"):
            rows = [
                (name, unbroken(variable.option))
                for variable in group
                for name in (variable.name, *variable.others)
            ]
            formatter.write_dl(rows, col_max=_VARIABLE)
    return printed(formatter.getvalue()) if listed else ""


def _names(ctx: typer.Context) -> list[str]:
    """Completions for Tab."""
    parent: Any = ctx.find_root().command
    words = ctx.params.get("command") or ()
    for name in words:
        parent = parent if name == ENVIRONMENT else parent.get_command(ctx, name)
    return [*getattr(parent, "commands", {}), *(() if words else (ENVIRONMENT,))]


help_app = typer.Typer(rich_markup_mode=None)


@help_app.command("help", cls=HelpCommand)
def show_help(
    context: typer.Context,
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[COMMAND]...", help="A command, or environment.", autocompletion=_names),
    ] = None,
) -> None:
    """Show help for a command, or list the environment variables.

    gpunode help mig apply

    gpunode help environment mig apply
    """
    parent = context.find_root()
    if command and command[0] == ENVIRONMENT:
        of = " ".join(command[1:])
        page = _environment(parent, of)
        if not page:
            known = any(f"{path} ".startswith(f"{of} ") for path, _ in commands(parent.command, ""))
            parent.fail(f"{of} has no variables of its own." if known else f"No such command '{of}'.")
        sys.stdout.write(page)
        return
    for name in command or ():
        if not isinstance(parent.command, HelpGroup):
            parent.fail(f"No such command '{name}'.")
        child: Any = parent.command.resolve_command(parent, [name])[1]  # reports an unknown one
        parent = type(parent)(child, info_name=name, parent=parent)
    sys.stdout.write(parent.command.get_help(parent) + "\n")


class Version(NamedTuple):
    """`data` of the envelope."""

    version: str


version_app = typer.Typer(rich_markup_mode=None)


@verb(version_app, "version", "Version")
def version(session: Session) -> Result:
    """Print the version.

    gpunode version -o json
    """
    return Result("Version", Version(__version__), blocks=(Text(f"gpunode {__version__}"),))
