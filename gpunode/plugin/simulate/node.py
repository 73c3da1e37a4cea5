"""A simulated node: its GPUs, the faults injected into them, and what NVML would report now."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from random import Random
from typing import NamedTuple

from gpunode.errors import UsageError
from gpunode.facts.xids import HARDWARE, REBOOT, RESET, xid
from gpunode.gpu.model import GPU_IS_LOST, Gpu, Inventory, MigDevice, MigSize, Pair, Reading, Topology
from gpunode.gpu.nvml import GpuEvent
from gpunode.host import Host
from gpunode.plugin.simulate.faults import ALL, Fault

# The GPU models that can be simulated: NVML's names, their usual servers, and their MIG profiles.
#
# Names, memory and links are as nvidia-smi shows them on such machines; MIG profiles and their placements are
# from NVIDIA's MIG user guide, for the seven-slice GPUs after Hopper assumed to be as on Hopper.


@dataclass(frozen=True)
class SimulatedProfile:
    """A MIG profile: `size` of the GPU's memory slots from one of `starts`, at most `limit` of them."""

    name: str
    size: int
    starts: tuple[int, ...]
    limit: int


@dataclass(frozen=True)
class Model:
    """One GPU model in its usual server.

    `count` is how many that server has, over `sockets` NUMA nodes, `per_switch` of them behind one PCIe
    switch. `links` is (how, NVLinks): ``nvswitch`` counts each GPU's links to switches, ``mesh`` and
    ``pairs`` those of each linked pair; `small` is what the board for four has instead. `mig` holds the sizes
    in the profiles' names, smallest first, `slots` the memory slots.
    """

    name: str
    memory_mib: int
    capability: str
    count: int = 8
    sockets: int = 2
    per_switch: int = 1
    links: tuple[str, int] = ("none", 0)
    small: tuple[str, int] = ("none", 0)
    mig: tuple[int, ...] = ()
    addresses: tuple[str, ...] = ()

    @property
    def slots(self) -> int:
        return 8 if len(self.mig) == 4 else 4

    @property
    def profiles(self) -> tuple[SimulatedProfile, ...]:
        """The MIG profiles that it offers, largest first."""
        if not self.mig:
            return ()
        if self.slots == 4:
            gb1, gb2, gb4 = self.mig
            return (
                SimulatedProfile(f"4g.{gb4}gb", 4, (0,), 1),
                SimulatedProfile(f"2g.{gb2}gb", 2, (0, 2), 2),
                SimulatedProfile(f"1g.{gb1}gb", 1, (0, 1, 2, 3), 4),
                SimulatedProfile(f"1g.{gb1}gb+me", 1, (0, 1, 2, 3), 1),
            )
        gb1, gb2, gb4, gb8 = self.mig
        return (
            SimulatedProfile(f"7g.{gb8}gb", 8, (0,), 1),
            SimulatedProfile(f"4g.{gb4}gb", 4, (0,), 1),
            SimulatedProfile(f"3g.{gb4}gb", 4, (0, 4), 2),
            SimulatedProfile(f"2g.{gb2}gb", 2, (0, 2, 4), 3),
            SimulatedProfile(f"1g.{gb2}gb", 2, (0, 2, 4, 6), 4),
            SimulatedProfile(f"1g.{gb1}gb", 1, tuple(range(7)), 7),
            SimulatedProfile(f"1g.{gb1}gb+me", 1, tuple(range(7)), 1),
        )


_H100_BOARD = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
_HGX = tuple(f"0000:{bus}:00.0" for bus in _H100_BOARD)
_GRACE = ("0008:01:00.0", "0009:01:00.0", "0018:01:00.0", "0019:01:00.0")

