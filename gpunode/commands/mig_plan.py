"""`gpunode mig plan`: the current layout beside the desired one, what is removed, and which processes block
it.
"""

from __future__ import annotations

import itertools
import os
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from gpunode.commands.options import Strings, completable
from gpunode.errors import ConfigError, GpunodeError, UsageError
from gpunode.facts.fabric import PROGRAM, UNIT
from gpunode.facts.mig import keeper
from gpunode.facts.node import Node
from gpunode.host import Host
from gpunode.mig import unfinished
from gpunode.mig.config import (
    DesiredLayouts,
    LayoutEntry,
    MigConfig,
    desired_layouts,
    difference,
    parse,
)
from gpunode.mig.model import Layouts, Placement
from gpunode.mig.node_labels import in_pod
from gpunode.mig.placement import summary
from gpunode.mig.plan import GpuPlan, MigStep, PresentDevice, plan, put_back
from gpunode.mig.session import MigProcess, MigSession, read_layouts
from gpunode.mig.users import Obstacle, clients, obstacles, untold
from gpunode.output.result import Block, Cell, Progress, Style, Table, Text

# What `mig plan`, `apply` and `assert` share: the configuration, the GPUs, the plan, the processes that block
# it.

_MAX_BYTES = 1 << 20
_THE_NODES = "pid:[4026531836]"  # PROC_PID_INIT_INO of the kernel's include/linux/proc_ns.h


def mig_labels(ctx: typer.Context) -> list[str]:
    """Names of the configurations in the file of --config-file."""
    path = ctx.params.get("config_file")
    if not path or not Path(path).is_file():  # standard input is the terminal's, and a pipe may block
        return []
    return completable(read(path)[1].labels)


def parted_option(*names: str, env: str, text: str, **more: Any) -> Any:
    """An option of mig-parted's, which its variable sets as well as ours."""
    return typer.Option(*names, envvar=[f"GPUNODE_MIG_{env}", f"MIG_PARTED_{env}"], help=text, **more)


@dataclass(frozen=True)
class ConfigurationOptions:
    """The configuration of `mig plan`, `apply` and `assert`."""

    config_file: Annotated[
        str,
        parted_option(
            "-f",
            "--config-file",
            env="CONFIG_FILE",
            metavar="FILE",
            text="File such as docs/mig-config.yaml; - is standard input. [required]",
        ),
    ] = ""
    selected_config: Annotated[
        str,
        parted_option(
            "-c",
            "--selected-config",
            env="SELECTED_CONFIG",
            metavar="LABEL",
            text="Configuration of the file; required if it has several.",
            autocompletion=mig_labels,
        ),
    ] = ""
    mode_only: Annotated[
        bool,
        parted_option(
            "-m",
            "--mode-only",
            env="MODE_CHANGE_ONLY",
            text="Change or check only whether MIG is on, not the partitions.",
        ),
    ] = False


@dataclass(frozen=True)
class LayoutRequest(ConfigurationOptions):
    """A configuration to apply, and the actions that the run may take for it.

    `drain` names the units, containers, processes and nvidia_drm that the run stops. With `skip_reset` a mode
    change that needs a reset stays pending; `persist` applies the layout at each boot too.
    """

    skip_reset: Annotated[
        bool,
        parted_option(
            "-s",
            "--skip-reset",
            env="SKIP_RESET",
            text="Don't reset GPUs; a change of the MIG mode may then need a reboot.",
        ),
    ] = False
    drain: Annotated[
        Strings,
        typer.Option(
            "--drain",
            metavar="UNIT|CONTAINER|PID,...",
            help="Stop these users of a GPU first; a unit, such as nvidia-dcgm (monitoring), or container"
            " (docker:ID) is started again, a PID (SIGTERM) isn't.",
        ),
    ] = None
    persist: Annotated[
        bool, typer.Option("--persist", help="Also apply the layout at each boot, before the engines start.")
    ] = False


class ConfigSelection(NamedTuple):
    """A label of a configuration file, and the file's bytes; with `mode_only` only its modes matter."""

    path: str
    label: str
    entries: tuple[LayoutEntry, ...]
    data: bytes
    mode_only: bool = False

    def desired(self, layouts: Layouts, *, mode_only: bool = False) -> DesiredLayouts:
        """`ImpossibleMigConfig` for layouts that this node can't have."""
        return desired_layouts(self.path, self.label, self.entries, layouts, mode_only=mode_only)


