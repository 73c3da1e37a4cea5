"""From ``--simulate h100:8`` to a node: its inventory and how the GPUs hang together. Pure.

A specification is one or more groups joined by ``+``: ``MODEL[:COUNT][,key=value...]``. The keys of a group:
``mig`` (a layout such as ``3g.20gb/1g.5gb*4``, on each of its GPUs) and ``links`` (``nvswitch``, ``mesh``,
``pairs``, ``none``). Those of the node, in any group: ``node`` (what the UUIDs are made from; else the host's
name), ``numa`` (how many NUMA nodes, 0: the platform doesn't say) and ``driver``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import combinations

from gpunode.dataclass import dataclass, replace
from gpunode.errors import UsageError
from gpunode.gpu.model import Gpu, Inventory, MigDevice, Pair, Topology
from gpunode.host import Host
from gpunode.plugin.simulate.layout import devices, parse_layout, stable_uuid
from gpunode.plugin.simulate.models import MODELS, Model

MOST = 64
DRIVER, CUDA = "580.95.05", "13.0"
_GROUPS = re.compile(r"\+(?!me\b|gfx\b)")  # the plus of 1g.5gb+me joins no groups
_KEYS = ("mig", "links", "node", "numa", "driver")
_LINKS = ("nvswitch", "mesh", "pairs", "none")
_SAME_SWITCH, _SAME_NODE, _SYSTEM = 20, 40, 50  # nvmlGpuTopologyLevel_t
_GRAMMAR = "MODEL[:COUNT][,mig=LAYOUT][,links=...][,node=NAME][,numa=N][,driver=VERSION][+...]"


@dataclass(frozen=True)
class Group:
    """One part of a specification."""

    key: str
    model: Model
    count: int
    options: Mapping[str, str]

    @property
    def links(self) -> tuple[str, int]:
        """How its GPUs are linked, and by how many NVLinks."""
        usual = self.model.small if self.count <= 4 and self.model.small[1] else self.model.links
        asked = self.options.get("links", usual[0])
        counts = dict((self.model.small, self.model.links))
        return asked, counts.get(asked, 0) or self.model.links[1] or 4


@dataclass(frozen=True)
class Slot:
    """A place for a GPU on the node: what `load` puts there, and its group, by number."""

    gpu: Gpu
    group: int
    model: Model


def load(spec: str, host: Host | None = None) -> tuple[Inventory, Topology]:
    """The node that `spec` describes. `UsageError` says what is wrong with it, and what there is."""
    groups = parse(spec)
    found = slots(groups, host)
    options = _node_options(groups)
    inventory = Inventory(
        options.get("driver", DRIVER), CUDA, tuple(slot.gpu for slot in found), simulated=True
    )
    return inventory, topology(groups, found)


def parse(spec: str) -> tuple[Group, ...]:
    """The groups of a specification."""
    groups = tuple(_group(part.strip()) for part in _GROUPS.split(spec))
    total = sum(group.count for group in groups)
    if total > MOST:
        raise UsageError(f"{total} simulated GPUs; one node can have {MOST}", hint="run several plugins")
    return groups


def _group(text: str) -> Group:
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
                f"{item!r} in {text!r} is none of {', '.join(_KEYS)} with a value", hint=_GRAMMAR
            )
        options[name] = value
    if options.get("links", "none") not in _LINKS:
        raise UsageError(f"links={options['links']} is none of {', '.join(_LINKS)}")
    if not options.get("numa", "0").isdecimal() or int(options.get("numa", "0")[:4]) > MOST:
        raise UsageError(f"numa={options['numa']} is no number of NUMA nodes")
    return Group(key, MODELS[key], int(count or MODELS[key].count), options)


def _nearest(key: str) -> str:
    from difflib import get_close_matches

    near = get_close_matches(key.lower(), MODELS, 1)
    return f"; did you mean {near[0]}?" if near else ""


def _node_options(groups: tuple[Group, ...]) -> dict[str, str]:
    return {name: value for group in groups for name, value in group.options.items()}


def node_name(groups: tuple[Group, ...], host: Host | None) -> str:
    """What the UUIDs of this node are made from."""
    given = _node_options(groups).get("node", "")
    return given or (host and (host.read_text("/proc/sys/kernel/hostname") or "").strip()) or "simulated"


def slots(groups: tuple[Group, ...], host: Host | None) -> tuple[Slot, ...]:
    """Every GPU of the node in the order of its index."""
    node, total = node_name(groups, host), sum(group.count for group in groups)
    sockets = int(_node_options(groups).get("numa", max(group.model.sockets for group in groups)))
    made: list[Slot] = []
    for number, group in enumerate(groups):
        layout = parse_layout(group.options["mig"], group.model) if "mig" in group.options else ()
        for _ in range(group.count):
            index = len(made)
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
            if layout:
                gpu = replace(gpu, mig_enabled=True, mig=devices(gpu, layout, group.model))
            made.append(Slot(gpu, number, group.model))
    return tuple(made)


def with_layout(slot: Gpu, model: Model, text: str) -> Gpu:
    """This GPU divided anew; an empty layout turns MIG off."""
    mig: tuple[MigDevice, ...] = devices(slot, parse_layout(text, model), model) if text else ()
    return replace(slot, mig_enabled=bool(text), mig=mig)


def _address(groups: tuple[Group, ...], index: int) -> str:
    known = groups[0].model.addresses
    if len(groups) == 1 and groups[0].count <= len(known):
        return known[index]
    return f"{index // 16:04x}:{0x10 + index % 16 * 13:02x}:00.0"


def topology(groups: tuple[Group, ...], found: tuple[Slot, ...]) -> Topology:
    """PCIe levels and NVLinks. A GPU in MIG mode has no NVLink."""
    first = [sum(group.count for group in groups[:number]) for number in range(len(groups))]
    pairs, switched = [], {}
    for slot in found:
        how, count = groups[slot.group].links
        if how == "nvswitch" and not slot.gpu.mig_enabled:
            switched[slot.gpu.uuid] = count
    for one, other in combinations(found, 2):
        place = (one.gpu.index - first[one.group], other.gpu.index - first[other.group])
        near = one.group == other.group and len({item // one.model.per_switch for item in place}) == 1
        level = _SAME_SWITCH if near else _SAME_NODE if one.gpu.numa == other.gpu.numa else _SYSTEM
        links = _direct(groups, one, other, place)
        low, high = sorted((one.gpu.uuid, other.gpu.uuid))
        pairs.append(Pair(low, high, level, links))
    return Topology(tuple(pairs), switched)


def _direct(groups: tuple[Group, ...], one: Slot, other: Slot, place: tuple[int, int]) -> int:
    how, count = groups[one.group].links
    if one.group != other.group or one.gpu.mig_enabled or other.gpu.mig_enabled:
        return 0
    linked = how == "mesh" or (how == "pairs" and place[0] // 2 == place[1] // 2)
    return count if linked else 0
