"""`gpunode plugin explain-placement`: its options; the command is imported when it runs."""

# no `from __future__ import annotations`: Typer reads these annotations as objects

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpunode.cli_plugin import plugin_app
from gpunode.cli_settings import SettingsCommand
from gpunode.commands.outcome import Session
from gpunode.commands.session import verb

if TYPE_CHECKING:
    from gpunode.output.result import Result

_Ids = list[str] | None


@verb(plugin_app, "explain-placement", "PlacementExplanation", cls=SettingsCommand)
def plugin_explain_placement(
    session: Session,
    size: Annotated[int, typer.Option("--size", metavar="N", help="How many devices a container asks for.")],
    available: Annotated[
        _Ids, typer.Option("--available", metavar="LIST", help="Free devices: indices or ids; else all are.")
    ] = None,
    must_include: Annotated[
        _Ids, typer.Option("--must-include", metavar="LIST", help="Devices that it must get.")
    ] = None,
    resource: Annotated[
        str, typer.Option("--resource", metavar="NAME", help="Which resource, if there are several.")
    ] = "",
    **given: Any,
) -> "Result":
    """Explain which devices a container would get. How the GPUs hang together, and what is left for others.

    Takes what `plugin serve` takes, --simulate included; changes nothing.

    gpunode plugin explain-placement --size 4 --available 0,2,3,5,6,7

    gpunode plugin explain-placement --size 2 --simulate h100:8
    """
    from gpunode.commands import plugin_explain_placement as command

    options = command.Options(size, tuple(available or ()), tuple(must_include or ()), resource, given)
    return command.run(session.host, options, session.progress)