class LayoutPlan(NamedTuple):
    """The current state, the plan of each GPU that the configuration names, and the notes.

    `left` is what earlier runs left incomplete: those GPUs count as what they were before, and are restored
    to that where the configuration doesn't name them.
    """

    layouts: Layouts
    plans: tuple[GpuPlan, ...]
    notes: tuple[str, ...] = ()
    left: unfinished.UnfinishedGpus = unfinished.UnfinishedGpus()

    @property
    def changes(self) -> bool:
        """Whether there is anything to change."""
        return bool(self.steps)

    @property
    def steps(self) -> tuple[GpuPlan, ...]:
        """The plans with changes."""
        return tuple(gpu_plan for gpu_plan in self.plans if gpu_plan.steps or gpu_plan.target is None)


def choose(options: ConfigurationOptions, requested_label: Callable[[], str] = str) -> ConfigSelection:
    """Read the file (``-``: standard input) of this machine and select a label; errors say what is wrong.
    `requested_label` selects one if there are several and the user named none."""
    data, config = read(options.config_file)
    label = options.selected_config or (requested_label() if len(config.labels) > 1 else "")
    return ConfigSelection(config.path, *config.select(label), data, options.mode_only)


def read(path: str) -> tuple[bytes, MigConfig]:
    """The file's bytes and all its configurations; errors as in `choose`."""
    if not path:
        raise UsageError("no configuration file was given", hint="name it: --config-file FILE")
    data = _read(path)
    return data, parse(data, "standard input" if path == "-" else path)


def _read(path: str) -> bytes:
    if path == "-":
        return sys.stdin.buffer.read(_MAX_BYTES)
    place = str(Path(path).absolute())
    if Host(Path("/")).is_dir(place):
        raise ConfigError(f"{path} is a directory", hint=f"name a file in it: --config-file {path}/FILE")
    content = Host(Path("/")).read_bytes(place)
    if content is None:
        raise ConfigError(
            f"{path} doesn't exist", hint="name a file in mig-parted's form: --config-file FILE"
        )
    return content


def planned(host: Host, selection: ConfigSelection, layouts: Layouts) -> LayoutPlan:
    """The plan for these layouts. `ImpossibleMigConfig` for layouts that this node can't have."""
    desired = selection.desired(layouts)
    plans = plan(selection.path, desired.all, mode_only=selection.mode_only)
    unfinished_gpus = unfinished.UnfinishedGpus()
    if host.is_root:
        unfinished_gpus = unfinished.unfinished_gpus(unfinished.load_snapshot(host), layouts)
    others = tuple(_restoring_plans(layouts, desired, unfinished_gpus))
    restored = {gpu_plan.gpu.index for gpu_plan in others}
    notes = [
        f"GPU {gpu.index} is in no entry of {selection.label!r} and stays as it is"
        for gpu in desired.unnamed
        if gpu.index not in restored
    ]
    ordered = sorted((*plans, *others), key=lambda gpu_plan: gpu_plan.gpu.index)
    return LayoutPlan(
        layouts,
        tuple(ordered),
        (*_unfinished_lines(unfinished_gpus, restored), *desired.notes, *notes),
        unfinished_gpus,
    )


def _restoring_plans(
    layouts: Layouts, desired: DesiredLayouts, unfinished_gpus: unfinished.UnfinishedGpus
) -> Iterator[GpuPlan]:
    """Plans for GPUs that an interrupted run left and this one doesn't name."""
    uuids = {wish.gpu.uuid for wish in desired.all}
    for gpu in unfinished_gpus.half:
        now = layouts.gpu(gpu.uuid)
        if now is not None and gpu.uuid not in uuids:
            yield put_back(now, gpu)


def _unfinished_lines(unfinished_gpus: unfinished.UnfinishedGpus, restored: Collection[int]) -> Iterator[str]:
    message = "an earlier run of mig apply was interrupted"
    for gpu in unfinished_gpus.half:
        consequence = (
            "gets its previous layout back" if gpu.index in restored else "is planned from its current layout"
        )
        yield f"{message}: GPU {gpu.index} {consequence}"
    for gpu in unfinished_gpus.changed:
        yield f"{message}, but GPU {gpu.index} has another layout since: that is taken as its current one"
    for gpu in unfinished_gpus.unasked:
        cut = summary(gpu.devices()) or ("no MIG device" if gpu.current else "MIG off")
        yield f"{message}, and GPU {gpu.index} can't be queried now; it had {cut}"