MODELS = {
    "t4": Model("Tesla T4", 15360, "7.5", count=4),
    "dgx2": Model("Tesla V100-SXM3-32GB", 32768, "7.0", count=16, per_switch=2, links=("nvswitch", 6)),
    "a10": Model("NVIDIA A10", 23028, "8.6", count=4),
    "a30": Model("NVIDIA A30", 24576, "8.0", count=4, links=("pairs", 4), mig=(6, 12, 24)),
    "a40": Model("NVIDIA A40", 46068, "8.6", per_switch=2, links=("pairs", 4)),
    "a100": Model(
        *("NVIDIA A100-SXM4-40GB", 40960, "8.0"),
        per_switch=2,
        links=("nvswitch", 12),
        small=("mesh", 4),
        mig=(5, 10, 20, 40),
    ),
    "a100-80gb": Model(
        *("NVIDIA A100-SXM4-80GB", 81920, "8.0"),
        per_switch=2,
        links=("nvswitch", 12),
        small=("mesh", 4),
        mig=(10, 20, 40, 80),
    ),
    "a100-pcie": Model(
        *("NVIDIA A100-PCIE-40GB", 40960, "8.0"), per_switch=2, links=("pairs", 12), mig=(5, 10, 20, 40)
    ),
    "l4": Model("NVIDIA L4", 23034, "8.9"),
    "l40s": Model("NVIDIA L40S", 46068, "8.9", per_switch=4),
    "h100": Model(
        *("NVIDIA H100 80GB HBM3", 81559, "9.0"),
        links=("nvswitch", 18),
        small=("mesh", 6),
        mig=(10, 20, 40, 80),
        addresses=_HGX,
    ),
    "h100-pcie": Model(
        *("NVIDIA H100 PCIe", 81559, "9.0"), per_switch=2, links=("pairs", 12), mig=(10, 20, 40, 80)
    ),
    "h100-nvl": Model(
        *("NVIDIA H100 NVL", 95830, "9.0"), per_switch=2, links=("pairs", 12), mig=(12, 24, 47, 94)
    ),
    "h200": Model(
        *("NVIDIA H200", 143771, "9.0"), links=("nvswitch", 18), mig=(18, 35, 71, 141), addresses=_HGX
    ),
    "gh200": Model("NVIDIA GH200 480GB", 97871, "9.0", count=1, sockets=1, mig=(12, 24, 48, 96)),
    "b200": Model(
        *("NVIDIA B200", 183359, "10.0"), links=("nvswitch", 18), mig=(23, 45, 90, 180), addresses=_HGX
    ),
    "b300": Model(
        *("NVIDIA B300 SXM6 AC", 275040, "10.3"),
        links=("nvswitch", 18),
        mig=(34, 67, 135, 269),
        addresses=_HGX,
    ),
    "gb200": Model(
        *("NVIDIA GB200", 189471, "10.0"),
        count=4,
        links=("nvswitch", 18),
        mig=(23, 47, 93, 186),
        addresses=_GRACE,
    ),
    "gb300": Model(
        *("NVIDIA GB300", 284208, "10.3"),
        count=4,
        links=("nvswitch", 18),
        mig=(35, 70, 139, 278),
        addresses=_GRACE,
    ),
    "rtx-pro-6000": Model(
        "NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, "12.0", per_switch=4, mig=(24, 48, 96)
    ),
    "rtx-4090": Model("NVIDIA GeForce RTX 4090", 24564, "8.9", count=2, sockets=1),
}


# MIG layouts of simulated GPUs: ``3g.20gb/1g.5gb*4``, laid into the GPU's memory slots as the driver would.
# Pure.

Placed = tuple[SimulatedProfile, int]


def stable_uuid(*of: object) -> str:
    """An id that is equal for the same node and index, and different for all others."""
    bits = Random("/".join(map(str, of))).getrandbits(128)  # noqa: S311 - a name; hashlib would load OpenSSL
    hexadecimal = f"{bits:032x}"
    return "-".join(hexadecimal[low:high] for low, high in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32)))


def parse_layout(text: str, model: Model) -> tuple[Placed, ...]:
    """Each profile with the slot where it starts. `UsageError` if the GPU has no such profile, or no free
    slots."""
    known = {profile.name: profile for profile in model.profiles}
    if not known:
        raise UsageError(f"{model.name} has no MIG")
    desired: list[SimulatedProfile] = []
    for item in text.split("/"):
        name, _, count = item.strip().partition("*")
        if name not in known:
            raise UsageError(
                f"{model.name} has no MIG profile {name!r}", hint=f"its profiles: {', '.join(known)}"
            )
        if count and not (count.isdecimal() and 1 <= int(count[:3]) <= model.slots):
            raise UsageError(f"{item!r}: the count is a number from 1 to {model.slots}")
        desired += [known[name]] * int(count or 1)
    desired.sort(key=lambda profile: -profile.size)
    for profile in set(desired):
        if desired.count(profile) > profile.limit:
            raise UsageError(f"{model.name} can have {profile.limit} of {profile.name}, not {text!r}")
    placed = _place(desired, frozenset())
    if placed is None:
        raise UsageError(f"the MIG layout {text!r} does not fit on {model.name}")
    return placed


def _place(desired: Sequence[SimulatedProfile], occupied: frozenset[int]) -> tuple[Placed, ...] | None:
    """The first possible placement; with at most seven profiles, trying is quick."""
    if not desired:
        return ()
    for start in desired[0].starts:
        slots = frozenset(range(start, start + desired[0].size))
        rest = None if slots & occupied else _place(desired[1:], occupied | slots)
        if rest is not None:
            return ((desired[0], start), *rest)
    return None


