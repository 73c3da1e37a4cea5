"""How a MIG plan looks: today beside wanted, slot by slot, the steps, and who is in the way."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence

from gpunode.commands.mig_wanted import Planned
from gpunode.dataclass import dataclass
from gpunode.mig.busy import Obstacle
from gpunode.mig.layout import Placement
from gpunode.mig.plan import Device, GpuPlan, Step
from gpunode.result import Block, Cell, Style, Table, Text


@dataclass(frozen=True)
class Piece:
    """A GPU instance, there or wanted: profile, memory slots, MIG devices; `gi` if it is there."""

    profile: str
    placement: Placement
    devices: tuple[str, ...]
    gi: int | None = None


@dataclass(frozen=True)
class PlannedGpu:
    """One GPU in `data`. `mode` are on and off, today and as wanted; `reset` is none, needed or unknown.

    `wanted` is null where the driver tells its profiles only once MIG is on.
    """

    index: int
    uuid: str
    name: str
    pci: str
    mode: tuple[str, str]
    reset: str
    today: tuple[Piece, ...]
    wanted: tuple[Piece, ...] | None
    steps: tuple[Step, ...]
    lost: tuple[Device, ...]
    kept: tuple[Device, ...]


@dataclass(frozen=True)
class MigPlan:
    """`data` of kind MigPlan."""

    config: str
    label: str
    changes: bool
    gpus: tuple[PlannedGpu, ...]
    obstacles: tuple[dict[str, object], ...]


def data_of(config: str, label: str, found: Planned, busy: Sequence[Obstacle]) -> MigPlan:
    """The plan for programs."""
    told = tuple(
        {
            "kind": one.kind,
            "gpu": one.gpu,
            "what": one.what,
            "name": one.name,
            "pid": one.pid,
            "container": one.container,
            "pod": one.pod,
            "unit": one.unit,
            "drain": one.drain,
        }
        for one in busy
    )
    return MigPlan(config, label, found.changes, tuple(_gpu(one) for one in found.plans), told)


def _gpu(plan: GpuPlan) -> PlannedGpu:
    gpu = plan.gpu
    wanted = None
    if plan.target is not None:
        wanted = tuple(
            Piece(t.name, t.placement, t.devices, t.kept.id if t.kept is not None else None)
            for t in plan.target
        )
    return PlannedGpu(
        gpu.index,
        gpu.uuid,
        gpu.name,
        gpu.pci,
        (_mode(gpu.current), _mode(plan.wish.enabled)),
        plan.reset,
        _today(plan),
        wanted,
        plan.steps,
        plan.lost,
        plan.kept,
    )


def _mode(on: bool) -> str:
    return "on" if on else "off"


def _today(plan: GpuPlan) -> tuple[Piece, ...]:
    return tuple(
        Piece(gi.name, gi.placement, tuple(gi.device_name(ci) for ci in gi.compute), gi.id)
        for gi in sorted(plan.gpu.instances, key=lambda one: one.placement.start)
    )


def blocks(data: MigPlan, busy: Sequence[Obstacle]) -> Iterator[Block]:
    """The plan for people. GPUs with the same plan are told of together."""
    groups: dict[tuple[object, ...], list[PlannedGpu]] = {}
    for gpu in data.gpus:
        key = (gpu.name, gpu.mode, gpu.reset, _shape(gpu.today), _shape(gpu.wanted or ()), lines(gpu.steps))
        groups.setdefault((*key, gpu.wanted is None), []).append(gpu)
    for members in groups.values():
        yield from _group(members)
    if busy:
        yield Text("In the way:", Style.BAD)
        yield from (Text(f"  {one.text}", Style.WARN) for one in busy)


def _shape(pieces: Sequence[Piece]) -> tuple[object, ...]:
    return tuple((one.profile, str(one.placement), one.devices, one.gi is None) for one in pieces)


def _group(members: Sequence[PlannedGpu]) -> Iterator[Block]:
    first = members[0]
    numbers = ", ".join(str(one.index) for one in members)
    title = f"GPU{'s' if len(members) > 1 else ''} {numbers}  {first.name}"
    today, wanted = first.mode
    if today != wanted:
        title += f"  MIG {today} -> {wanted}"
    if not any(one.steps for one in members) and first.wanted is not None:
        yield Text(f"{title}: unchanged", Style.GOOD)
        return
    yield Text(title, Style.HEADING)
    if first.wanted is None:
        yield Text("  the driver tells the profiles only once MIG is on: places are chosen then", Style.WARN)
    elif first.today or first.wanted:
        yield Table(("SLOTS", "TODAY", "WANTED", ""), tuple(_rows(first)))
    for gpu in members:
        name = f"GPU {gpu.index}" if len(members) > 1 else ""
        for one in gpu.lost:
            yield Text(
                f"  {name}{': ' if name else ''}goes: {one.profile} at {one.at}  {one.uuid}", Style.WARN
            )
    if first.reset != "none":
        sure = "will be reset" if first.reset == "needed" else "may have to be reset"
        yield Text(f"  {sure}: everything that uses the GPU must end first", Style.WARN)
    for line in lines(first.steps):
        yield Text(f"  {line}", Style.COMMAND)


def lines(steps: Sequence[Step]) -> tuple[str, ...]:
    """The steps for people: what an instance holds goes and comes with it."""
    gone = {step.gi for step in steps if step.action == "destroy-instance"}
    made = {step.at for step in steps if step.action == "create-instance"}
    found = []
    for step in steps:
        if step.action == "create-instance":
            inner = [one.slices for one in steps if one.action == "create-compute" and one.at == step.at]
            whole = len(inner) == 1 and step.profile.startswith(f"{inner[0]}g.")
            parts = "" if whole else " with " + ", ".join(f"{size}c" for size in inner)
            found.append(step.text + (parts if inner else ", empty"))
        elif not _inside(step, gone, made):
            found.append(step.text)
    return tuple(found)


def _inside(step: Step, gone: Collection[int | None], made: Collection[Placement | None]) -> bool:
    """Whether it is part of another step: of what goes or comes as a whole."""
    if step.action == "destroy-compute":
        return step.gi in gone
    return step.action == "create-compute" and step.gi is None and step.at in made


def _rows(gpu: PlannedGpu) -> Iterator[tuple[Cell | str, ...]]:
    """One row for each run of slots within which neither layout has a border."""
    wanted = gpu.wanted or ()
    edges = sorted({0} | {edge for one in (*gpu.today, *wanted) for edge in _edges(one)})
    for start, end in itertools.pairwise(edges):
        now, then = _at(gpu.today, start), _at(wanted, start)
        slots = f"{start}" if end - start == 1 else f"{start}-{end - 1}"
        yield slots, _cell(now, start), _cell(then, start), _word(now, then, start)


def _edges(piece: Piece) -> tuple[int, int]:
    return piece.placement.start, piece.placement.end


def _at(pieces: Sequence[Piece], slot: int) -> Piece | None:
    return next((one for one in pieces if one.placement.start <= slot < one.placement.end), None)


def _cell(piece: Piece | None, start: int) -> Cell | str:
    if piece is None:
        return Cell("-", Style.DIM)
    if piece.placement.start != start:
        return Cell('"', Style.DIM)
    names = sorted(set(piece.devices))
    if names == [piece.profile]:
        return piece.profile
    parts = ", ".join(f"{piece.devices.count(name)} x {name}" for name in names) or "no compute instance"
    return f"{piece.profile} ({parts})"


def _word(now: Piece | None, then: Piece | None, start: int) -> Cell | str:
    if then is not None and then.gi is not None:
        same = now is not None and sorted(now.devices) == sorted(then.devices)
        return Cell("stays" if same else "changes within", Style.GOOD if same else Style.WARN)
    if then is not None:
        return Cell("new", Style.GOOD) if now is None else Cell("replaced", Style.WARN)
    return Cell("goes", Style.WARN) if now is not None else ""
