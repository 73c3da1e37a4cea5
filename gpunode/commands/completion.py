"""`gpunode completion`: what a shell reads so that it completes gpunode's commands and options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from gpunode.commands.session import Session, verb
from gpunode.output.result import Result, Text
from gpunode.output.typed import StrEnum

VARIABLE = "_GPUNODE_COMPLETE"
"""Set by that script, with the shell's question, when Tab is pressed; read in `session.run_app`."""


@dataclass(frozen=True)
class Completion:
    """`data` of the envelope: which shell, and what it is to read."""

    shell: str
    script: str


def run(shell: str) -> Result:
    """The script alone, for ``source <(...)`` or a file; nothing is installed anywhere."""
    from typer.completion import get_completion_script  # type: ignore[attr-defined]  # it has no other place

    script = get_completion_script(prog_name="gpunode", complete_var=VARIABLE, shell=shell)
    lines = tuple(Text(line) for line in script.splitlines())
    return Result("Completion", Completion(shell, script), blocks=lines)


# `gpunode completion`.

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
) -> Result:
    """Print a shell completion script. It completes commands, options and values.

    gpunode completion bash > /etc/bash_completion.d/gpunode

    gpunode completion fish > ~/.config/fish/completions/gpunode.fish
    """
    return run(shell.value)