def devices(gpu: Gpu, layout: Sequence[Placed], model: Model) -> tuple[MigDevice, ...]:
    """What NVML would list: instance ids are numbered by parts of the memory, as on hardware: 0 for all of
    it, 1 and 2 for its halves, 3 to 6 for the quarters, from 7 on the single slots."""
    result = []
    for index, (profile, start) in enumerate(layout):
        gi = model.slots // profile.size - 1 + start // profile.size
        uuid = "MIG-" + stable_uuid(gpu.uuid, profile.name, gi)
        memory = gpu.memory_bytes * profile.size // model.slots
        slices = int(profile.name.partition("g.")[0])
        result.append(MigDevice(index, uuid, profile.name, gi, 0, memory, MigSize(slices, slices)))
    return tuple(result)


# From ``--simulate h100:8`` to a node: its inventory and the links between its GPUs. Pure.
#
# A specification is one or more groups joined by ``+``: ``MODEL[:COUNT][,key=value...]``. The keys of a
# group: ``mig`` (a layout such as ``3g.20gb/1g.5gb*4``, on each of its GPUs) and ``links`` (``nvswitch``,
# ``mesh``, ``pairs``, ``none``). Those of the node, in any group: ``node`` (what the UUIDs are made from;
# else the host's name), ``numa`` (how many NUMA nodes, 0: the platform doesn't say) and ``driver``.

MOST = 64
DRIVER, CUDA = "580.95.05", "13.0"
_GROUPS = re.compile(r"\+(?!me\b|gfx\b)")  # the plus of 1g.5gb+me joins no groups
_KEYS = ("mig", "links", "node", "numa", "driver")
_LINKS = ("nvswitch", "mesh", "pairs", "none")
_SAME_SWITCH, _SAME_NODE, _SYSTEM = 20, 40, 50  # nvmlGpuTopologyLevel_t
_GRAMMAR = "MODEL[:COUNT][,mig=LAYOUT][,links=...][,node=NAME][,numa=N][,driver=VERSION][+...]"


@dataclass(frozen=True)
class GpuGroup:
    """One part of a specification."""

    model: Model
    count: int
    options: Mapping[str, str]

    @property
    def links(self) -> tuple[str, int]:
        """How its GPUs are linked, and by how many NVLinks."""
        usual = self.model.small if self.count <= 4 and self.model.small[1] else self.model.links
        requested = self.options.get("links", usual[0])
        counts = dict((self.model.small, self.model.links))
        return requested, counts.get(requested, 0) or self.model.links[1] or 4


class FaultHistory(NamedTuple):
    """Events of one GPU since its start."""

    lost: bool = False
    unplugged: bool = False
    ecc: int = 0
    ecc_ever: int = 0
    remap: str = "none"
    recovery: str = "none"
    fabric: str = "completed"


class Slot(NamedTuple):
    """A slot for a GPU on the node: the entry of `load` for it, its group, by number, and its faults."""

    gpu: Gpu
    group: int
    model: Model
    faults: FaultHistory = FaultHistory()


def load(spec: str, host: Host | None = None) -> tuple[Inventory, Topology]:
    """The node that `spec` describes. `UsageError` has the reason for an invalid one, and the valid
    values."""
    node = SimulatedNode(spec, host)
    return node.inventory, node.topology


def parse(spec: str) -> tuple[GpuGroup, ...]:
    """The groups of a specification."""
    groups = tuple(_group(part.strip()) for part in _GROUPS.split(spec))
    total = sum(group.count for group in groups)
    if total > MOST:
        raise UsageError(f"{total} simulated GPUs; one node can have {MOST}", hint="run several plugins")
    return groups


def _group(text: str) -> GpuGroup:
    head, *rest = text.split(",")
    key, _, count = head.partition(":")
    if key not in MODELS:
        raise UsageError(
            f"no GPU {key!r} can be simulated{_nearest(key)}", hint=f"one of: {', '.join(MODELS)}"
        )
    if count and not (count.isdecimal() and 1 <= int(count[:6]) <= MOST):
        raise UsageError(f"{head!r}: the count is a number from 1 to {MOST}", hint=_GRAMMAR)
    options = {}
    for item in rest:
        name, equals, value = item.strip().partition("=")
        if name not in _KEYS or not equals or not value:
            raise UsageError(
                f"{item!r} in {text!r} is not one of {', '.join(_KEYS)} with a value", hint=_GRAMMAR
            )
        options[name] = value
    if options.get("links", "none") not in _LINKS:
        raise UsageError(f"links={options['links']} is not one of {', '.join(_LINKS)}")
    if not options.get("numa", "0").isdecimal() or int(options.get("numa", "0")[:4]) > MOST:
        raise UsageError(f"numa={options['numa']} is not a number of NUMA nodes")
    return GpuGroup(MODELS[key], int(count or MODELS[key].count), options)


