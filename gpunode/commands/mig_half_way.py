"""What a run of `mig apply` that was killed has left, in one line."""

from __future__ import annotations

import shlex
import time

from gpunode.host import Host
from gpunode.mig import snapshot, unfinished
from gpunode.mig.layout import Layouts


def told(host: Host, layouts: Layouts) -> tuple[str, ...]:
    """Since when, what it had stopped, which GPUs it left between two layouts, and the command that goes on.

    Nothing while that run works, or where nothing of it stands any more. Only root may know.
    """
    if not host.is_root:
        return ()
    run = unfinished.load(host)
    if run is not None and unfinished.lives(host, run):
        return ()
    left = snapshot.left(snapshot.load(host), layouts)
    parts = list(_stopped(run) if run is not None else ())
    if left.half:
        numbers = ", ".join(str(gpu.index) for gpu in left.half)
        parts.append(f"GPU {numbers} {'is' if len(left.half) == 1 else 'are'} half-way")
    if not parts:
        return ()
    if run is None:
        return (f"a run of mig apply was left half-way: {'; '.join(parts)}; go on with gpunode mig apply",)
    command = shlex.join(("gpunode", *run.command))
    return (f"{begun(run)} was left half-way: {'; '.join(parts)}; go on: {command}",)


def begun(run: unfinished.Run) -> str:
    """A run, by when it began."""
    return f"a run of mig apply begun at {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(run.since))}"


def _stopped(run: unfinished.Run) -> tuple[str, ...]:
    if not run.drained.again:
        return ()
    ended = [f"process {pid}" for pid in run.drained.pids]
    names = [name for name in run.drained.names if not name.isdigit()]
    return (f"it had stopped {', '.join([*names, *ended])}",)
