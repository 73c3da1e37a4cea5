"""The command line: a table of the commands, whose modules are imported when they are called."""

# no `from __future__ import annotations`: Typer reads these annotations as objects

import signal
import sys
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
import typer.main

from gpunode import __version__
from gpunode.commands.help_page import HelpGroup
from gpunode.commands.session import run_app, takes_globals

GROUPS = {
    "Diagnose": {
        "doctor": ("doctor:doctor_app", "Find out why GPUs don't work on this node."),
        "explain": ("explain:explain_app", "Explain one check, or list all checks."),
        "gpus": ("gpus:gpus_app", "List the GPUs and MIG devices."),
        "verify": ("verify:verify_app", "Run a CUDA program on every GPU and check the result."),
        "status": ("status:status_app", "Show the effective runtime configuration of each engine."),
        "report": ("report:report_app", "Create a support bundle."),
    },
    "Set up": {
        "setup": ("setup:setup_app", "Diagnose, configure and verify this node in one run."),
        "driver": ("driver:driver_app", "Plan and install the NVIDIA driver."),
        "toolkit": ("toolkit:toolkit_app", "Install and configure the NVIDIA Container Toolkit."),
        "configure-runtime": (
            "configure_runtime:runtime_app",
            "Register the nvidia runtime with a container engine.",
        ),
        "unconfigure-runtime": (
            "unconfigure_runtime:unconfigure_app",
            "Remove the nvidia runtime from a container engine.",
        ),
        "cdi": ("cdi:cdi_app", "Generate and list CDI specifications."),
        "mig": ("mig:mig_app", "Partition GPUs into MIG devices."),
        "journal": ("journal:journal_app", "List the changes that gpunode made on this node."),
        "rollback": ("journal:rollback_app", "Restore the files of a journal entry."),
        "reset": ("reset:reset_app", "Undo everything that gpunode changed on this node."),
    },
    "Kubernetes": {
        # its other commands are in plugin.py, which plugin_status.py imports
        "plugin": ("plugin_status:plugin_app", "Run and inspect the Kubernetes device plugin."),
        "labels": ("labels:labels_app", "Print or publish node labels that describe the GPUs."),
        "node": ("node:node_app", "Change this machine's Node object."),
        "manifests": ("manifests:manifests_app", "Print Kubernetes manifests."),
    },
    "Other": {
        "demo": ("demo:demo_app", "Run the whole set-up on a simulated node."),
        "schema": ("schema:schema_app", "Print the JSON Schema of the results."),
        "completion": ("completion:completion_app", "Print a shell completion script."),
        "help": ("help:help_app", "Show help for a command, or list the environment variables."),
        "version": ("help:version_app", "Print the version."),
    },
}
"""By heading and name: the module and name of its `typer.Typer`, and the line in `gpunode --help`."""
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}


class CommandTable(HelpGroup):
    """The commands of `COMMANDS`, each imported when a command line names it."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        self.commands = {
            name: typer.core.TyperCommand(name, help=line) for name, (_, line) in COMMANDS.items()
        }
        self._names_only = False

    def list_commands(self, ctx: object) -> list[str]:
        """Names for the help."""
        return list(COMMANDS)

    def get_command(self, ctx: object, cmd_name: str) -> Any:
        """The command of this name with its options; None if there is none."""
        if cmd_name not in COMMANDS or self._names_only:
            return self.commands.get(cmd_name)
        module, _, app_name = COMMANDS[cmd_name][0].partition(":")
        group = typer.main.get_group(getattr(import_module(f"gpunode.commands.{module}"), app_name))
        group.name = cmd_name
        return group.commands.get(cmd_name, group)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Names and lines of the table; no command's module is imported for them."""
        self._names_only = True
        return super().shell_complete(ctx, incomplete)

    def format_commands(self, ctx: object, formatter: Any) -> None:
        """The lists in the help, which need no command's module."""
        widest = max(map(len, COMMANDS))
        for heading, commands in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(widest), line) for name, (_, line) in commands.items()])


app = typer.Typer(
    name="gpunode",
    cls=CommandTable,
    help="Make containers and pods run on the GPUs of one Linux node, and prove it.",
    epilog="Start with: gpunode doctor. See gpunode help COMMAND for one command.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "GPUNODE"},
)


def _version(value: bool) -> None:
    if value:
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
    """Parse `sys.argv`, run it and exit. A signal that comes after the result can't change the exit code."""
    code = run_app(app, sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.exit(code)