def _nearest(key: str) -> str:
    from difflib import get_close_matches

    near = get_close_matches(key.lower(), MODELS, 1)
    return f"; did you mean {near[0]}?" if near else ""


def _node_options(groups: tuple[GpuGroup, ...]) -> dict[str, str]:
    return {name: value for group in groups for name, value in group.options.items()}


def node_name(groups: tuple[GpuGroup, ...], host: Host | None) -> str:
    """The seed of this node's UUIDs."""
    name = _node_options(groups).get("node", "")
    return name or (host and (host.read_text("/proc/sys/kernel/hostname") or "").strip()) or "simulated"


def slots(groups: tuple[GpuGroup, ...], host: Host | None) -> tuple[Slot, ...]:
    """Every GPU of the node in the order of its index."""
    node, total = node_name(groups, host), sum(group.count for group in groups)
    sockets = int(_node_options(groups).get("numa", max(group.model.sockets for group in groups)))
    result: list[Slot] = []
    for number, group in enumerate(groups):
        for _ in range(group.count):
            index = len(result)
            gpu = Gpu(
                index,
                "GPU-" + stable_uuid(node, index),
                group.model.name,
                _address(groups, index),
                minor=index,
                memory_bytes=group.model.memory_mib << 20,
                compute_capability=group.model.capability,
                numa=index * sockets // total if sockets else None,
                mig_capable=bool(group.model.mig),
            )
            if "mig" in group.options:
                gpu = with_layout(gpu, group.model, group.options["mig"])
            result.append(Slot(gpu, number, group.model))
    return tuple(result)


def with_layout(gpu: Gpu, model: Model, text: str) -> Gpu:
    """This GPU with a new MIG layout; an empty layout turns MIG off."""
    mig = devices(gpu, parse_layout(text, model), model) if text else ()
    return replace(gpu, mig_enabled=bool(text), mig=mig)


def _address(groups: tuple[GpuGroup, ...], index: int) -> str:
    known = groups[0].model.addresses
    if len(groups) == 1 and groups[0].count <= len(known):
        return known[index]
    return f"{index // 16:04x}:{0x10 + index % 16 * 13:02x}:00.0"


