"""Evidence about a systemd unit: its state, why its last run failed, and a fix that prints its log first."""

from __future__ import annotations

from gpunode.checks.model import seen
from gpunode.facts.node import Node
from gpunode.facts.unit_log import COMMAND, last_line
from gpunode.output.result import Evidence, Fix


def seen_unit(node: Node, name: str) -> tuple[Evidence, ...]:
    """The state of an installed unit and, if its last run failed, the last line that it logged."""
    unit = node.units.get(name)
    if unit is None or not unit.installed:
        return ()
    state = seen(name, str(unit))
    line = last_line(node.host, name) if unit.has_failed else ""
    return (state, seen(f"{COMMAND[0]} -u {name}", line)) if line else (state,)


def after_reading_log(name: str, command: str, effect: str = "none") -> Fix:
    """Print the unit's log, then run `command`: if the cause remains, a failed unit only fails again."""
    return Fix(f"{COMMAND[0]} -b -u {name} -n 30 --no-pager && {command}", True, effect)
