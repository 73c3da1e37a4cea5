"""What `mig apply` keeps on disk while it runs, so that the next run can finish or undo a killed one.

It is not in the journal: a layout is no file that a copy restores, and the next run decides by what NVML
reports then. A boot ends both records, because it removes the instances and starts services again, while a
journal entry stays.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gpunode.facts.processes import start_ticks
from gpunode.gpu.driver_traces import boot_id
from gpunode.host import Host
from gpunode.host.journal import state_directory
from gpunode.mig.model import GpuInstance, GpuLayout, Layouts, layouts_from_json
from gpunode.mig.placement import InstanceTarget
from gpunode.mig.plan import GpuPlan, same_layout
from gpunode.mig.users import StoppedUsers
from gpunode.output.typed import from_plain, plain

# The snapshot of the layout before a change, on disk while the run lasts: if it exists, a run was killed.
#
# The target layout is stored with it. A GPU in any state between the two was left so by that run; a GPU that
# was given another layout since is not treated as unfinished.

Spot = tuple[int, int, int]
"""A GPU instance by its profile's id, the first of its memory slots, and how many."""
Cut = tuple[Spot, tuple[int, ...]]
"""A GPU instance and the slices of its compute instances, the smallest first."""


class LayoutGoal(NamedTuple):
    """The target of a run for one GPU; `cuts` is None where it wasn't known when the run started."""

    enabled: bool
    cuts: tuple[Cut, ...] | None


class LayoutSnapshot(NamedTuple):
    """Runs that didn't finish: each GPU's earlier layout, and the goals by UUID."""

    layouts: Layouts
    goals: Mapping[str, tuple[LayoutGoal, ...]]


_NO_RUN = LayoutSnapshot(Layouts(), {})


class UnfinishedGpus(NamedTuple):
    """The GPUs that such runs left unfinished, each with its earlier layout.

    `half` are between that layout and a goal, or have reached the goal while another GPU has not; `changed`
    were given another layout since; `unasked` can't be read now.
    """

    half: tuple[GpuLayout, ...] = ()
    changed: tuple[GpuLayout, ...] = ()
    unasked: tuple[GpuLayout, ...] = ()


def snapshot_path(host: Host) -> str:
    """The snapshot's path."""
    return f"{state_directory(host)}/mig-before.json"


def save(host: Host, before: Sequence[GpuLayout], plans: Sequence[GpuPlan], left: UnfinishedGpus) -> None:
    """Write the present layouts of these GPUs and the targets of these plans.

    A GPU that an earlier run `left` unfinished keeps that run's goals too, and one that can't be read keeps
    its whole record.
    """
    old = load_snapshot(host)
    earlier = {gpu.uuid: old.goals.get(gpu.uuid, ()) for gpu in (*left.half, *left.unasked)}
    goals = {}
    for plan in plans:
        goal = LayoutGoal(plan.wish.enabled, None if plan.target is None else tuple(map(_cut, plan.target)))
        goals[plan.gpu.uuid] = (*earlier.get(plan.gpu.uuid, ()), goal)
    snapshot = LayoutSnapshot(Layouts("", (*before, *left.unasked)), {**earlier, **goals})
    _write_record(host, snapshot_path(host), snapshot)


def _write_record(host: Host, path: str, record: object) -> None:
    host.make_dirs(state_directory(host), mode=0o700)
    data = {"boot": boot_id(host), **plain(record)}
    host.write_atomic(path, json.dumps(data).encode(), mode=0o600, keep=False)


def _read_record(host: Host, path: str) -> dict[str, Any] | None:
    """None without one of this boot: a boot removes instances and starts services again."""
    data = json.loads(host.read_text(path) or "null")
    return data if isinstance(data, dict) and data.get("boot") == boot_id(host) else None


def load_snapshot(host: Host) -> LayoutSnapshot:
    """The runs of this boot that started and didn't finish."""
    try:
        data = _read_record(host, snapshot_path(host))
        if data is None:
            return _NO_RUN
        return from_plain(LayoutSnapshot, data)._replace(layouts=layouts_from_json(data["layouts"]))
    except ValueError:
        return _NO_RUN


def unfinished_gpus(snapshot: LayoutSnapshot, now: Layouts) -> UnfinishedGpus:
    """The GPUs that are still unfinished. A run counts as a whole: it is finished once all its GPUs are."""
    half, changed, unasked, completed = [], [], [], []
    for gpu in snapshot.layouts.gpus:
        seen = now.gpu(gpu.uuid)
        goals = snapshot.goals.get(gpu.uuid, ())
        if seen is None or seen.error or seen.untold:
            unasked.append(gpu)
        elif any(_reached(goal, seen) for goal in goals):
            completed.append(gpu)
        elif same_layout(gpu, seen) or any(_between(gpu, goal, seen) for goal in (*goals, _all(goals))):
            half.append(gpu)
        else:
            changed.append(gpu)
    if not half and not unasked:
        completed = []
    standing = sorted(
        (gpu for gpu in (*half, *completed) if not ((seen := now.gpu(gpu.uuid)) and same_layout(gpu, seen))),
        key=lambda entry: entry.index,
    )
    return UnfinishedGpus(tuple(standing), tuple(changed), tuple(unasked))


