"""What `mig plan`, `apply` and `assert` share: the configuration, the GPUs, the plan, who is in the way."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from gpunode.dataclass import dataclass, field
from gpunode.errors import ConfigError, GpunodeError, UsageError
from gpunode.facts.fabric_manager import PROGRAM, UNIT
from gpunode.facts.mig_layout import keeper
from gpunode.facts.node import Node
from gpunode.gpu.mig import MigProcess, MigSession, read_layouts
from gpunode.host import Host
from gpunode.mig import snapshot
from gpunode.mig.busy import Obstacle, obstacles, untold
from gpunode.mig.clients import clients
from gpunode.mig.compare import difference
from gpunode.mig.config import Entry, MigConfig, parse
from gpunode.mig.layout import Layouts
from gpunode.mig.placement import summary
from gpunode.mig.plan import GpuPlan, plan, put_back
from gpunode.mig.wishes import Wishes, wishes
from gpunode.result import Progress

_MAX_BYTES = 1 << 20
_THE_NODES = "pid:[4026531836]"  # PROC_PID_INIT_INO of the kernel's include/linux/proc_ns.h


@dataclass(frozen=True)
class Chosen:
    """A label of a configuration file, and the file's bytes."""

    path: str
    label: str
    entries: tuple[Entry, ...]
    data: bytes


@dataclass(frozen=True)
class Planned:
    """What is there, what becomes of each GPU that the configuration names, and what to tell.

    `left` is what earlier runs left half-way: those GPUs count as what they were before, and get that back
    where the configuration doesn't name them.
    """

    layouts: Layouts
    plans: tuple[GpuPlan, ...]
    notes: tuple[str, ...] = ()
    left: snapshot.Left = field(default_factory=snapshot.Left)

    @property
    def changes(self) -> bool:
        """Whether anything is to be done."""
        return bool(self.steps)

    @property
    def steps(self) -> tuple[GpuPlan, ...]:
        """The plans with something to do."""
        return tuple(one for one in self.plans if one.steps or one.target is None)


def choose(path: str, label: str, asked: Callable[[], str] = str) -> Chosen:
    """Read the file (``-``: standard input) of this machine and select a label; errors name what is wrong.
    `asked` says which, where none was given and there are several."""
    data, config = read(path)
    selected, entries = config.select(label or (asked() if len(config.labels) > 1 else ""))
    return Chosen(config.path, selected, entries, data)


def read(path: str) -> tuple[bytes, MigConfig]:
    """The file's bytes and all its configurations; errors as `choose` has them."""
    if not path:
        raise UsageError("no configuration file was given", hint="name it: --config-file FILE")
    data = _read(path)
    return data, parse(data, "standard input" if path == "-" else path)


def _read(path: str) -> bytes:
    if path == "-":
        import sys

        return sys.stdin.buffer.read(_MAX_BYTES)
    place = str(Path(path).absolute())
    found = Host(Path("/")).read_bytes(place)
    if found is None:
        raise ConfigError(f"{path} is not there", hint="name a file in mig-parted's form: --config-file FILE")
    return found


def planned(host: Host, chosen: Chosen, layouts: Layouts, *, mode_only: bool = False) -> Planned:
    """The plan for these layouts. `CannotBe` for what can't be had here."""
    wanted = wishes(chosen.path, chosen.label, chosen.entries, layouts)
    plans = plan(chosen.path, wanted.all, mode_only=mode_only)
    left = snapshot.left(snapshot.load(host), layouts) if host.is_root else snapshot.Left()
    others = tuple(_put_back(layouts, wanted, left))
    back = {one.gpu.index for one in others}
    notes = [
        f"GPU {gpu.index} is in no entry of {chosen.label!r} and stays as it is"
        for gpu in wanted.unnamed
        if gpu.index not in back
    ]
    ordered = sorted((*plans, *others), key=lambda one: one.gpu.index)
    return Planned(layouts, tuple(ordered), (*_told(left, back), *wanted.notes, *notes), left)


def _put_back(layouts: Layouts, wanted: Wishes, left: snapshot.Left) -> Iterator[GpuPlan]:
    """Plans for GPUs that an earlier run left half-way and this one doesn't name."""
    named = {wish.gpu.uuid for wish in wanted.all}
    for gpu in left.half:
        now = layouts.gpu(gpu.uuid)
        if now is not None and gpu.uuid not in named:
            yield put_back(now, gpu)


