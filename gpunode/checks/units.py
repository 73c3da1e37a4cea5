"""Evidence about a systemd unit: its state, why its last run failed, and a fix that prints its log first."""

from __future__ import annotations

from gpunode.checks.finding import Evidence, Fix
from gpunode.checks.model import seen
from gpunode.facts.node import Node
from gpunode.host import Host

_JOURNAL = ("journalctl", "-b", "-q", "-n", "1", "--no-pager", "-o", "cat")
_SECONDS = 3.0


def seen_unit(node: Node, name: str) -> tuple[Evidence, ...]:
    """The state of an installed unit and, if its last run failed, the last line that it logged."""
    unit = node.units.get(name)
    if unit is None or not unit.installed:
        return ()
    state = seen(name, str(unit))
    line = _last_line(node.host, name) if unit.has_failed else ""
    return (state, seen(f"{_JOURNAL[0]} -u {name}", line)) if line else (state,)


def _last_line(host: Host, unit: str) -> str:
    """The last line that the unit's own processes logged in this boot; empty if none can be read.

    By the field that journald sets itself (systemd.journal-fields(7)): `-u` would also match systemd's own
    messages about the unit, and the last of those only says that it failed.
    """
    done = host.run((*_JOURNAL, f"_SYSTEMD_UNIT={unit}"), timeout=_SECONDS)
    lines = done.stdout.split("\n") if done.ok else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


# the cluster evicts pods once their node is not ready for five minutes (their default toleration)
ENDS_EVICTED = "ends pods that the cluster has evicted meanwhile"


def runs(node: Node, name: str) -> bool:
    """Whether the unit is active; False if unknown."""
    unit = node.units.get(name)
    return unit is not None and unit.runs


def stays_stopped(node: Node, name: str) -> bool:
    """Whether the next boot wouldn't start this stopped unit either: it has failed or isn't enabled. False if
    unknown."""
    unit = node.units.get(name)
    return unit is not None and unit.installed and (unit.has_failed or not unit.may_start_at_boot)


def start(*names: str, kubelet: bool = False) -> Fix:
    """Start stopped units, with `kubelet` also the kubelet or one of them being it."""
    evicted = f", which {ENDS_EVICTED}" if kubelet else ""
    return Fix(
        " && ".join(f"systemctl start {name}" for name in names),
        disruptive="restart",
        effect=f"starts {' and '.join(names)}{evicted}",
        note=if_stopped_again(*names),
        before="First make sure that the kubelet wasn't stopped on purpose" if kubelet else "",
    )


def if_stopped_again(*names: str) -> str:
    """The note of a fix that starts units: what to read if one stops again."""
    log = " ".join(f"-u {name}" for name in names)
    again = "it stops again, its log has" if len(names) == 1 else "one of them stops again, the log has"
    return f"If {again} the reason:\njournalctl -b {log} -n 30 --no-pager"


def after_reading_log(name: str, fix: Fix) -> Fix:
    """Print the unit's log before the fix: if the cause remains, a failed unit only fails again."""
    return fix.after(f"{_JOURNAL[0]} -b -u {name} -n 30 --no-pager")
