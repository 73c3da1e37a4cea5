"""`gpunode journal ...`: what was done."""

# no `from __future__ import annotations`: Typer reads these annotations as objects

from typing import TYPE_CHECKING, Annotated

import typer

from gpunode.commands.outcome import Session
from gpunode.commands.session import verb

if TYPE_CHECKING:
    from gpunode.output.result import Result

journal_app = typer.Typer(
    help="What gpunode changed on this node.", no_args_is_help=True, rich_markup_mode=None
)


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
