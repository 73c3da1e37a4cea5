"""The AMD backend: sysfs lists the GPUs; a container gets device nodes and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from threading import Event

from gpunode.gpu.amd import (
    AmdGpu,
    AmdPartition,
    missing,
    read_condition,
    read_inventory,
    read_nodes,
    read_topology,
    trace,
)
from gpunode.gpu.model import Inventory, Reading
from gpunode.host import Host
from gpunode.plugin.config.settings import Settings, resource_name_problem
from gpunode.plugin.logfmt import Log, OnChange
from gpunode.plugin.model import (
    Answer,
    Common,
    ContainerDevice,
    KubeletDevice,
    LeftOut,
    ReportReceiver,
    ResourcePlan,
    Snapshot,
    Unit,
    deselection,
    gpu_unit,
    idle_rules,
    requested_devices,
    ruled_name,
)
from gpunode.plugin.sharing import share

# What AMD GPUs are advertised as: partitions, selection, naming strategy, sharing. Pure.
#
# As with NVIDIA's, a GPU that can't be advertised is left out with its reason; the others stay.

DOMAIN = "amd.com"
KFD_NODE = "/dev/kfd"
_OTHERS_NAME = "nvidia.com/gpu"  # the default in the settings where no resource name is configured


def plan(settings: Settings, inventory: Inventory) -> ResourcePlan:
    """Resources and devices for this inventory. `ConfigError` if two entries of a sharing section name the
    same device, or a name isn't valid."""
    known, left_out = _known(inventory)
    units = [unit for gpu in known for unit in _units(gpu)]
    reasons, warnings = deselection(settings, units)
    left_out += [LeftOut(unit.index, unit.id, reasons[unit.id]) for unit in units if unit.id in reasons]
    selected = [unit for unit in units if unit.id not in reasons]
    for kind in ("gpu", "mig"):
        keys = [unit.naming_key for unit in selected if unit.kind == kind]
        warnings += idle_rules(settings.rules, kind, keys)
    by_name = _by_resource_name(settings, selected, {gpu.uuid: gpu.partition_type for gpu in known}, left_out)
    refusal = "MPS is NVIDIA's: share AMD GPUs with timeSlicing" if settings.shares_by_mps else ""
    shared = share(by_name, settings.sharing, lambda unit, entry: refusal)
    resources = tuple(replace(resource, common=Common((KFD_NODE,))) for resource in shared.resources)
    return ResourcePlan(resources, (*left_out, *shared.left_out), (*warnings, *shared.warnings))


def _known(inventory: Inventory) -> tuple[list[AmdGpu], list[LeftOut]]:
    """GPUs that have, or once had, device nodes; a GPU that never had any can't be allocated."""
    known, left_out = [], []
    for gpu in inventory.gpus:
        if isinstance(gpu, AmdGpu) and gpu.paths and gpu.compute_capability:
            known.append(gpu)
        else:
            left_out.append(LeftOut(str(gpu.index), gpu.uuid, gpu.error or "it has no device node"))
    return known, left_out


def _units(gpu: AmdGpu) -> Iterator[Unit]:
    """The GPU, or its partitions. The first partition has the GPU's address as its id, as in AMD's plugin."""
    parts = [part for part in gpu.mig if isinstance(part, AmdPartition)]
    if not parts:
        yield gpu_unit(gpu, gpu.paths)
    for part in parts:
        yield gpu_unit(gpu, part.paths, part)


# --- names ----------------------------------------------------------------------------------------------


def base_name(settings: Settings) -> str:
    """The resource of whole GPUs: amd.com/gpu, unless another name was given."""
    return f"{DOMAIN}/gpu" if settings.resource_name == _OTHERS_NAME else settings.resource_name


def _by_resource_name(
    settings: Settings, units: Sequence[Unit], types: Mapping[str, str], left_out: list[LeftOut]
) -> dict[str, list[KubeletDevice]]:
    """Devices by resource name. Under `single` only interchangeable devices share one name."""
    by_name: dict[str, list[KubeletDevice]] = {}
    standard: list[Unit] = []
    for unit in units:
        kind = types[unit.gpu]
        name = ruled_name(settings.rules, unit.kind, unit.naming_key)
        if not name and settings.resource_naming_strategy == "mixed" and kind:
            name = f"{DOMAIN}/{kind}"
        problem = resource_name_problem(name) if name else ""
        if problem:
            left_out.append(LeftOut(unit.index, unit.id, problem))
        elif name:
            by_name.setdefault(name, []).append(KubeletDevice(unit.id, unit))
        else:
            standard.append(unit)
    alike = _alike(standard, types, base_name(settings), left_out)
    if alike:
        by_name.setdefault(base_name(settings), []).extend(KubeletDevice(unit.id, unit) for unit in alike)
    return by_name


