"""The same decision, told: how the GPUs hang together, which groups there were, and what others keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from gpunode.gpu.model import Topology
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.model import Snapshot, Unit
from gpunode.plugin.placement.aligned import Machine, machine_of
from gpunode.plugin.placement.choose import divisible, prefer, shared
from gpunode.plugin.placement.scores import Links, Near, by_links

_CANDIDATES = 5
_UNPROVEN = (
    "not proven to be the best: the GPUs hang together so irregularly that not every division was looked at;"
    " a plugin that serves goes on looking, for when the same is asked again"
)


@dataclass(frozen=True)
class Group:
    """Some units, the sum of their pairs' scores, and what makes it. `total` is that of the whole division
    with this group in it, None where that isn't what the group was judged by.
    """

    units: tuple[str, ...]
    indices: tuple[str, ...]
    score: int
    why: str
    total: int | None = None


@dataclass(frozen=True)
class Use:
    """A unit with shares: how many it has, how many others hold, how many this request gets."""

    unit: str
    index: str
    devices: int
    held: int
    chosen: int


_POLICIES = {
    "packed": "the GPU that is used most first",
    "distributed": "a GPU that this container has nothing of first, then the one that is used least",
    "together": "as few GPUs as will do, those the nearest, and of one GPU what just suffices",
}


@dataclass(frozen=True)
class Explanation:
    """`policy` is aligned, distributed, packed or together. `candidates` are the best groups, the chosen
    one first; `leaves` how what remains would be divided for requests of the same size. `exact` is False if
    the search was given up.
    """

    policy: str
    chosen: tuple[str, ...]
    reasons: tuple[str, ...]
    candidates: tuple[Group, ...] = ()
    leaves: tuple[Group, ...] = ()
    uses: tuple[Use, ...] = ()
    steps: int = 0
    exact: bool = True


def explain(
    settings: Settings,
    snapshot: Snapshot,
    topology: Topology,
    available: Sequence[str],
    must_include: Sequence[str],
    size: int,
) -> Explanation:
    """What `prefer` answers for the same arguments, and why."""
    together = settings.vendor == "amd"
    chosen = prefer(
        settings, snapshot, topology, available, must_include, size, together=together, later=False
    )
    missing = size - len(chosen)
    reasons = [f"{missing} of {size} can't be had: too few are available and healthy"] if missing > 0 else []
    if divisible(snapshot.resource):
        return _shared(settings, snapshot, available, chosen, reasons)
    machine = machine_of(snapshot.resource, topology, by_links)
    return _aligned(_Told(machine, Links(topology)), snapshot, (available, must_include), chosen, reasons)


class _Told:
    """Says groups of positions in words and raw scores."""

    def __init__(self, machine: Machine, links: Links) -> None:
        self.machine = machine
        self._links = links

    def group(self, positions: Sequence[int], total: int | None = None) -> Group:
        units = [self.machine.units[at] for at in sorted(positions)]
        near = [self._links.near(a, b) for a, b in combinations(units, 2)]
        return Group(
            tuple(unit.id for unit in units),
            tuple(unit.index for unit in units),
            sum(pair.score for pair in near),
            _why(units, near),
            total,
        )


def _aligned(
    told: _Told,
    snapshot: Snapshot,
    request: tuple[Sequence[str], Sequence[str]],
    chosen: Sequence[str],
    reasons: list[str],
) -> Explanation:
    places = told.machine.positions
    available, must = (
        [places[one] for one in ids if one in places and (device := snapshot.find(one)) and device.healthy]
        for ids in request
    )
    picked = [places[one] for one in chosen if one in places]
    divider = told.machine.divider
    left = [at for at in available if at not in picked]
    leaves = [told.group(group) for group in divider.divide(left, len(picked), quick=True)] if picked else []
    best = told.machine.choose([*available, *must], must, len(picked), later=False)
    candidates = [
        told.group(found.group, found.total + divider.least * _pairs(len({*available, *must}), len(picked)))
        for found in divider.candidates(best, [*available, *must], must, len(picked), _CANDIDATES)
    ]
    if candidates and not reasons:
        reasons.append(_decided(candidates, len(picked), everything=not left))
    if not best.exact:
        reasons.append(_UNPROVEN)
    return Explanation(
        "aligned", tuple(chosen), tuple(reasons), tuple(candidates), tuple(leaves), (), best.steps, best.exact
    )


def _pairs(count: int, size: int) -> int:
    """Pairs within the groups of a division."""
    whole, rest = divmod(count, max(size, 1))
    return whole * (size * (size - 1) // 2) + rest * (rest - 1) // 2


def _decided(candidates: Sequence[Group], size: int, everything: bool) -> str:
    """What set the first apart from the second."""
    if len(candidates) == 1 and everything:
        return "all that is available is asked for"
    if len(candidates) == 1:
        return "every other group is as good: the lowest indices" if size else "nothing was asked for"
    first, second = candidates[:2]
    other = ",".join(second.indices)
    if first.total != second.total:
        return (
            f"dividing all that is available is worth {first.total} with this group,"
            f" {second.total} with {other}"
        )
    if first.score != second.score:
        return f"as good for others as {other}, and nearer: {first.score} against {second.score}"
    return f"worth as much as {other}; its loss hurts what is left least, or it has the lower indices"


def _why(units: Sequence[Unit], near: Sequence[Near]) -> str:
    """Links and NUMA nodes of a group: ``NV18 through NVSwitch, NUMA node 0``."""
    said = []
    if near:
        words = sorted({pair.word for pair in near}, key=lambda word: (not word.startswith("NV"), word))
        switched = any(pair.switch for pair in near)
        said.append("/".join(words) + (" through NVSwitch" if switched else ""))
    nodes = sorted({unit.numa for unit in units if unit.numa is not None})
    if nodes:
        said.append(f"NUMA node{'s' if len(nodes) > 1 else ''} {'+'.join(map(str, nodes))}")
    return ", ".join(said)


def _shared(
    settings: Settings,
    snapshot: Snapshot,
    available: Sequence[str],
    chosen: Sequence[str],
    reasons: list[str],
) -> Explanation:
    policy = settings.shared_devices_allocation_policy
    if settings.vendor == "amd" and not shared(snapshot.resource):
        policy = "together"
    total = _by_unit(snapshot, [device.id for device in snapshot.devices])
    free = _by_unit(snapshot, set(available) | set(chosen))
    got = _by_unit(snapshot, chosen)
    uses = tuple(
        Use(unit.id, unit.index, total[unit.id], total[unit.id] - free.get(unit.id, 0), got.get(unit.id, 0))
        for unit in sorted(snapshot.resource.units, key=lambda unit: (unit.order, unit.id))
    )
    reasons.append(f"{policy}: {_POLICIES[policy]}")
    return Explanation(policy, tuple(chosen), tuple(reasons), uses=uses)


def _by_unit(snapshot: Snapshot, ids: Sequence[str] | set[str]) -> Mapping[str, int]:
    counts: dict[str, int] = {}
    for one in ids:
        device = snapshot.find(one)
        if device is not None:
            counts[device.unit.id] = counts.get(device.unit.id, 0) + 1
    return counts
