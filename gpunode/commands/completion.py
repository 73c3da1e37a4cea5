"""`gpunode completion`: the shell's completion script for gpunode, and the values that Tab offers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from gpunode.commands.session import Session, verb
from gpunode.output.result import Result, Text
from gpunode.output.typed import StrEnum

VARIABLE = "_GPUNODE_COMPLETE"
"""Set by that script, with the shell's question, when Tab is pressed; read in `session.run_app`."""
_AUTOLOADED = '[[ $zsh_eval_context[-1] == loadautofunc ]] && _gpunode_completion "$@"'
"""For zsh, which runs the file of a function at the first Tab and not the function that it defines."""

# Values that Tab offers, for `autocompletion` of options and arguments.

_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
# NVIDIA MIG User Guide, "Supported MIG Profiles", without the variants with media engines; NVML isn't queried
# for a Tab, because it may hang
_MIG_PROFILES = (
    *("1g.5gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"),  # A100 40 GB
    *("1g.6gb", "2g.12gb", "4g.24gb"),  # A30
    *("1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"),  # A100 and H100 80 GB
    *("1g.12gb", "2g.24gb", "3g.48gb", "4g.48gb", "7g.96gb"),  # H100 96 GB, GH200
    *("1g.18gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb"),  # H200
    *("1g.23gb", "2g.45gb", "3g.90gb", "4g.90gb", "7g.180gb"),  # B200
    *("1g.24gb", "2g.48gb", "4g.96gb"),  # RTX PRO 6000 Blackwell
)


def one_of(*choices: str, comma: bool = False) -> Callable[[str], list[str]]:
    """Completions from a fixed set; with `comma` the option takes several values, separated by commas."""

    def offered(incomplete: str) -> list[str]:
        before = incomplete[: incomplete.rfind(",") + 1] if comma else ""
        return [before + word for word in choices]

    return offered


def engines(incomplete: str) -> list[str]:
    """Names of container engines."""
    from gpunode.runtime.find import FINDERS

    return [*FINDERS, "auto"]


def checks(incomplete: str) -> list[tuple[str, str]]:
    """IDs of the checks, with their titles."""
    from gpunode.checks.catalogue import ALL_CHECKS

    return [(check.id, check.title) for check in ALL_CHECKS]


def resources(incomplete: str) -> list[str]:
    """Resources of NVIDIA's GPUs and MIG devices."""
    return ["nvidia.com/gpu", *(f"nvidia.com/mig-{profile}" for profile in _MIG_PROFILES)]


def journal_entries(ctx: typer.Context) -> list[str]:
    """IDs of the journal's entries, if this user may read it."""
    from gpunode.host import Host
    from gpunode.host.journal import Journal

    roots = (context.params.get("root") for context in (ctx, ctx.find_root()))
    root = next((Path(value) for value in roots if value), Path("/"))
    return _plain(entry.id for entry in Journal.of(Host(root.absolute())).entries())


def mig_labels(ctx: typer.Context) -> list[str]:
    """Names of the configurations in the file of --config-file."""
    from gpunode.commands.mig_plan import read

    path = ctx.params.get("config_file")
    if not path or not Path(path).is_file():  # standard input is the terminal's, and a pipe may block
        return []
    return _plain(read(path)[1].labels)


def _plain(names: Iterable[str]) -> list[str]:
    """The names without those that zsh, which evaluates completions, might take for something else."""
    return [name for name in names if _PLAIN.fullmatch(name)]


@dataclass(frozen=True)
class Completion:
    """`data` of the envelope: the shell, and the script that it reads."""

    shell: str
    script: str


# `gpunode completion`.

completion_app = typer.Typer(rich_markup_mode=None)


class Shell(StrEnum):
    """Shells with a completion script."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@verb(completion_app, "completion", "Completion")
def completion(
    session: Session,
    shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.", show_envvar=False)],
) -> Result:
    """Print a shell completion script. It completes commands, options and values.

    gpunode completion bash | sudo tee /etc/bash_completion.d/gpunode

    gpunode completion fish > ~/.config/fish/completions/gpunode.fish
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]  # it is private

    script = get_completion_script(prog_name="gpunode", complete_var=VARIABLE, shell=shell.value)
    if shell is Shell.ZSH:
        script += f"\n\n{_AUTOLOADED}"
    lines = tuple(Text(line) for line in script.splitlines())
    return Result("Completion", Completion(shell.value, script), blocks=lines)
