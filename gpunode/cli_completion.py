"""`gpunode completion`: its argument; the command is imported when it runs."""

# no `from __future__ import annotations`: Typer reads these annotations as objects

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from gpunode.commands.outcome import Session
from gpunode.commands.session import verb

if TYPE_CHECKING:
    from gpunode.output.result import Result

completion_app = typer.Typer(rich_markup_mode=None)


class Shell(StrEnum):
    """Whose completion there is."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@verb(completion_app, "completion", "Completion")
def completion(
    session: Session,
    shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.", show_envvar=False)],
) -> "Result":
    """Print shell completion. Commands, options and their values at Tab.

    gpunode completion bash > /etc/bash_completion.d/gpunode

    gpunode completion fish > ~/.config/fish/completions/gpunode.fish
    """
    from gpunode.commands import completion as command

    return command.run(shell.value)