def _alike(
    units: Sequence[Unit], types: Mapping[str, str], name: str, left_out: list[LeftOut]
) -> Sequence[Unit]:
    """The units of one partition type: the type of most GPUs, on a tie the first GPU's.

    GPUs that can't be divided have no type, and go with any.
    """
    votes: dict[str, set[str]] = {}
    for unit in units:
        votes.setdefault(types[unit.gpu], set()).add(unit.gpu)
    kinds = [kind for kind in votes if kind]
    if len(kinds) < 2:
        return units
    majority = max(kinds, key=lambda kind: len(votes[kind]))
    for unit in units:
        kind = types[unit.gpu]
        if kind not in (majority, ""):
            reason = (
                f"resource-naming-strategy is single and {name} means {majority} here, this is {kind}; mixed "
                "gives each partition type a name of its own"
            )
            left_out.append(LeftOut(unit.index, unit.id, reason))
    return [unit for unit in units if types[unit.gpu] in (majority, "")]


# Polls the AMD GPUs in sysfs: which exist, and their health.

_TURN_SECONDS = 2.0


class AmdBackend:
    """See `gpunode.plugin.model.Backend`. Its `run` reports the content of sysfs to the sink."""

    def __init__(self, host: Host, settings: Settings, log: Log) -> None:
        self._host = host
        self._settings = settings
        self._say = OnChange(log)
        self._soon = Event()
        self._trace: object = None
        self._inventory: Inventory | None = None
        self._next_look = 0.0
        self._next_reading = 0.0
        self.waiting = "waiting for the amdgpu driver"

    def run(self, sink: ReportReceiver, stop: Event) -> None:
        """Traces are compared from time to time; everything is read again when they differ, or if something
        could not be read."""
        turn = min(_TURN_SECONDS, self._settings.rediscover_seconds)
        while True:
            self._soon.clear()  # before `stop` is tested, so that no request for a check is missed
            if stop.is_set():
                return
            self._turn(sink)
            self._soon.wait(turn)

    def hurry(self) -> None:
        self._next_look = 0.0
        self._soon.set()

    def let_go(self) -> None:
        """Does nothing: no handle is kept open."""

    def plan(self, settings: Settings, inventory: Inventory) -> ResourcePlan:
        return plan(settings, inventory)

    def prepare(self, settings: Settings, inventory: Inventory, plan: ResourcePlan) -> None:
        """Does nothing: a container needs only device nodes."""

    def answer(self, settings: Settings, snapshot: Snapshot, ids: Sequence[str]) -> Answer:
        """/dev/kfd once, and each unit's /dev/dri nodes. `AllocationError` for a request that can't be
        met."""
        devices = requested_devices(snapshot, ids)
        own = (path for device in devices for path in device.unit.paths)
        paths = dict.fromkeys((*snapshot.resource.common.nodes, *own))
        return Answer(nodes=tuple(ContainerDevice(path, path) for path in paths))

    def _turn(self, sink: ReportReceiver) -> None:
        reason = missing(self._host)
        if reason:
            self.waiting = f"waiting for the AMD GPUs: {reason}"
            self._say.warning(self.waiting, hint="modprobe amdgpu; gpunode doctor")
            self._trace = self._inventory = None
            sink.broken(reason, sure=True)
            return
        now, seen = self._host.monotonic(), trace(self._host)
        if seen != self._trace or now >= self._next_look:
            self._trace = seen
            self._next_look = now + self._look(sink, now)
        elif self._inventory is not None and now >= self._next_reading:
            self._read(sink, self._conditions(self._inventory), now)

    def _conditions(self, inventory: Inventory) -> list[Reading]:
        return [read_condition(self._host, gpu) for gpu in inventory.gpus]

    def _read(self, sink: ReportReceiver, readings: list[Reading], now: float) -> None:
        self._next_reading = now + self._settings.health.poll_seconds
        sink.readings(readings)

    def _look(self, sink: ReportReceiver, now: float) -> float:
        """Seconds until the next check, if nothing changes meanwhile: each change is checked twice.

        Errors are counted from before the GPUs are advertised, so that none that a container meets is missed.
        """
        before, nodes = self._inventory, read_nodes(self._host)
        seen = self._inventory = read_inventory(self._host, nodes)
        conditions = self._conditions(seen)
        sink.seen(seen, read_topology(seen, nodes))
        self._read(sink, conditions, now)
        self.waiting = ""
        self._say.reset()
        if seen != before:
            return _TURN_SECONDS
        return self._settings.rediscover_seconds if any(gpu.error for gpu in seen.gpus) else math.inf