def _all(goals: Sequence[LayoutGoal]) -> LayoutGoal:
    """The goals of several unfinished runs as one."""
    cuts = [goal.cuts for goal in goals]
    known = [cut for goal_cuts in cuts if goal_cuts is not None for cut in goal_cuts]
    return LayoutGoal(any(goal.enabled for goal in goals), None if None in cuts else tuple(known))


def _reached(goal: LayoutGoal, now: GpuLayout) -> bool:
    mode = (now.current, now.pending) == (goal.enabled, goal.enabled)
    return mode and goal.cuts is not None and sorted(map(_cut, now.instances)) == sorted(goal.cuts)


def _between(before: GpuLayout, goal: LayoutGoal, now: GpuLayout) -> bool:
    if now.current not in (before.current, goal.enabled):
        return False
    if goal.cuts is None:
        return True
    known = {spot for spot, _ in (*map(_cut, before.instances), *goal.cuts)}
    return {spot for spot, _ in map(_cut, now.instances)} <= known


def _cut(part: GpuInstance | InstanceTarget) -> Cut:
    spot = part.profile_id, part.placement.start, part.placement.size
    return spot, tuple(sorted(compute.slices for compute in part.compute))


def end(host: Host, unasked: Sequence[GpuLayout] = ()) -> None:
    """Remove the snapshot after success or failure, except for GPUs that can't be read."""
    if unasked:
        snapshot = load_snapshot(host)
        if tuple(unasked) != snapshot.layouts.gpus:
            goals = {gpu.uuid: snapshot.goals.get(gpu.uuid, ()) for gpu in unasked}
            rest = LayoutSnapshot(Layouts("", tuple(unasked)), goals)
            _write_record(host, snapshot_path(host), rest)
    elif host.read_text(snapshot_path(host)) is not None:
        host.remove(snapshot_path(host))


# The record of a running `mig apply`: its start, its command, and what it has stopped.
#
# It is on disk before the first service is stopped, so after a kill -9 the next run knows what is still
# stopped and how to continue. `save` writes the layouts themselves.


class UnfinishedRun(NamedTuple):
    """`since` is seconds since the epoch, `command` the arguments of gpunode that continue the run.

    `process` is its process id and start (clock ticks since boot, proc_pid_stat(5)); (0, "") once it has
    ended.
    """

    since: float
    command: tuple[str, ...]
    drained: StoppedUsers = StoppedUsers()
    process: tuple[int, str] = (0, "")


def unfinished_path(host: Host) -> str:
    """The record's path."""
    return f"{state_directory(host)}/mig-run.json"


def load_unfinished(host: Host) -> UnfinishedRun | None:
    """The unfinished run of this boot."""
    try:
        data = _read_record(host, unfinished_path(host))
        return from_plain(UnfinishedRun, data["run"]) if data is not None else None
    except (ValueError, KeyError):
        return None


def lives(host: Host, run: UnfinishedRun) -> bool:
    """Whether its process is still running: then it isn't unfinished."""
    pid, started = run.process
    return pid > 0 and _start(host, pid) == started


def _start(host: Host, pid: int) -> str:
    return str(start_ticks(host, pid) or "")


class RunRecorder:
    """Keeps the record of one run, and continues an earlier run's. Requires the node's lock."""

    def __init__(self, host: Host, command: tuple[str, ...]) -> None:
        self._host = host
        self.earlier = load_unfinished(host)
        drained = self.earlier.drained if self.earlier is not None else StoppedUsers()
        pid = os.getpid()
        self._run = UnfinishedRun(host.now(), command, drained, (pid, _start(host, pid)))
        self._begun = False

    @property
    def drained(self) -> StoppedUsers:
        """What is stopped, by this run or the one before."""
        return self._run.drained

    def begin(self) -> None:
        """Write the record, before the first change."""
        self._begun = True
        self._write(self._run)

    def stop(self, drained: StoppedUsers) -> None:
        """Record one more thing that is about to be stopped."""
        self._run = self._run._replace(drained=drained)
        self.begin()

    def end(self, still: StoppedUsers, *, half: bool, failed: bool) -> None:
        """End the record.

        `still` couldn't be restarted. `half`: some GPU is still between two layouts, because of this run if
        it has `failed`.
        """
        self._run = self._run._replace(drained=still)
        base = self._run if self._begun and failed else self.earlier or self._run
        if still.restart_commands or (half and (self._begun or self.earlier is not None)):
            self._write(base._replace(drained=still, process=(0, "")))
        elif self._host.read_text(unfinished_path(self._host)) is not None:
            self._host.remove(unfinished_path(self._host))

    def _write(self, run: UnfinishedRun) -> None:
        _write_record(self._host, unfinished_path(self._host), {"run": run})
