"""Which of the available devices a container should get: the answer to GetPreferredAllocation. Pure.

Whole GPUs are chosen by their links. Shares and partitions are spread over the physical GPUs or packed onto
them, and AMD's partitions come from as few GPUs as possible. The kubelet takes the answer as a hint but fails
the pod on an error, so a request that can't be met gets the best possible answer instead. The answer doesn't
depend on the order in which the kubelet lists devices, which is random.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations, islice
from math import comb

from gpunode.gpu.model import Pair, Topology
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.model import SHARE_MARK, Device, Resource, Snapshot, Unit


def prefer(
    settings: Settings,
    snapshot: Snapshot,
    topology: Topology,
    available: Sequence[str],
    must_include: Sequence[str],
    size: int,
    together: bool = False,
) -> tuple[str, ...]:
    """At most `size` ids: all of `must_include` first (as many as fit), then some of `available`.

    Unknown ids and unhealthy devices in `available` are skipped; an unknown id in `must_include` is returned.
    With `together`, partitions come from as few GPUs as possible, whatever the allocation policy.
    """
    known = snapshot.by_id
    must = set(must_include)
    fixed = sorted((known[id] for id in must if id in known), key=_order)
    unknown = sorted(id for id in must if id not in known)
    required = tuple([device.id for device in fixed] + unknown)[: max(size, 0)]
    need = size - len(required)
    if need <= 0:
        return required
    free = sorted(
        (
            device
            for id in set(available) - must
            if (device := known.get(id)) is not None and device.problem is None
        ),
        key=_order,
    )
    resource = snapshot.resource
    shared = resource.shares > 1 or any(SHARE_MARK in device.id for device in resource.devices)
    divided = shared or any(device.unit.partition for device in resource.devices)
    if need >= len(free):
        chosen = free
    elif together and divided and not shared:
        chosen = _fewest_gpus(free, fixed, need, Links(topology))
    elif divided:
        packed = settings.shared_devices_allocation_policy == "packed"
        chosen = _Shares(resource, free, fixed).pick(need, packed)
    else:
        chosen = _aligned(free, fixed, need, Links(topology))
    return required + tuple(device.id for device in chosen)


def _order(device: Device) -> tuple[tuple[int, ...], str, int, str]:
    return (device.unit.order, device.unit.id, *_share_number(device))


def _share_number(device: Device) -> tuple[int, str]:
    number = device.id.rpartition(SHARE_MARK)[2]
    return (int(number) if number.isdecimal() else 0, device.id)


# --- how near two GPUs are ------------------------------------------------------------------------------

PER_LINK = 100
SAME_GPU = 10_000
_FURTHEST = 60
_WITHIN_NODE, _ACROSS = 40, 50


class Links:
    """How near two units are, as a score that can be added up. Higher is nearer.

    NVLink counts most, through an NVSwitch as much as direct; then the common ancestor on the PCIe side.
    NVIDIA's plugin has the same scale, but doesn't count links to switches. NVML's level already says if two
    GPUs are on the same NUMA node: a bonus for that would favour groups that score less on NVIDIA's scale.
    """

    def __init__(self, topology: Topology) -> None:
        self._pairs = {(pair.first, pair.second): pair for pair in topology.pairs}
        self._switch = topology.switch_links

    def score(self, a: Unit, b: Unit) -> int:
        """100 per link, and by NVML's common ancestor from 60 (one board) to 10 (another socket). Where NVML
        reports no ancestor the NUMA nodes decide.
        """
        if a.gpu == b.gpu:
            return SAME_GPU
        pair = self._pairs.get((min(a.gpu, b.gpu), max(a.gpu, b.gpu))) or Pair(a.gpu, b.gpu)
        level = pair.level
        if level is None and a.numa is not None and b.numa is not None:
            level = _WITHIN_NODE if a.numa == b.numa else _ACROSS
        near = 0 if level is None else max(_FURTHEST - level, 0)
        switch = min(self._switch.get(a.gpu, 0), self._switch.get(b.gpu, 0))
        return PER_LINK * (pair.nvlinks + switch) + near


# --- whole GPUs: the nearest group that leaves the best groups for others -------------------------------
#
# The free GPUs are divided into groups of the requested size and one smaller group of the rest. A division is
# worth the scores of all pairs within its groups; the answer is the nearest group of the best division. This
# is the rule of NVIDIA's plugin, which tries every division: 2.6 million for 16 GPUs in fours.

_TRY_ALL_GPUS = 9
_TRY_ALL_GROUPS = 1000  # all where the rest is one group: six of 12 GPUs, 13 of 16
_STARTS = 8  # GPUs from which a division is built up, for each order of building
_FEW_GPUS = 16
_MOST_EXCHANGED = 32  # GPUs: an exchange compares all pairs, and a pod waits for the answer

Matrix = Sequence[Sequence[int]]
"""Score of each two GPUs by position, symmetric."""


def _aligned(free: Sequence[Device], fixed: Sequence[Device], need: int, links: Links) -> list[Device]:
    devices = sorted((*fixed, *free), key=_order)
    matrix = [[0] * len(devices) for _ in devices]
    for (at, one), (before, other) in combinations(enumerate(devices), 2):
        matrix[at][before] = matrix[before][at] = links.score(one.unit, other.unit)
    positions = {device.id: at for at, device in enumerate(devices)}
    must = [positions[device.id] for device in fixed]
    group = choose_group(matrix, [positions[device.id] for device in free], must, len(fixed) + need)
    return [devices[at] for at in group[len(must) :]]


def choose_group(matrix: Matrix, available: Iterable[int], must: Iterable[int], size: int) -> tuple[int, ...]:
    """`size` positions: all of `must`, then some of `available`, both in ascending order."""
    fixed = tuple(sorted(set(must)))[: max(size, 0)]
    free = sorted(set(available).difference(must))
    need = size - len(fixed)
    if need <= 0 or need >= len(free):
        return (*fixed, *free) if need > 0 else fixed
    count = len(fixed) + len(free)
    if len({matrix[a][b] for a, b in combinations((*fixed, *free), 2)}) < 2:
        return (*fixed, *free[:need])
    two_groups = 2 * size >= count
    if count <= _TRY_ALL_GPUS or (two_groups and comb(len(free), need) <= _TRY_ALL_GROUPS):
        return (*fixed, *_best_of_all(matrix, fixed, free, size))
    return (*fixed, *_best_by_exchange(matrix, fixed, free, size))


def _worth(matrix: Matrix, group: Iterable[int]) -> int:
    return sum(matrix[a][b] for a, b in combinations(group, 2))


def _lost(matrix: Matrix, group: Collection[int], rest: Iterable[int]) -> int:
    """What the rest loses with this group: the scores of all pairs between the two."""
    return sum(matrix[a][b] for b in rest for a in group)


def _best_of_all(matrix: Matrix, fixed: tuple[int, ...], free: Sequence[int], size: int) -> tuple[int, ...]:
    """Tries every division: the best one, of it the nearest group, then the one that the rest misses least,
    then the one with the lowest positions."""

    @cache
    def best(left: tuple[int, ...]) -> int:
        """What the best division of these positions is worth."""
        if len(left) <= size:
            return _worth(matrix, left)
        first, *others = left
        return max(
            _worth(matrix, (first, *more)) + best(tuple(at for at in others if at not in more))
            for count in {size, len(left) % size or size}
            for more in combinations(others, count - 1)
        )

    def rank(chosen: tuple[int, ...]) -> tuple[int, int, int]:
        group = (*fixed, *chosen)
        rest = tuple(at for at in free if at not in chosen)
        worth = _worth(matrix, group)
        return worth + best(rest), worth, -_lost(matrix, group, rest)

    return max(combinations(free, size - len(fixed)), key=rank)


def _best_by_exchange(
    matrix: Matrix, fixed: tuple[int, ...], free: Sequence[int], size: int
) -> tuple[int, ...]:
    """The best of several divisions, each built up from the nearest GPUs and then improved by exchanges.

    At 16 GPUs the tests hold it to 99 % of the best division.
    """
    positions = (*fixed, *free)
    best: tuple[tuple[int, int, int, list[int]], list[int]] | None = None
    for groups in _starts(matrix, fixed, free, size):
        if len(positions) <= _MOST_EXCHANGED:
            groups = _exchanged(matrix, free, groups)
        total = sum(_worth(matrix, group) for group in groups)
        for group in groups:
            if len(group) == size and set(fixed) <= set(group):
                lost = _lost(matrix, group, [at for at in positions if at not in group])
                rank = (total, _worth(matrix, group), -lost, [-at for at in group])
                if best is None or rank > best[0]:
                    best = rank, group
    assert best is not None  # the first group of each division has all of `fixed`
    return tuple(at for at in best[1] if at not in fixed)


def _starts(
    matrix: Matrix, fixed: tuple[int, ...], free: Sequence[int], size: int
) -> Iterator[list[list[int]]]:
    """Divisions to begin with. The rest is what remains at the end, or the first group that is built."""
    count = len(fixed) + len(free)
    starts = _STARTS if count <= _FEW_GPUS else 1
    anchors = free[:: -(-len(free) // starts)]
    seen = set()
    for rest in {0: None, count % size: None}:
        for anchor in anchors:
            groups = _built_up(matrix, fixed, free, size, rest, anchor)
            key = frozenset(map(frozenset, groups))
            if key not in seen:
                seen.add(key)
                yield groups


def _built_up(
    matrix: Matrix, fixed: tuple[int, ...], free: Sequence[int], size: int, rest: int, anchor: int
) -> list[list[int]]:
    """Groups of `size`, the first one with all of `fixed`; each takes the nearest free GPU until it is full.

    A group of `rest` GPUs is built before all others, unless `rest` is 0. `anchor` is in the first group that
    is built.
    """
    left = [at for at in free if at != anchor]

    def fill(group: list[int], size: int) -> list[int]:
        near = [sum(row[at] for at in group) for row in matrix]
        while len(group) < size and left:
            nearest = max(left, key=lambda at: (near[at], -at))
            left.remove(nearest)
            group.append(nearest)
            near = [old + new for old, new in zip(near, matrix[nearest], strict=True)]
        return sorted(group)

    smaller = [fill([anchor], rest)] if rest else []
    groups = [fill([*fixed] if rest else [*fixed, anchor], size)]
    while left:
        groups.append(fill([], size))
    return groups + smaller


def _exchanged(matrix: Matrix, free: Sequence[int], groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """The division after exchanges of free GPUs between groups, as long as they improve it.

    Each pass of the Kernighan-Lin method exchanges the two GPUs that gain most, or lose least, until each GPU
    has moved once, and keeps the exchanges up to the best division on the way.
    """
    where = {at: number for number, group in enumerate(groups) for at in group}
    near = [[sum(row[at] for at in group) for row in matrix] for group in groups]

    def exchange(a: int, b: int) -> None:
        one, other = where[a], where[b]
        where[a], where[b] = other, one
        for at, row in enumerate(matrix):
            near[one][at] += row[b] - row[a]
            near[other][at] -= row[b] - row[a]

    gain = 1
    while gain > 0:
        movable, done = list(free), []
        total = gain = keep = 0
        while pair := _best_pair(matrix, movable, where, near):
            more, a, b = pair
            exchange(a, b)
            movable = [at for at in movable if at not in (a, b)]
            done.append((a, b))
            total += more
            if total > gain:
                gain, keep = total, len(done)
        for a, b in reversed(done[keep:]):
            exchange(a, b)
    return [sorted(at for at in where if where[at] == number) for number in range(len(groups))]


def _best_pair(
    matrix: Matrix, movable: Sequence[int], where: Mapping[int, int], near: Matrix
) -> tuple[int, int, int] | None:
    """(gain, a, b) of the exchange that gains most; None if all are in the same group."""
    best: tuple[int, int, int] | None = None
    for number, a in enumerate(movable):
        one, row = where[a], matrix[a]
        here = near[one]
        for b in movable[:number]:
            other = where[b]
            if one != other:
                there = near[other]
                gain = there[a] + here[b] - here[a] - there[b] - 2 * row[b]
                if best is None or gain > best[0]:
                    best = gain, a, b
    return best


# --- shares and partitions: spread over the physical GPUs, or packed onto them --------------------------
#
# The kubelet doesn't say what other pods hold: it is what a unit has, less what is available of it.


class _Count:
    """Devices of one unit, or of one physical GPU, that are taken: by anyone, and by this request."""

    def __init__(self) -> None:
        self.held = 0
        self.picked = 0
        self.free = 0

    def take(self) -> None:
        self.held += 1
        self.picked += 1
        self.free -= 1


class _Shares:
    """One request: what is free of each unit, by physical GPU, and what is picked so far."""

    def __init__(self, resource: Resource, free: Iterable[Device], fixed: Iterable[Device]) -> None:
        self._units: dict[str, _Count] = {}
        self._gpus: dict[str, _Count] = {}
        self._free: dict[str, dict[str, list[Device]]] = {}  # by GPU and unit; the next device is last
        self._numa: dict[str, int | None] = {}
        self._nodes: set[int | None] = set()
        for device in sorted(resource.devices, key=lambda device: (device.unit.order, device.unit.id)):
            unit = device.unit
            self._numa.setdefault(unit.gpu, unit.numa)
            self._free.setdefault(unit.gpu, {}).setdefault(unit.id, [])
            for count in self._counts(unit):
                count.held += 1
        for device in sorted(free, key=_share_number, reverse=True):
            self._free[device.unit.gpu][device.unit.id].append(device)
            for count in self._counts(device.unit):
                count.held -= 1
                count.free += 1
        for device in fixed:
            for count in self._counts(device.unit):
                count.picked += 1
            self._nodes.add(self._numa[device.unit.gpu])

    def _counts(self, unit: Unit) -> tuple[_Count, _Count]:
        return self._gpus.setdefault(unit.gpu, _Count()), self._units.setdefault(unit.id, _Count())

    def pick(self, count: int, packed: bool) -> list[Device]:
        """At most `count` devices, one after the other; of equals the first GPU and unit."""
        gpu_key, unit_key = (self._packed, _packed) if packed else (self._distributed, _distributed)
        picked: list[Device] = []
        while len(picked) < count:
            gpus = [gpu for gpu in self._free if self._gpus[gpu].free]
            if not gpus:
                break
            gpu = min(gpus, key=gpu_key)
            units = [self._units[unit] for unit in self._free[gpu]]
            number = min((n for n, unit in enumerate(units) if unit.free), key=lambda n: unit_key(units[n]))
            device = list(self._free[gpu].values())[number].pop()
            for taken in self._counts(device.unit):
                taken.take()
            self._nodes.add(self._numa[gpu])
            picked.append(device)
        return picked

    def _distributed(self, gpu: str) -> tuple[object, ...]:
        """A GPU that this container has nothing of, the least used, a near one."""
        count = self._gpus[gpu]
        return (count.picked > 0, count.held, count.picked, self._far(gpu))

    def _packed(self, gpu: str) -> tuple[object, ...]:
        """The most used GPU; of equals one that this container has, a near one, one with the least free."""
        count = self._gpus[gpu]
        return (-count.held, -count.picked, self._far(gpu), count.free)

    def _far(self, gpu: str) -> bool:
        nodes = self._nodes - {None}
        return bool(nodes) and self._numa[gpu] not in nodes


def _distributed(unit: _Count) -> tuple[object, ...]:
    return (unit.picked > 0, unit.held, unit.picked)


def _packed(unit: _Count) -> tuple[object, ...]:
    return (-unit.held, unit.free)


# --- partitions from as few GPUs as possible ------------------------------------------------------------
#
# Partitions of one GPU are alike, so the only question is how many come from which GPU: eight GPUs of 64
# partitions have at most 70 answers.

_MOST_SETS = 1000


def _fewest_gpus(free: Sequence[Device], fixed: Sequence[Device], need: int, links: Links) -> list[Device]:
    """`need` of `free`, which has more. GPUs of `fixed` come first; the GPU that is used last is the one with
    the most free partitions."""
    by_gpu: dict[str, list[Device]] = {}
    for device in free:
        by_gpu.setdefault(device.unit.gpu, []).append(device)
    used = {device.unit.gpu for device in fixed}
    chosen = [device for gpu in _fullest_first(by_gpu, used) for device in by_gpu[gpu]][:need]
    missing = need - len(chosen)
    if missing > 0:
        others = {gpu: devices for gpu, devices in by_gpu.items() if gpu not in used}
        more = _nearest_gpus(others, fixed, missing, links)
        chosen += [device for gpu in _fullest_first(others, more) for device in others[gpu]][:missing]
    return chosen


def _fullest_first(by_gpu: Mapping[str, Sequence[Device]], gpus: Collection[str]) -> list[str]:
    """GPUs with few free partitions first; of equals the first by index."""
    return sorted((gpu for gpu in by_gpu if gpu in gpus), key=lambda gpu: len(by_gpu[gpu]))


def _nearest_gpus(
    by_gpu: Mapping[str, Sequence[Device]], fixed: Sequence[Device], need: int, links: Links
) -> tuple[str, ...]:
    """The fewest GPUs with `need` free partitions: nearest to each other and to `fixed`, then with the fewest
    partitions left over. Where there are too many sets of GPUs, the best of the first ones."""
    room = {gpu: len(devices) for gpu, devices in by_gpu.items()}
    count, total = 0, 0
    for most in sorted(room.values(), reverse=True):
        if total >= need:
            break
        count, total = count + 1, total + most
    used = list({device.unit.gpu: device.unit for device in fixed}.values())

    def worth(gpus: tuple[str, ...]) -> tuple[int, int]:
        units = [*used, *(by_gpu[gpu][0].unit for gpu in gpus)]
        near = sum(links.score(a, b) for a, b in combinations(units, 2))
        return near, -sum(room[gpu] for gpu in gpus)

    sets: Iterable[tuple[str, ...]] = combinations(room, count)
    if comb(len(room), count) > _MOST_SETS:
        roomy = sorted(room, key=lambda gpu: -room[gpu])
        sets = islice(combinations(roomy, count), _MOST_SETS)
    return max((gpus for gpus in sets if sum(room[gpu] for gpu in gpus) >= need), key=worth)
