"""Evidence about a systemd unit: its state, and why its last run failed."""

from __future__ import annotations

from gpunode.checks.model import seen
from gpunode.facts.node import Node
from gpunode.facts.unit_log import COMMAND, last_line
from gpunode.output.result import Evidence


def seen_unit(node: Node, name: str) -> tuple[Evidence, ...]:
    """The state of an installed unit and, if its last run failed, the last line that it logged."""
    unit = node.units.get(name)
    if unit is None or not unit.installed:
        return ()
    state = seen(name, str(unit))
    line = last_line(node.host, name) if unit.has_failed else ""
    return (state, seen(f"{COMMAND[0]} -u {name}", line)) if line else (state,)
