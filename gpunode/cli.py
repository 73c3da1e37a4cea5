"""The command line: which commands and options there are. Everything heavy is imported inside a command."""

# no `from __future__ import annotations`: Typer reads these annotations as objects

import sys
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
import typer.core

from gpunode import __version__
from gpunode.cli_cdi import cdi_app
from gpunode.cli_completion import completion_app
from gpunode.cli_doctor import doctor_app
from gpunode.cli_driver import driver_app
from gpunode.cli_labels import labels_app
from gpunode.cli_manifests import manifests_app
from gpunode.cli_mig import mig_app
from gpunode.cli_mig_change import mig_apply, mig_assert, mig_plan  # noqa: F401
from gpunode.cli_mps import mps_app
from gpunode.cli_node import node_app
from gpunode.cli_plugin import plugin_app
from gpunode.cli_plugin_inject import plugin_inject  # noqa: F401
from gpunode.cli_plugin_status import plugin_status  # noqa: F401
from gpunode.cli_runtime import runtime_app
from gpunode.cli_setup import setup_app
from gpunode.cli_state import journal_app
from gpunode.cli_status import status_app
from gpunode.cli_toolkit import toolkit_app
from gpunode.cli_toolkit_packages import toolkit_install  # noqa: F401
from gpunode.cli_verify import verify_app
from gpunode.commands.outcome import Session
from gpunode.commands.session import run_app, takes_globals, verb

if TYPE_CHECKING:
    from gpunode.output.result import Result

# from looking to changing to undoing; what isn't named here follows
ORDER = (
    *("doctor", "explain", "report", "status", "setup", "configure-runtime", "verify", "unconfigure-runtime"),
    *("rollback", "journal", "gpus", "cdi", "driver", "toolkit", "mig", "plugin", "labels"),
    *("mps", "node", "manifests", "demo", "completion"),
)


class InOrder(typer.core.TyperGroup):
    """Lists commands in `ORDER` instead of the order in which modules define them."""

    def list_commands(self, ctx: object) -> list[str]:
        """Names for the help."""
        known = [name for name in ORDER if name in self.commands]
        return known + [name for name in self.commands if name not in ORDER]


app = typer.Typer(
    name="gpunode",
    cls=InOrder,
    help='From "driver installed" to proven GPU containers and pods, on one Linux node.',
    epilog="Start with: gpunode doctor. Every exit code is explained in docs/exit-codes.md.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "GPUNODE"},
)
app.add_typer(plugin_app, name="plugin")
app.add_typer(mig_app, name="mig")
app.add_typer(mps_app, name="mps")
app.add_typer(status_app, name="status")
app.add_typer(toolkit_app, name="toolkit")
app.add_typer(driver_app, name="driver")
app.add_typer(cdi_app, name="cdi")
app.add_typer(journal_app, name="journal")
app.add_typer(node_app, name="node")
app.add_typer(manifests_app, name="manifests")


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


app.add_typer(doctor_app)
app.add_typer(runtime_app)
app.add_typer(labels_app)
app.add_typer(setup_app)
app.add_typer(verify_app)
app.add_typer(completion_app)


@verb(app, "gpus", "GpuInventory")
def gpus(session: Session) -> "Result":
    """List the GPUs and MIG devices. What NVML, the driver's own library, tells of them.

    gpunode gpus -o json
    """
    from gpunode.commands import gpus as command

    return command.run(session.host, command.Options(), session.progress)


@verb(app, "demo", "Demo")
def demo(session: Session) -> "Result":
    """Show the whole way on a simulated node. 8 x H100 in a temporary directory; nothing else is touched."""
    from gpunode.commands import demo as command

    return command.run(session.host, command.Options(), session.progress)


def main() -> NoReturn:
    """Parse `sys.argv`, run it and exit."""
    sys.exit(run_app(app, sys.argv[1:]))
