"""`gpunode journal ...` and `gpunode manifests ...`: what was done, and what a cluster needs beside it."""

# no `from __future__ import annotations`: Typer reads these annotations as objects

from typing import TYPE_CHECKING, Annotated

import typer

from gpunode.cli_options import NameOption
from gpunode.session import Session, verb

if TYPE_CHECKING:
    from gpunode.result import Result

journal_app = typer.Typer(
    help="What gpunode changed on this node.", no_args_is_help=True, rich_markup_mode=None
)
manifests_app = typer.Typer(help="Print Kubernetes objects.", no_args_is_help=True, rich_markup_mode=None)


@verb(journal_app, "list", "Journal")
def journal_list(session: Session) -> "Result":
    """List the changes, oldest first. Whether each can be rolled back now, and if not, why.

    gpunode journal list
    """
    from gpunode.commands import journal_list as command

    return command.run(session.host, command.Options(), session.progress)


@verb(journal_app, "show", "JournalEntry")
def journal_show(
    session: Session,
    entry: Annotated[
        str, typer.Argument(metavar="[ID]", help="A journal entry; the last one if not given.")
    ] = "",
) -> "Result":
    """Show one change. When, what for, and the diff of every file.

    gpunode journal show
    """
    from gpunode.commands import journal_show as command

    return command.run(session.host, command.Options(entry), session.progress)


@verb(manifests_app, "runtime-class", "Manifests")
def manifests_runtime_class(
    session: Session,
    nvidia_runtime_name: NameOption = "nvidia",
    also: Annotated[
        str,
        typer.Option("--also", metavar="VARIANTS", help="Variants to print too: cdi, legacy; or cdi,legacy."),
    ] = "",
) -> "Result":
    """Print RuntimeClass objects. By them pods choose the nvidia runtime; nothing is contacted.

    gpunode manifests runtime-class --also cdi | kubectl apply -f -
    """
    from gpunode.commands import manifests as command

    return command.run(session.host, command.Options(nvidia_runtime_name, also), session.progress)
