"""The command line: a table of the commands, whose modules are imported when they are called."""

# no `from __future__ import annotations`: Typer reads these annotations as objects

import sys
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
import typer.core
import typer.main

from gpunode import __version__
from gpunode.commands.session import run_app, takes_globals

# from diagnosis to changes to undoing them: the order of `gpunode --help`
COMMANDS = {
    "doctor": ("doctor:doctor_app", "Find out why GPUs don't work on this node."),
    "explain": ("explain:explain_app", "Explain one check, or list them all."),
    "report": ("report:report_app", "Pack a support bundle."),
    "status": ("status:status_app", "What is in force on this node."),
    "setup": ("setup:setup_app", "Run every step up to a proof."),
    "configure-runtime": ("configure_runtime:runtime_app", "Register the nvidia runtime with the engine."),
    "verify": ("verify:verify_app", "Prove it: compute on every GPU."),
    "unconfigure-runtime": ("unconfigure_runtime:unconfigure_app", "Take the nvidia runtime out again."),
    "rollback": ("journal:rollback_app", "Restore the files of a journal entry."),
    "journal": ("journal:journal_app", "What gpunode changed on this node."),
    "gpus": ("gpus:gpus_app", "List the GPUs and MIG devices."),
    "cdi": ("cdi:cdi_app", "Name the GPUs to engines by CDI specifications."),
    "driver": ("driver:driver_app", "Plan and install the driver that the GPUs need."),
    "toolkit": ("toolkit:toolkit_app", "Install and configure the NVIDIA Container Toolkit."),
    "mig": ("mig:mig_app", "Cut GPUs into MIG devices."),
    "plugin": ("plugin_status:plugin_app", "Serve GPUs to Kubernetes."),
    "labels": ("labels:labels_app", "Label the node by its GPUs."),
    "node": ("node:node_app", "Change this machine's Node object in Kubernetes."),
    "manifests": ("manifests:manifests_app", "Print Kubernetes objects."),
    "demo": ("demo:demo_app", "Show the whole way on a simulated node."),
    "completion": ("completion:completion_app", "Print shell completion."),
}
"""By name: the module of gpunode.commands and its `typer.Typer`, and the line in `gpunode --help`."""


class CommandTable(typer.core.TyperGroup):
    """The commands of `COMMANDS`, each imported when a command line names it."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        self.commands = {name: typer.core.TyperCommand(name=name) for name in COMMANDS}

    def list_commands(self, ctx: object) -> list[str]:
        """Names for the help."""
        return list(COMMANDS)

    def get_command(self, ctx: object, cmd_name: str) -> Any:
        """The command of this name with its options; None if there is none."""
        if cmd_name not in COMMANDS:
            return None
        module, _, app_name = COMMANDS[cmd_name][0].partition(":")
        group = typer.main.get_group(getattr(import_module(f"gpunode.commands.{module}"), app_name))
        group.name = cmd_name
        return group.commands.get(cmd_name, group)

    def format_commands(self, ctx: object, formatter: Any) -> None:
        """The list in the help, which needs no command's module."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


app = typer.Typer(
    name="gpunode",
    cls=CommandTable,
    help='From "driver installed" to proven GPU containers and pods, on one Linux node.',
    epilog="Start with: gpunode doctor. Every exit code is explained in docs/exit-codes.md.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "GPUNODE"},
)


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"gpunode {__version__}\n")
        raise SystemExit(0)


def _main(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_version,
            is_eager=True,
            allow_from_autoenv=False,
            show_envvar=False,
            help="Print the version.",
        ),
    ] = False,
) -> None:
    """Nothing to do before a command but to keep the global options."""


app.callback()(takes_globals(_main))


def main() -> NoReturn:
    """Parse `sys.argv`, run it and exit."""
    sys.exit(run_app(app, sys.argv[1:]))