def holds(selection: ConfigSelection, layouts: Layouts) -> bool:
    """Whether these layouts match the whole configuration, and not only its modes."""
    try:
        desired = selection.desired(layouts).all
    except GpunodeError:
        return False
    return not any(wish.gpu.mode_pending or difference(wish) for wish in desired)


def look(host: Host) -> tuple[Layouts, dict[str, tuple[MigProcess, ...]]]:
    """The layouts, and the processes that NVML reports on each GPU; a recorded machine has no processes."""
    if not host.live:
        return read_layouts(host), {}
    with MigSession(host) as session:
        layouts = session.layouts()
        able = [gpu.uuid for gpu in layouts.gpus if gpu.uuid and not gpu.error and gpu.capable]
        return layouts, {uuid: session.processes(uuid) for uuid in able}


def in_the_way(
    host: Host, plans: Sequence[GpuPlan], processes: Mapping[str, Sequence[MigProcess]]
) -> tuple[Obstacle, ...]:
    """Processes that must end first. Call it while our NVML is closed."""
    node = Node(host)
    own_pids = {os.getpid(), os.getppid(), *clients(host, node.processes).all}
    return obstacles(node, plans, processes, frozenset(own_pids))


def look_and_plan(
    host: Host, selection: ConfigSelection, progress: Progress
) -> tuple[LayoutPlan, tuple[Obstacle, ...]]:
    """The plan for the current layouts, and the processes that block it; none if nothing is to change."""
    with progress.step("reading the layouts"):
        layouts, processes = look(host)
    node_plan = planned(host, selection, layouts)
    return node_plan, in_the_way(host, node_plan.plans, processes) if node_plan.changes else ()


def remarks(host: Host, plans: Sequence[GpuPlan]) -> tuple[str, ...]:
    """What may conflict with a plan that changes something: other MIG managers, and boards with
    NVSwitches."""
    node = Node(host)
    notes = []
    hooks = host.environ.get("MIG_PARTED_HOOKS_FILE")
    if hooks:
        notes.append(f"the hooks of {hooks} aren't run: name what must stop meanwhile with --drain")
    other_keeper = keeper(node)
    if other_keeper.startswith("process "):
        notes.append(f"{other_keeper}, cuts GPUs on this node as well, and may do it again")
    notes += _conflict_notes(node, plans)
    resets = takes_reset(plans)
    services = clients(host, node.processes).services if resets else ()
    if services:
        notes.append(f"gpunode's own process {', '.join(map(str, services))} closes NVML meanwhile")
    if resets and _switched(node) and PROGRAM not in {process.name for process in node.processes}:
        notes.append(
            "these GPUs are linked by NVSwitches and the fabric manager doesn't run: without it a GPU is only"
            f" reset together with all others (start it: systemctl start {UNIT})"
        )
    return tuple(notes)


def _conflict_notes(node: Node, plans: Sequence[GpuPlan]) -> Iterator[str]:
    """Warnings about other plugins, and about pods that can't be listed."""
    for plugin in node.plugin_processes:
        if plugin.name != "gpunode":
            yield f"{plugin.name} (process {plugin.process.pid}) sees a new layout only after a restart"
    pods = untold(node, plans)
    if pods:
        yield pods
    if in_pod(node.host) and node.host.readlink("/proc/self/ns/pid") != _THE_NODES:
        yield "this pod sees its own processes alone, not who uses the GPUs: it needs hostPID: true"


def takes_reset(plans: Sequence[GpuPlan]) -> bool:
    """Whether a mode switch of this plan may need a reset."""
    return any(plan.changes_mode and plan.reset != "none" for plan in plans)


def _switched(node: Node) -> bool:
    try:
        return bool(node.switches)
    except GpunodeError:
        return False  # only root may read it


# Rendering of a MIG plan: current beside desired, slot by slot, the steps, and what blocks it.


class Piece(NamedTuple):
    """A GPU instance, current or desired: profile, memory slots, MIG devices; `gi` if it exists."""

    profile: str
    placement: Placement
    devices: tuple[str, ...]
    gi: int | None = None


