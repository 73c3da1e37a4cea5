"""`gpunode driver ...`: which driver this node needs, and bringing it here."""

# no `from __future__ import annotations`: Typer reads these annotations as objects

from typing import TYPE_CHECKING, Annotated

import typer

from gpunode.commands.outcome import Session
from gpunode.commands.session import verb

if TYPE_CHECKING:
    from gpunode.output.result import Result

driver_app = typer.Typer(
    help="Plan and install the driver that the GPUs need.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
BranchOption = Annotated[
    int,
    typer.Option(
        "--branch", metavar="N", min=0, max=9999, help="A driver branch, such as 580; chosen if not given."
    ),
]
VersionOption = Annotated[
    str,
    typer.Option(
        "--version", metavar="X.Y.Z", help="Exactly this version; the branch's newest if not given."
    ),
]
FlavourOption = Annotated[
    str, typer.Option("--flavour", metavar="KIND", help="The kernel module: open or proprietary.")
]
RepositoryOption = Annotated[
    str,
    typer.Option(
        "--repository",
        metavar="WHERE",
        help="distribution, nvidia, or the address of a mirror of NVIDIA's repository.",
    ),
]
KeyOption = Annotated[
    str,
    typer.Option("--key", metavar="FILE", help="The key that such a mirror is signed with, if not NVIDIA's."),
]
HoldOption = Annotated[
    bool, typer.Option("--hold", help="Keep the packages at their version afterwards, from upgrades too.")
]


@verb(driver_app, "plan", "DriverPlan")
def driver_plan(
    session: Session,
    branch: BranchOption = 0,
    version: VersionOption = "",
    flavour: FlavourOption = "",
    repository: RepositoryOption = "",
    key: KeyOption = "",
    hold: HoldOption = False,
) -> "Result":
    """Say which driver these GPUs and this kernel need. Each choice with its reason; nothing is changed.

    gpunode driver plan

    gpunode driver plan --branch 580 --flavour open
    """
    from gpunode.commands import driver_plan as command

    wish = command.wish(session.host, branch, version, flavour, repository, key, hold=hold)
    return command.run(session.host, command.Options(wish), session.progress)


@verb(driver_app, "install", "DriverInstallation")
def driver_install(
    session: Session,
    branch: BranchOption = 0,
    version: VersionOption = "",
    flavour: FlavourOption = "",
    repository: RepositoryOption = "",
    key: KeyOption = "",
    hold: HoldOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan; change nothing.")] = False,
    yes: Annotated[
        bool, typer.Option("-y", "--yes", help="Carry out the plan that is shown without it.")
    ] = False,
    plan: Annotated[
        str,
        typer.Option(
            "--plan", metavar="ID", help="Only if the plan is still the one that was shown with ID."
        ),
    ] = "",
    lock_timeout: Annotated[
        float,
        typer.Option(
            "--lock-timeout", metavar="SECONDS", min=0, help="How long to wait for another package manager."
        ),
    ] = 600.0,
) -> "Result":
    """Install the driver as planned. Refuses what would break running work; never reboots.

    gpunode driver install --dry-run

    gpunode driver install --yes

    gpunode driver install --yes --plan 3f9c01d2ab47
    """
    from gpunode.commands import driver_install as command
    from gpunode.commands.driver_plan import wish

    wanted = wish(session.host, branch, version, flavour, repository, key, hold=hold)
    options = command.Options(wanted, dry_run, yes, lock_timeout, plan)
    return command.run(session.host, options, session.progress)
