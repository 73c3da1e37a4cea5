"""What an engine's next start loses: the running daemon has it, and no file names it."""

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