@dataclass(frozen=True)
class PlannedGpu:
    """One GPU in `data`. `mode` is on or off, current and desired; `reset` is none, needed or unknown.

    `wanted` is null where the driver reports its profiles only once MIG is on.
    """

    index: int
    uuid: str
    name: str
    pci: str
    mode: tuple[str, str]
    reset: str
    today: tuple[Piece, ...]
    wanted: tuple[Piece, ...] | None
    steps: tuple[MigStep, ...]
    lost: tuple[PresentDevice, ...]
    kept: tuple[PresentDevice, ...]


class MigPlan(NamedTuple):
    """`data` of kind MigPlan."""

    config: str
    label: str
    changes: bool
    gpus: tuple[PlannedGpu, ...]
    obstacles: tuple[dict[str, object], ...]


def data_of(config: str, label: str, node_plan: LayoutPlan, busy: Sequence[Obstacle]) -> MigPlan:
    """The plan for programs."""
    keys = ("kind", "gpu", "what", "name", "pid", "container", "pod", "unit", "drain")
    processes = tuple({key: getattr(obstacle, key) for key in keys} for obstacle in busy)
    return MigPlan(
        config, label, node_plan.changes, tuple(_gpu(gpu_plan) for gpu_plan in node_plan.plans), processes
    )


def _gpu(plan: GpuPlan) -> PlannedGpu:
    gpu = plan.gpu
    today = tuple(
        Piece(gi.name, gi.placement, tuple(ci.profile for ci in gi.compute), gi.id)
        for gi in sorted(gpu.instances, key=lambda instance: instance.placement.start)
    )
    desired = None
    if plan.target is not None:
        desired = tuple(
            Piece(t.name, t.placement, t.devices, t.kept.id if t.kept is not None else None)
            for t in plan.target
        )
    return PlannedGpu(
        gpu.index,
        gpu.uuid,
        gpu.name,
        gpu.pci,
        ("on" if gpu.current else "off", "on" if plan.wish.enabled else "off"),
        plan.reset,
        today,
        desired,
        plan.steps,
        plan.lost,
        plan.kept,
    )


def blocks(data: MigPlan, busy: Sequence[Obstacle]) -> Iterator[Block]:
    """The plan for people. GPUs with the same plan are shown together."""
    groups: dict[tuple[object, ...], list[PlannedGpu]] = {}
    for gpu in data.gpus:
        key = (gpu.name, gpu.mode, gpu.reset, _shape(gpu.today), _shape(gpu.wanted or ()), lines(gpu.steps))
        groups.setdefault((*key, gpu.wanted is None), []).append(gpu)
    for members in groups.values():
        yield from _group(members)
    if busy:
        yield Text("Blocked by:", Style.BAD)
        yield from (Text(f"  {obstacle.text}", Style.WARN) for obstacle in busy)


def _shape(pieces: Sequence[Piece]) -> tuple[object, ...]:
    return tuple((piece.profile, str(piece.placement), piece.devices, piece.gi is None) for piece in pieces)


def _group(members: Sequence[PlannedGpu]) -> Iterator[Block]:
    first = members[0]
    numbers = ", ".join(str(member.index) for member in members)
    title = f"GPU{'s' if len(members) > 1 else ''} {numbers}  {first.name}"
    today, desired = first.mode
    if today != desired:
        title += f"  MIG {today} -> {desired}"
    if not any(member.steps for member in members) and first.wanted is not None:
        yield Text(f"{title}: unchanged", Style.GOOD)
        return
    yield Text(title, Style.HEADING)
    if first.wanted is None:
        yield Text(
            "  the driver reports the profiles only while MIG is on: placements are chosen then", Style.WARN
        )
    elif first.today or first.wanted:
        yield Table(("SLOTS", "TODAY", "WANTED", ""), tuple(_rows(first)))
    for gpu in members:
        name = f"GPU {gpu.index}" if len(members) > 1 else ""
        for device in gpu.lost:
            yield Text(
                f"  {name}{': ' if name else ''}goes: {device.profile} at {device.at}  {device.uuid}",
                Style.WARN,
            )
    if first.reset != "none":
        sure = "will be reset" if first.reset == "needed" else "may have to be reset"
        yield Text(f"  {sure}: everything that uses the GPU must end first", Style.WARN)
    for line in lines(first.steps):
        yield Text(f"  {line}", Style.COMMAND)


