"""A node that isn't there: its GPUs, what happened to them, and what NVML would say of it now."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpunode.dataclass import dataclass, replace
from gpunode.errors import UsageError
from gpunode.facts.xids import HARDWARE, REBOOT, RESET, xid
from gpunode.gpu.events import GpuEvent
from gpunode.gpu.model import Gpu, Inventory, Reading, Topology
from gpunode.host import Host
from gpunode.plugin.simulate import profiles
from gpunode.plugin.simulate.faults import ALL, Fault

LOST = "the GPU is lost (simulated)"
_ASKED = {RESET: "reset", HARDWARE: "reset", REBOOT: "reboot"}
"""The recovery action that NVML tells after an XID of this class."""
DRIVER_GONE = "the driver is not loaded (simulated)"


@dataclass(frozen=True)
class Condition:
    """What happened to one GPU since it was well."""

    lost: bool = False
    unplugged: bool = False
    ecc: int = 0
    ecc_ever: int = 0
    remap: str = "none"
    recovery: str = "none"
    fabric: str = "completed"


class SimulatedNode:
    """One thread's own. `UsageError` for a specification or a fault that this node can't have."""

    def __init__(self, spec: str, host: Host | None = None) -> None:
        self._groups = profiles.parse(spec)
        self._slots = list(profiles.slots(self._groups, host))
        self._conditions = {slot.gpu.index: Condition() for slot in self._slots}
        self._base = profiles.load(spec, host)[0]
        self._loads = 1
        self.driver_gone = ""

    @property
    def inventory(self) -> Inventory:
        """What NVML would list."""
        return replace(self._base, gpus=tuple(self._seen()))

    def _seen(self) -> list[Gpu]:
        told = []
        for slot in self._slots:
            condition = self._conditions[slot.gpu.index]
            if not condition.unplugged:
                told.append(replace(slot.gpu, error=LOST) if condition.lost else slot.gpu)
        return told

    @property
    def topology(self) -> Topology:
        return profiles.topology(self._groups, tuple(self._slots))

    @property
    def readings(self) -> tuple[Reading, ...]:
        """What each listed GPU says of itself."""
        return tuple(
            self._reading(slot)
            for slot in self._slots
            if not self._conditions[slot.gpu.index].unplugged and not self.driver_gone
        )

    def _reading(self, slot: profiles.Slot) -> Reading:
        now = self._conditions[slot.gpu.index]
        if now.lost:
            return Reading(slot.gpu.uuid, error=LOST)
        switched = self._groups[slot.group].links[0] == "nvswitch"
        return Reading(
            slot.gpu.uuid,
            ecc_volatile=now.ecc,
            ecc_aggregate=now.ecc_ever,
            remap_pending=now.remap == "pending",
            remap_failed=now.remap == "failed",
            recovery_action=now.recovery,
            fabric_state=now.fabric if switched else None,
            busy_percent=0,
            memory_used_bytes=0,
            parts_used_bytes={mig.uuid: 0 for mig in slot.gpu.mig},
            generation=f"simulated-{self._loads}",
        )

    def apply(self, fault: Fault) -> tuple[GpuEvent, ...]:
        """Let it happen; the events that the driver would report."""
        if fault.name == "driver":
            self._loads += fault.value == "back" and self.driver_gone != ""
            self.driver_gone = DRIVER_GONE if fault.value == "gone" else ""
            return ()
        chosen = self._chosen(fault.gpu)
        for slot in chosen:
            _check_instance(slot, fault)
        events: list[GpuEvent] = []
        for slot in chosen:
            events += self._strike(slot, fault)
        return tuple(events)

    def _chosen(self, gpu: str) -> list[profiles.Slot]:
        if gpu == ALL:
            return list(self._slots)
        found = [slot for slot in self._slots if gpu in (str(slot.gpu.index), slot.gpu.uuid)]
        if not found:
            raise UsageError(f"no simulated GPU {gpu!r}", hint=f"0 to {len(self._slots) - 1}, a UUID or all")
        return found

    def _strike(self, slot: profiles.Slot, fault: Fault) -> list[GpuEvent]:
        index, uuid = slot.gpu.index, slot.gpu.uuid
        now = self._conditions[index]
        if fault.name == "xid":
            asked = _ASKED.get(xid(int(fault.value)).kind, now.recovery)
            self._conditions[index] = replace(now, recovery=asked)
            return [GpuEvent("xid", uuid, int(fault.value), fault.gi, fault.ci)]
        if fault.name == "mig":
            divided = profiles.with_layout(slot.gpu, slot.model, "" if fault.value == "off" else fault.value)
            self._slots[index] = replace(slot, gpu=divided)
        elif fault.name == "ecc":
            more = int(fault.value)
            self._conditions[index] = replace(now, ecc=now.ecc + more, ecc_ever=now.ecc_ever + more)
            return [GpuEvent("ecc-double", uuid)]
        elif fault.name == "reset":
            self._conditions[index] = Condition(ecc_ever=now.ecc_ever, remap=_after_reset(now.remap))
            self._slots[index] = replace(slot, gpu=replace(slot.gpu, mig=()))
        else:
            self._conditions[index] = _CHANGES[fault.name](now, fault.value)
        return []


def on_machine(inventory: Inventory, host: Host) -> Inventory:
    """The inventory with NUMA nodes that this machine has: a kubelet refuses pods for others.

    More simulated nodes than real ones are folded in their order: 0, 1, 2 and 3 become 0, 0, 1 and 1. Where
    the machine doesn't list its nodes the simulated ones stay.
    """
    names = host.glob("/sys/devices/system/node", "node[0-9]*")
    numbers = (name.rpartition("/node")[2] for name in names)
    real = sorted(int(number) for number in numbers if number.isdecimal())
    simulated = sorted({gpu.numa for gpu in inventory.gpus if gpu.numa is not None})
    if not real or set(simulated) <= set(real):
        return inventory
    nodes: dict[int | None, int | None] = {
        node: real[place * min(len(real), len(simulated)) // len(simulated)]
        for place, node in enumerate(simulated)
    }
    return replace(inventory, gpus=tuple(replace(gpu, numa=nodes.get(gpu.numa)) for gpu in inventory.gpus))


def _check_instance(slot: profiles.Slot, fault: Fault) -> None:
    """`UsageError` if the fault names an instance that this GPU doesn't have: it would concern nothing."""
    if fault.gi is None and fault.ci is None:
        return
    there = {(mig.gi, mig.ci) for mig in slot.gpu.mig}
    if not any(fault.gi in (None, gi) and fault.ci in (None, ci) for gi, ci in there):
        gpu_instances = ", ".join(str(gi) for gi, _ in sorted(there))
        raise UsageError(
            f"GPU {slot.gpu.index} has no such MIG instance",
            hint=f"--gi is one of {gpu_instances}, --ci 0" if there else f"mig LAYOUT --gpu {slot.gpu.index}",
        )


def _after_reset(remap: str) -> str:
    return "failed" if remap == "failed" else "none"


_CHANGES: Mapping[str, Callable[[Condition, str], Condition]] = {
    "lost": lambda now, value: replace(now, lost=True),
    "return": lambda now, value: replace(now, lost=False),
    "unplug": lambda now, value: replace(now, unplugged=True),
    "plug": lambda now, value: replace(now, unplugged=False),
    "remap": lambda now, value: replace(now, remap=value),
    "recovery": lambda now, value: replace(now, recovery=value),
    "fabric": lambda now, value: replace(now, fabric=value),
    "heal": lambda now, value: Condition(),
}
