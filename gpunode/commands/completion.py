"""`gpunode completion`: the shell's completion script for gpunode."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import typer

from gpunode.commands.session import Session, verb
from gpunode.output.result import Result, Text

# The functions of `typer.completion` that this module and `session.run_app` call are private. Typer documents
# only `add_completion`, which adds --show-completion and --install-completion, and that one edits ~/.bashrc.
VARIABLE = "_GPUNODE_COMPLETE"
"""Set by that script, with the shell's question, when Tab is pressed; read in `session.run_app`."""
_AUTOLOADED = '[[ $zsh_eval_context[-1] == loadautofunc ]] && _gpunode_completion "$@"'
"""For zsh, which runs the file of a function at the first Tab and not the function that it defines."""


class Completion(NamedTuple):
    """`data` of the envelope: the shell, and the script that it reads."""

    shell: str
    script: str


# `gpunode completion`.

completion_app = typer.Typer(rich_markup_mode=None)


@verb(completion_app, "completion", "Completion")
def completion(
    session: Session,
    shell: Annotated[
        Literal["bash", "zsh", "fish"],
        typer.Argument(metavar="SHELL", help="bash, zsh or fish.", show_envvar=False),
    ],
) -> Result:
    """Print a shell completion script. It completes commands, options and values.

    gpunode completion bash | sudo tee /etc/bash_completion.d/gpunode

    gpunode completion fish > ~/.config/fish/completions/gpunode.fish
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    script = get_completion_script(prog_name="gpunode", complete_var=VARIABLE, shell=shell)
    if shell == "zsh":
        script += f"\n\n{_AUTOLOADED}"
    lines = tuple(Text(line) for line in script.splitlines())
    return Result("Completion", Completion(shell, script), blocks=lines)