def profile_topology(groups: tuple[GpuGroup, ...], gpu_slots: tuple[Slot, ...]) -> Topology:
    """PCIe levels and NVLinks. A GPU in MIG mode has no NVLink."""
    first = [sum(group.count for group in groups[:number]) for number in range(len(groups))]
    pairs, switched = [], {}
    for slot in gpu_slots:
        how, count = groups[slot.group].links
        if how == "nvswitch" and not slot.gpu.mig_enabled:
            switched[slot.gpu.uuid] = count
    for a, b in combinations(gpu_slots, 2):
        place = (a.gpu.index - first[a.group], b.gpu.index - first[b.group])
        near = a.group == b.group and len({item // a.model.per_switch for item in place}) == 1
        level = _SAME_SWITCH if near else _SAME_NODE if a.gpu.numa == b.gpu.numa else _SYSTEM
        links = _direct(groups, a, b, place)
        low, high = sorted((a.gpu.uuid, b.gpu.uuid))
        pairs.append(Pair(low, high, level, links))
    return Topology(tuple(pairs), switched)


def _direct(groups: tuple[GpuGroup, ...], a: Slot, b: Slot, place: tuple[int, int]) -> int:
    how, count = groups[a.group].links
    if a.group != b.group or a.gpu.mig_enabled or b.gpu.mig_enabled:
        return 0
    linked = how == "mesh" or (how == "pairs" and place[0] // 2 == place[1] // 2)
    return count if linked else 0


LOST = "the GPU is lost (simulated)"
_ASKED = {RESET: "reset", HARDWARE: "reset", REBOOT: "reboot"}
"""The recovery action that NVML reports after an XID of this class."""
DRIVER_GONE = "the driver is not loaded (simulated)"
_CHANGES: Mapping[str, Callable[[FaultHistory, str], FaultHistory]] = {
    "xid": lambda now, value: now._replace(recovery=_ASKED.get(xid(int(value)).kind, now.recovery)),
    "ecc": lambda now, value: now._replace(ecc=now.ecc + int(value), ecc_ever=now.ecc_ever + int(value)),
    "lost": lambda now, value: now._replace(lost=True),
    "return": lambda now, value: now._replace(lost=False),
    "unplug": lambda now, value: now._replace(unplugged=True),
    "plug": lambda now, value: now._replace(unplugged=False),
    "remap": lambda now, value: now._replace(remap=value),
    "recovery": lambda now, value: now._replace(recovery=value),
    "fabric": lambda now, value: now._replace(fabric=value),
    "mig": lambda now, value: now,
    "reset": lambda now, value: FaultHistory(
        ecc_ever=now.ecc_ever, remap="failed" if now.remap == "failed" else "none"
    ),
    "heal": lambda now, value: FaultHistory(),
}


class SimulatedNode:
    """For one thread. `UsageError` for a specification or a fault that this node doesn't support."""

    def __init__(self, spec: str, host: Host | None = None) -> None:
        self._groups = parse(spec)
        self._slots = list(slots(self._groups, host))
        self._driver = _node_options(self._groups).get("driver", DRIVER)
        self._loads = 1
        self.driver_gone = ""

    @property
    def inventory(self) -> Inventory:
        """NVML's list of GPUs."""
        gpus = tuple(
            replace(slot.gpu, error=LOST, error_code=GPU_IS_LOST) if slot.faults.lost else slot.gpu
            for slot in self._slots
            if not slot.faults.unplugged
        )
        return Inventory(self._driver, CUDA, gpus, simulated=True)

    @property
    def topology(self) -> Topology:
        return profile_topology(self._groups, tuple(self._slots))

    @property
    def readings(self) -> tuple[Reading, ...]:
        """Each listed GPU's reading."""
        return tuple(
            self._reading(slot) for slot in self._slots if not slot.faults.unplugged and not self.driver_gone
        )

    def _reading(self, slot: Slot) -> Reading:
        now = slot.faults
        if now.lost:
            return Reading(slot.gpu.uuid, error=LOST, error_code=GPU_IS_LOST)
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
        """Inject it; return the events that the driver would report."""
        if fault.name == "driver":
            self._loads += fault.value == "back" and self.driver_gone != ""
            self.driver_gone = DRIVER_GONE if fault.value == "gone" else ""
            return ()
        struck = self._slots_of(fault.gpu)
        for slot in struck:
            _check_instance(slot, fault)
        events: list[GpuEvent] = []
        for slot in struck:
            self._slots[slot.gpu.index] = _struck(slot, fault)
            events += _events(slot, fault)
        return tuple(events)

    def _slots_of(self, gpu: str) -> list[Slot]:
        if gpu == ALL:
            return list(self._slots)
        selected = [slot for slot in self._slots if gpu in (str(slot.gpu.index), slot.gpu.uuid)]
        if not selected:
            raise UsageError(f"no simulated GPU {gpu!r}", hint=f"0 to {len(self._slots) - 1}, a UUID or all")
        return selected


def _struck(slot: Slot, fault: Fault) -> Slot:
    """The slot after the fault."""
    gpu = slot.gpu
    if fault.name == "mig":
        gpu = with_layout(gpu, slot.model, "" if fault.value == "off" else fault.value)
    elif fault.name == "reset":
        gpu = replace(gpu, mig=())
    return slot._replace(gpu=gpu, faults=_CHANGES[fault.name](slot.faults, fault.value))


def _events(slot: Slot, fault: Fault) -> list[GpuEvent]:
    """What the driver reports of the fault."""
    if fault.name == "xid":
        return [GpuEvent("xid", slot.gpu.uuid, int(fault.value), fault.gi, fault.ci)]
    return [GpuEvent("ecc-double", slot.gpu.uuid)] if fault.name == "ecc" else []


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
    return inventory._replace(gpus=tuple(replace(gpu, numa=nodes.get(gpu.numa)) for gpu in inventory.gpus))


def _check_instance(slot: Slot, fault: Fault) -> None:
    """`UsageError` if the fault names an instance that this GPU doesn't have: it would have no effect."""
    if fault.gi is None and fault.ci is None:
        return
    there = {(mig.gi, mig.ci) for mig in slot.gpu.mig}
    if not any(fault.gi in (None, gi) and fault.ci in (None, ci) for gi, ci in there):
        gpu_instances = ", ".join(str(gi) for gi, _ in sorted(there))
        raise UsageError(
            f"GPU {slot.gpu.index} has no such MIG instance",
            hint=f"--gi is one of {gpu_instances}, --ci 0"
            if there
            else f"make some: gpunode plugin inject mig LAYOUT --gpu {slot.gpu.index}",
        )
