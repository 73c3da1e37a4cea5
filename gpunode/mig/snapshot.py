"""The layout before a change, on disk while it runs: who finds it knows that a run was killed half-way.

Beside it lies what the run was to make. Only what lies between the two is that run's; a GPU that somebody has
cut otherwise since then is nobody's half-done work.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gpunode.dataclass import dataclass, field
from gpunode.gpu.mig_wire import layouts_from_json
from gpunode.gpu.traces import boot_id
from gpunode.host import Host
from gpunode.journal import state_directory
from gpunode.mig.layout import GpuInstance, GpuLayout, Layouts
from gpunode.mig.plan import GpuPlan, same_layout
from gpunode.result import plain

Spot = tuple[int, int, int]
"""A GPU instance by its profile's id, the first of its memory slots, and how many."""
Cut = tuple[Spot, tuple[int, ...]]
"""A GPU instance and the slices of its compute instances, the smallest first."""


@dataclass(frozen=True)
class Goal:
    """What a run was to make of one GPU; `cuts` is None where they weren't known when it began."""

    enabled: bool
    cuts: tuple[Cut, ...] | None


@dataclass(frozen=True)
class Begun:
    """Runs that didn't come to their end: `before` is each GPU as it was, `goals` are by UUID."""

    before: tuple[GpuLayout, ...] = ()
    goals: Mapping[str, tuple[Goal, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Left:
    """What such runs have left, each GPU as it was before: `half` lie between that and a goal, or have got
    there when another had not; `changed` were cut otherwise since, `unasked` can't be asked now."""

    half: tuple[GpuLayout, ...] = ()
    changed: tuple[GpuLayout, ...] = ()
    unasked: tuple[GpuLayout, ...] = ()


def path_of(host: Host) -> str:
    """Where it lies."""
    return f"{state_directory(host)}/mig-before.json"


def save(host: Host, before: Sequence[GpuLayout], plans: Sequence[GpuPlan], left: Left) -> None:
    """Keep what these GPUs were, and what these plans make of them.

    Of what earlier runs `left`, a half-way GPU keeps their goals too, and one that can't be asked all that
    was kept of it.
    """
    old = load(host)
    earlier = {gpu.uuid: old.goals.get(gpu.uuid, ()) for gpu in (*left.half, *left.unasked)}
    goals = {one.gpu.uuid: (*earlier.get(one.gpu.uuid, ()), _goal(one)) for one in plans}
    _write(host, Begun((*before, *left.unasked), {**earlier, **goals}))


def _goal(plan: GpuPlan) -> Goal:
    if plan.target is None:
        return Goal(plan.wish.enabled, None)
    cuts = tuple(
        ((t.profile_id, t.placement.start, t.placement.size), tuple(sorted(c.slices for c in t.compute)))
        for t in plan.target
    )
    return Goal(plan.wish.enabled, cuts)


def _write(host: Host, begun: Begun) -> None:
    host.make_dirs(state_directory(host), mode=0o700)
    goals = {uuid: plain(all_) for uuid, all_ in begun.goals.items()}
    data = {"boot": boot_id(host), "layouts": plain(Layouts("", begun.before)), "goals": goals}
    host.write_atomic(path_of(host), json.dumps(data).encode(), mode=0o600, keep=False)


def load(host: Host) -> Begun:
    """What runs began and didn't end; nothing from before the last boot, which takes all instances anyway."""
    text = host.read_text(path_of(host))
    try:
        data = json.loads(text or "null")
        if not isinstance(data, dict) or data.get("boot") != boot_id(host):
            return Begun()
        goals = {uuid: tuple(map(_read_goal, all_)) for uuid, all_ in data["goals"].items()}
        return Begun(layouts_from_json(data["layouts"]).gpus, goals)
    except (ValueError, KeyError, TypeError, AttributeError):
        return Begun()


def _read_goal(data: Mapping[str, Any]) -> Goal:
    cuts = data["cuts"]
    if cuts is None:
        return Goal(bool(data["enabled"]), None)
    found = (
        ((int(id_), int(start), int(size)), tuple(map(int, parts))) for (id_, start, size), parts in cuts
    )
    return Goal(bool(data["enabled"]), tuple(found))


def left(begun: Begun, now: Layouts) -> Left:
    """What of it still stands half-way. A run is one: nothing of it is done until all of it is."""
    half, changed, unasked, made = [], [], [], []
    for gpu in begun.before:
        seen = now.gpu(gpu.uuid)
        goals = begun.goals.get(gpu.uuid, ())
        if seen is None or seen.error or seen.untold:
            unasked.append(gpu)
        elif any(_reached(goal, seen) for goal in goals):
            made.append(gpu)
        elif same_layout(gpu, seen) or any(_between(gpu, goal, seen) for goal in (*goals, _all(goals))):
            half.append(gpu)
        else:
            changed.append(gpu)
    if not half and not unasked:
        made = []
    standing = sorted((one for one in (*half, *made) if not _as_before(one, now)), key=lambda one: one.index)
    return Left(tuple(standing), tuple(changed), tuple(unasked))


def _as_before(gpu: GpuLayout, now: Layouts) -> bool:
    seen = now.gpu(gpu.uuid)
    return seen is not None and same_layout(gpu, seen)


def _all(goals: Sequence[Goal]) -> Goal:
    """All goals as one, for what several runs have left."""
    cuts = [one.cuts for one in goals]
    known = [cut for one in cuts if one is not None for cut in one]
    return Goal(any(one.enabled for one in goals), None if None in cuts else tuple(known))


def _reached(goal: Goal, now: GpuLayout) -> bool:
    cuts = [(_spot(one), tuple(sorted(c.slices for c in one.compute))) for one in now.instances]
    mode = (now.current, now.pending) == (goal.enabled, goal.enabled)
    return mode and goal.cuts is not None and sorted(cuts) == sorted(goal.cuts)


def _between(before: GpuLayout, goal: Goal, now: GpuLayout) -> bool:
    if now.current not in (before.current, goal.enabled):
        return False
    if goal.cuts is None:
        return True
    return set(map(_spot, now.instances)) <= {*map(_spot, before.instances), *(spot for spot, _ in goal.cuts)}


def _spot(instance: GpuInstance) -> Spot:
    return instance.profile_id, instance.placement.start, instance.placement.size


def end(host: Host, unasked: Sequence[GpuLayout] = ()) -> None:
    """Changes have come to an end, one way or the other; kept is what GPUs were that can't be asked."""
    if unasked:
        begun = load(host)
        if tuple(unasked) != begun.before:
            goals = {gpu.uuid: begun.goals.get(gpu.uuid, ()) for gpu in unasked}
            _write(host, Begun(tuple(unasked), goals))
    elif host.read_text(path_of(host)) is not None:
        host.remove(path_of(host))