def _told(left: snapshot.Left, back: Collection[int]) -> Iterator[str]:
    begun = "an earlier run of mig apply didn't come to its end"
    for gpu in left.half:
        then = "gets its former layout back" if gpu.index in back else "is planned from what is there"
        yield f"{begun}: GPU {gpu.index} {then}"
    for gpu in left.changed:
        yield f"{begun}, but GPU {gpu.index} has been cut otherwise since: it counts as it is"
    for gpu in left.unasked:
        cut = summary(gpu.devices()) or ("no MIG device" if gpu.current else "MIG off")
        yield f"{begun}, and GPU {gpu.index} can't be asked now; it had {cut}"


def holds(chosen: Chosen, layouts: Layouts) -> bool:
    """Whether these layouts are all that the configuration says, and not only its modes."""
    try:
        wanted = wishes(chosen.path, chosen.label, chosen.entries, layouts).all
    except GpunodeError:
        return False
    return not any(one.gpu.mode_pending or difference(one) for one in wanted)


def look(host: Host) -> tuple[Layouts, dict[str, tuple[MigProcess, ...]]]:
    """The layouts, and what NVML says runs on each GPU; a recorded machine tells no processes."""
    if not host.live:
        return read_layouts(host), {}
    with MigSession(host) as session:
        layouts = session.layouts()
        able = [gpu.uuid for gpu in layouts.gpus if gpu.uuid and not gpu.error and gpu.capable]
        return layouts, {uuid: session.processes(uuid) for uuid in able}


def in_the_way(
    host: Host, plans: Sequence[GpuPlan], processes: Mapping[str, Sequence[MigProcess]]
) -> tuple[Obstacle, ...]:
    """Who must end first. To be asked while no NVML of ours is open."""
    node = Node(host)
    ours = {os.getpid(), os.getppid(), *clients(host, node.processes).all}
    return obstacles(node, plans, processes, frozenset(ours))


def look_and_plan(
    host: Host, chosen: Chosen, progress: Progress, *, mode_only: bool = False
) -> tuple[Planned, tuple[Obstacle, ...]]:
    """The plan for the layouts of this moment, and who is in its way; nobody where nothing is to be done."""
    with progress.step("reading the layouts"):
        layouts, processes = look(host)
    found = planned(host, chosen, layouts, mode_only=mode_only)
    return found, in_the_way(host, found.plans, processes) if found.changes else ()


def remarks(host: Host, plans: Sequence[GpuPlan]) -> tuple[str, ...]:
    """What may cross a plan that changes something: who else cuts GPUs here, and a board with NVSwitches."""
    node = Node(host)
    found = []
    hooks = host.environ.get("MIG_PARTED_HOOKS_FILE")
    if hooks:
        found.append(f"the hooks of {hooks} aren't run: name what must stop meanwhile with --drain")
    other = keeper(node)
    if other.startswith("process "):
        found.append(f"{other}, cuts GPUs on this node as well, and may do it again")
    found += _beside(node, plans)
    resets = takes_reset(plans)
    services = clients(host, node.processes).services if resets else ()
    if services:
        found.append(f"gpunode's own process {', '.join(map(str, services))} closes NVML meanwhile")
    if resets and _switched(node) and PROGRAM not in {process.name for process in node.processes}:
        found.append(
            "these GPUs are linked by NVSwitches and the fabric manager doesn't run: without it a GPU is only"
            f" reset together with all others (start it: systemctl start {UNIT})"
        )
    return tuple(found)


def _beside(node: Node, plans: Sequence[GpuPlan]) -> Iterator[str]:
    """Other plugins, and what can't be known of pods."""
    from gpunode.mig.node_labels import in_pod

    for one in node.plugin_processes:
        if one.name != "gpunode":
            yield f"{one.name} (process {one.process.pid}) sees a new layout only when it is started anew"
    pods = untold(node, plans)
    if pods:
        yield pods
    if in_pod(node.host) and node.host.readlink("/proc/self/ns/pid") != _THE_NODES:
        yield "this pod sees its own processes alone, not who uses the GPUs: it needs hostPID: true"


def takes_reset(plans: Sequence[GpuPlan]) -> bool:
    """Whether one of the modes that are switched may take a reset."""
    return any(plan.changes_mode and plan.reset != "none" for plan in plans)


def _switched(node: Node) -> bool:
    try:
        return bool(node.switches)
    except GpunodeError:
        return False  # only root may read what tells it
