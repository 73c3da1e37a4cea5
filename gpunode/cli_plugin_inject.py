"""`gpunode plugin inject`: its options; the command is imported when it runs."""

# no `from __future__ import annotations`: Typer reads these annotations as objects

from typing import TYPE_CHECKING, Annotated

import typer

from gpunode.cli_plugin import plugin_app
from gpunode.commands.outcome import Session
from gpunode.commands.session import verb

if TYPE_CHECKING:
    from gpunode.output.result import Result

_FAULTS = "xid, ecc, lost, return, unplug, plug, remap, recovery, fabric, mig, reset, heal, driver"


@verb(plugin_app, "inject", "InjectedFault")
def plugin_inject(
    session: Session,
    fault: Annotated[str, typer.Argument(metavar="[FAULT]", help=f"What happens: {_FAULTS}.")] = "",
    value: Annotated[str, typer.Argument(metavar="[VALUE]", help="A number, a word or a MIG layout.")] = "",
    gpu: Annotated[str, typer.Option("--gpu", metavar="GPU", help="An index, a UUID or all.")] = "",
    gi: Annotated[
        int | None, typer.Option("--gi", metavar="ID", help="The GPU instance that an XID names.")
    ] = None,
    ci: Annotated[
        int | None, typer.Option("--ci", metavar="ID", help="The compute instance that an XID names.")
    ] = None,
    script: Annotated[
        str, typer.Option("--script", metavar="FILE", help="Play these timed faults, one JSON line each.")
    ] = "",
    state_dir: Annotated[
        str, typer.Option("--state-dir", metavar="DIR", help="What the plugin was given.")
    ] = "/var/lib/gpunode/plugin",
) -> "Result":
    """Let something happen to a simulated GPU. Only a plugin that runs with --simulate can be told so.

    gpunode plugin inject xid 79 --gpu 3

    gpunode plugin inject reset --gpu 3

    gpunode plugin inject --script faults.jsonl
    """
    from gpunode.commands import plugin_inject as command

    options = command.Options(
        fault=fault, value=value, gpu=gpu, gi=gi, ci=ci, script=script, state_dir=state_dir
    )
    return command.run(session.host, options, session.progress)