def lines(steps: Sequence[MigStep]) -> tuple[str, ...]:
    """The steps for people: the contents of an instance are removed and created with it."""
    removed = {step.gi for step in steps if step.action == "destroy-instance"}
    created = {step.at for step in steps if step.action == "create-instance"}
    step_lines = []
    for step in steps:
        if step.action == "create-instance":
            inner = [
                compute_step.slices
                for compute_step in steps
                if compute_step.action == "create-compute" and compute_step.at == step.at
            ]
            whole = len(inner) == 1 and step.profile.startswith(f"{inner[0]}g.")
            parts = "" if whole else " with " + ", ".join(f"{size}c" for size in inner)
            step_lines.append(step.text + (parts if inner else ", empty"))
        elif not _inside(step, removed, created):
            step_lines.append(step.text)
    return tuple(step_lines)


def _inside(step: MigStep, removed: Collection[int | None], created: Collection[Placement | None]) -> bool:
    """Whether it is part of another step, which removes or creates the whole."""
    if step.action == "destroy-compute":
        return step.gi in removed
    return step.action == "create-compute" and step.gi is None and step.at in created


def _rows(gpu: PlannedGpu) -> Iterator[tuple[Cell | str, ...]]:
    """One row for each run of slots within which neither layout has a border."""
    desired = gpu.wanted or ()
    places = [piece.placement for piece in (*gpu.today, *desired)]
    edges = sorted({0, *(place.start for place in places), *(place.end for place in places)})
    for start, end in itertools.pairwise(edges):
        now, after = _at(gpu.today, start), _at(desired, start)
        slots = f"{start}" if end - start == 1 else f"{start}-{end - 1}"
        yield slots, _cell(now, start), _cell(after, start), _word(now, after)


def _at(pieces: Sequence[Piece], slot: int) -> Piece | None:
    return next((piece for piece in pieces if piece.placement.start <= slot < piece.placement.end), None)


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


def _word(now: Piece | None, after: Piece | None) -> Cell | str:
    if after is not None and after.gi is not None:
        same = now is not None and sorted(now.devices) == sorted(after.devices)
        return Cell("stays" if same else "changes within", Style.GOOD if same else Style.WARN)
    if after is not None:
        return Cell("new", Style.GOOD) if now is None else Cell("replaced", Style.WARN)
    return Cell("goes", Style.WARN) if now is not None else ""


# The remains of a killed `mig apply`, on one line.


def unfinished_notes(host: Host, layouts: Layouts) -> tuple[str, ...]:
    """When it started, what it had stopped, which GPUs it left between two layouts, and the command to
    continue.

    Nothing while that run is active, or if nothing of it remains. Only root may read it.
    """
    if not host.is_root:
        return ()
    run = unfinished.load_unfinished(host)
    if run is not None and unfinished.lives(host, run):
        return ()
    unfinished_gpus = unfinished.unfinished_gpus(unfinished.load_snapshot(host), layouts)
    parts = list(_stopped(run) if run is not None else ())
    if unfinished_gpus.half:
        numbers = ", ".join(str(gpu.index) for gpu in unfinished_gpus.half)
        parts.append(f"GPU {numbers} {'is' if len(unfinished_gpus.half) == 1 else 'are'} incomplete")
    if not parts:
        return ()
    if run is None:
        return (f"a run of mig apply was interrupted: {'; '.join(parts)}; go on with gpunode mig apply",)
    command = shlex.join(("gpunode", *run.command))
    return (f"{begun(run)} was interrupted: {'; '.join(parts)}; go on: {command}",)


def begun(run: unfinished.UnfinishedRun) -> str:
    """A run, by its start time."""
    return (
        f"a run of mig apply that started at {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(run.since))}"
    )


def _stopped(run: unfinished.UnfinishedRun) -> tuple[str, ...]:
    if not run.drained.restart_commands:
        return ()
    ended = [f"process {pid}" for pid in run.drained.pids]
    names = [name for name in run.drained.names if not name.isdigit()]
    return (f"it had stopped {', '.join([*names, *ended])}",)


def all_notes(host: Host, node_plan: LayoutPlan) -> tuple[str, ...]:
    """The notes of a plan that is only shown."""
    notes = (*unfinished_notes(host, node_plan.layouts), *node_plan.notes)
    return (*notes, *remarks(host, node_plan.plans)) if node_plan.changes else notes
