"""`gpunode labels`: its options; the command is imported when it runs."""

# no `from __future__ import annotations`: Typer reads these annotations as objects

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpunode.cli_settings import SettingsCommand
from gpunode.commands.outcome import Session
from gpunode.commands.session import verb

if TYPE_CHECKING:
    from gpunode.output.result import Result

labels_app = typer.Typer(rich_markup_mode=None)


class LabelsCommand(SettingsCommand):
    """Takes GPU feature discovery's words, too: ``-o PATH`` is its output file, and not one of our forms."""

    def rows(self) -> Any:
        from gpunode.commands.labels import options

        return options()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = list(args)
        for at, word in enumerate(words[:-1]):
            if word == "-o" and "/" in words[at + 1]:
                words[at] = "--output-file"
        return super().parse_args(ctx, words)


@verb(
    labels_app,
    "labels",
    "NodeLabels",
    cls=LabelsCommand,
    own_output=True,
    service=lambda given: given["watch"] and not given["dry_run"],
)
def labels(
    session: Session,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            envvar="GPUNODE_LABELS_WATCH",
            help="Stay, and keep the labels true; as --oneshot=false.",
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", envvar="GPUNODE_LABELS_DRY_RUN", help="Show what would change; change nothing."
        ),
    ] = False,
    **given: Any,
) -> "Result":
    """Label the node by its GPUs. Every label of GPU feature discovery; AMD's with --vendor amd.

    Shows them, or puts them where the cluster has labels from: a feature file or NodeFeature object for Node
    Feature Discovery, or the Node itself. Takes GPU feature discovery's flags, variables and config file.

    gpunode labels

    gpunode labels --to node --dry-run

    gpunode labels --watch --to node-feature --namespace node-feature-discovery
    """
    from gpunode.commands import labels as command

    if watch and not dry_run:
        given["oneshot"] = "false"
    return command.run(session.host, command.Options(given, dry_run), session.progress)
