"""`gpunode mig plan|apply|assert`: which options there are; the commands are imported when they run."""

# no `from __future__ import annotations`: Typer reads these annotations as objects

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpunode.cli_mig import mig_app
from gpunode.commands.options import (
    ContextOption,
    DryRunOption,
    KubeconfigOption,
    NodeOption,
    ServerOption,
    Strings,
)
from gpunode.commands.outcome import Session
from gpunode.commands.session import verb

if TYPE_CHECKING:
    from gpunode.output.result import Result


def _option(*names: str, env: str, text: str, **more: Any) -> Any:
    """An option of mig-parted's, which its variable sets as well as ours does."""
    return typer.Option(*names, envvar=[f"GPUNODE_MIG_{env}", f"MIG_PARTED_{env}"], help=text, **more)


ConfigFileOption = Annotated[
    str,
    _option(
        "-f",
        "--config-file",
        env="CONFIG_FILE",
        metavar="FILE",
        text="In mig-parted's form, YAML or JSON; - is standard input.",
    ),
]
LabelOption = Annotated[
    str,
    _option(
        "-c",
        "--selected-config",
        env="SELECTED_CONFIG",
        metavar="LABEL",
        text="Which of the file's configurations; not needed if there is one.",
    ),
]
ModeOnlyOption = Annotated[
    bool,
    _option("-m", "--mode-only", env="MODE_CHANGE_ONLY", text="Only whether MIG is on, not the instances."),
]


@verb(mig_app, "plan", "MigPlan")
def mig_plan(
    session: Session,
    config_file: ConfigFileOption = "",
    selected_config: LabelOption = "",
    mode_only: ModeOnlyOption = False,
) -> "Result":
    """Show what apply would do. Today's layout beside the wanted one, what goes, and who is in the way.

    gpunode mig plan -f mig.yaml -c all-balanced
    """
    from gpunode.commands import mig_plan as command

    options = command.Options(config_file, selected_config, mode_only)
    return command.run(session.host, options, session.progress)


@verb(mig_app, "apply", "MigApplication")
def mig_apply(
    session: Session,
    config_file: ConfigFileOption = "",
    selected_config: LabelOption = "",
    mode_only: ModeOnlyOption = False,
    skip_reset: Annotated[
        bool, _option("-s", "--skip-reset", env="SKIP_RESET", text="Reset no GPU: a mode may stay pending.")
    ] = False,
    drain: Annotated[
        Strings,
        typer.Option(
            "--drain",
            metavar="UNIT|CONTAINER|PID",
            help="Stop this first: a unit of systemd's or a container that is in the way (docker:ID), which"
            " start again afterwards, a process that is in the way, or nvidia_drm (repeatable).",
        ),
    ] = None,
    persist: Annotated[
        bool, typer.Option("--persist", help="Apply it at each boot too, by a unit before the engines.")
    ] = False,
    node_labels: Annotated[
        bool, typer.Option("--node-labels", help="Keep the Node's mig.config labels; in a pod always.")
    ] = False,
    kubeconfig: KubeconfigOption = "",
    kube_context: ContextOption = "",
    server: ServerOption = "",
    node: NodeOption = "",
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Stay, and apply what the Node's label mig.config says when it changes."
        ),
    ] = False,
    dry_run: DryRunOption = False,
) -> "Result":
    """Cut the GPUs as a configuration says. Refuses while they are in use; puts back what it can't finish.

    gpunode mig apply -f mig.yaml -c all-balanced --dry-run

    gpunode mig apply -f mig.yaml -c all-balanced --drain nvidia-dcgm --persist

    gpunode mig apply -f mig.yaml --watch --kubeconfig kubelet
    """
    from gpunode.commands import mig_apply as command

    options = command.Options(
        config_file,
        selected_config,
        mode_only,
        skip_reset,
        tuple(drain or ()),
        persist,
        dry_run,
        node_labels or bool(kubeconfig or kube_context or server or node),
        command.Access(kubeconfig, kube_context, server),
        node,
        watch,
    )
    if watch and not dry_run:
        from gpunode.commands import mig_follow

        return mig_follow.watch(session.host, options)
    return command.run(session.host, options, session.progress)


@verb(mig_app, "assert", "MigAssertion")
def mig_assert(
    session: Session,
    config_file: ConfigFileOption = "",
    selected_config: LabelOption = "",
    mode_only: ModeOnlyOption = False,
    valid_config: Annotated[
        bool, _option("-a", "--valid-config", env="VALID_CONFIG", text="Only read the file; ask no GPU.")
    ] = False,
) -> "Result":
    """Tell whether the GPUs are cut as a configuration says. Exit 5 if they are not.

    gpunode mig assert -f mig.yaml -c all-balanced
    """
    from gpunode.commands import mig_assert as command

    options = command.Options(config_file, selected_config, mode_only, valid_config)
    return command.run(session.host, options, session.progress)
