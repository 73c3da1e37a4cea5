"""Evidence about a systemd unit: its state, why its last run failed, and a fix that prints its log first;
and what an engine's next start loses."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from gpunode.checks.finding import Evidence, Fix, effect_of
from gpunode.checks.fixes import configure
from gpunode.checks.model import Verdict, cut, seen, warn
from gpunode.facts.daemons import Daemon
from gpunode.facts.effective import VARIANTS, configure_options, engine_settings, own_default
from gpunode.facts.node import Node
from gpunode.facts.registry import DISTRIBUTIONS, ENGINES
from gpunode.facts.system import CONTAINER
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


_RENDERED = ("k3s", "rke2", "microk8s")  # they write containerd's file again when they start


def lost_at_restart(
    node: Node, daemon: Daemon, nvidia: Collection[str], default: str, answer: Evidence, restart: Fix
) -> Verdict | None:
    """A warning if the running daemon has NVIDIA's handlers `nvidia`, or one of them as its `default`, and no
    file or flag names it. `answer` is what the daemon reported; `restart` completes an intended removal."""
    files = engine_settings(node.host, daemon)
    lost = files.lacks(nvidia)
    as_default = (
        default in nvidia and default not in VARIANTS and default != (files.default or own_default(daemon))
    )
    elsewhere = node.kind == CONTAINER and all(file.text is None for file in files.files)  # in another root
    unsure = files.problem or not files.complete or elsewhere or daemon.manager in _RENDERED
    if unsure or not (lost or as_default):
        return None
    title, kind = ENGINES[daemon.name].title, "runtime" if daemon.name == "docker" else "handler"
    what, why = f"{kind} {', '.join(lost)}", f"Containers that use this {kind} then don't start."
    if not lost:
        what, why = f"default {kind} {default}", f"Containers that name no {kind} then start without GPUs."
    places = [seen(file.path, f"no {what}" if file.text is not None else "missing") for file in files.files]
    options = configure_options(lost, default if as_default else "")
    fix = configure(daemon.manager if daemon.manager in DISTRIBUTIONS else daemon.name, *options)
    note = "If it was removed on purpose, this completes the removal instead; "
    note += f"it {effect_of(restart, node)}:\n{restart.command}"
    summary = f"{title} has the {what} only until its next start: no file names it"
    if as_default and "default" not in answer.value:
        places.insert(0, seen(answer.source, f"default: {default}"))
    evidence = (answer, *cut(places, 5, daemon.config_path))
    return warn(summary, *evidence, fix=replace(fix, note=note), why=why, reboot=True)
