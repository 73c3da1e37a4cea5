"""`gpunode toolkit install|status|remove`: their options; the commands are imported when they run."""

# no `from __future__ import annotations`: Typer reads these annotations as objects

from typing import TYPE_CHECKING, Annotated

import typer

from gpunode.cli_toolkit import toolkit_app
from gpunode.commands.outcome import Session
from gpunode.commands.session import verb

if TYPE_CHECKING:
    from gpunode.output.result import Result

LockOption = Annotated[
    float,
    typer.Option(
        "--lock-timeout",
        metavar="SECONDS",
        min=0,
        help="How long another process's package manager is waited for.",
    ),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Show the files and the commands; change nothing.")
]


@verb(toolkit_app, "install", "ToolkitInstallation")
def toolkit_install(
    session: Session,
    version: Annotated[
        str, typer.Option("--version", metavar="VERSION", help="All four packages at this one, as 1.20.0.")
    ] = "",
    upgrade: Annotated[
        bool, typer.Option("--upgrade", help="Take the newest version, also where one is installed.")
    ] = False,
    hold: Annotated[
        bool, typer.Option("--hold", help="Keep the four at their version from then on.")
    ] = False,
    repository: Annotated[
        str,
        typer.Option("--repository", metavar="URL", help="A mirror: the address that holds 'stable'."),
    ] = "",
    key: Annotated[
        str, typer.Option("--key", metavar="FILE", help="The mirror's own key, if it isn't NVIDIA's.")
    ] = "",
    from_directory: Annotated[
        str,
        typer.Option("--from", metavar="DIR", help="Take the packages out of this directory; no network."),
    ] = "",
    lock_timeout: LockOption = 600.0,
    dry_run: DryRunOption = False,
) -> "Result":
    """Install the toolkit. Repository and key once, four packages at one version, old repositories put aside.

    gpunode toolkit install

    gpunode toolkit install --version 1.20.0 --hold

    gpunode toolkit install --from /media/packages
    """
    from gpunode.commands import toolkit_install as command

    options = command.Options(
        version=version,
        repository=repository,
        key=key,
        directory=from_directory,
        upgrade=upgrade,
        hold=hold,
        dry_run=dry_run,
        lock_seconds=lock_timeout,
    )
    return command.run(session.host, options, session.progress)


@verb(toolkit_app, "status", "ToolkitStatus")
def toolkit_status(session: Session) -> "Result":
    """Show the four packages, where they come from, and what disagrees. Exit 1 if something does.

    gpunode toolkit status -o json
    """
    from gpunode.commands import toolkit_status as command

    return command.run(session.host, command.Options(), session.progress)


@verb(toolkit_app, "remove", "ToolkitRemoval")
def toolkit_remove(
    session: Session, lock_timeout: LockOption = 600.0, dry_run: DryRunOption = False
) -> "Result":
    """Remove what `toolkit install` brought. Refused while an engine still has the runtime.

    gpunode toolkit remove --dry-run
    """
    from gpunode.commands import toolkit_remove as command

    options = command.Options(dry_run=dry_run, lock_seconds=lock_timeout)
    return command.run(session.host, options, session.progress)
