"""Choice of devices for a container: the response to GetPreferredAllocation. Pure.

Whole GPUs are chosen by their links. Shares and partitions are spread over the physical GPUs or packed onto
them, and AMD's partitions come from as few GPUs as possible. The kubelet uses the response as a hint but
fails the pod on an error, so a request that can't be met gets the best possible response instead. The
response doesn't depend on the order in which the kubelet lists devices, which is random.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations, count, islice
from math import comb

from gpunode.gpu.model import Pair, Topology
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.model import SHARE_MARK, KubeletDevice, Resource, Snapshot, Unit


def prefer(
    settings: Settings,
    snapshot: Snapshot,
    topology: Topology,
    available: Sequence[str],
    must_include: Sequence[str],
    size: int,
) -> tuple[str, ...]:
    """At most `size` ids: all of `must_include` first (as many as fit), then some of `available`.

    Unknown ids and unhealthy devices in `available` are skipped; an unknown id in `must_include` is returned.
    AMD's partitions come from as few GPUs as possible, whatever the allocation policy.
    """
    resource = snapshot.resource
    must = set(must_include)
    candidates = set(available) - must
    fixed = [device for device in resource.devices if device.id in must]
    unknown = sorted(must - snapshot.by_id.keys())
    required = tuple([device.id for device in fixed] + unknown)[: max(size, 0)]
    need = size - len(required)
    if need <= 0:
        return required
    free = [device for device in resource.devices if device.id in candidates and device.healthy]
    shared = resource.shares > 1 or any(SHARE_MARK in device.id for device in resource.devices)
    divided = shared or any(device.unit.partition for device in resource.devices)
    if need >= len(free):
        selected = free
    elif settings.vendor == "amd" and divided and not shared:
        selected = _fewest_gpus(free, fixed, need, Links(topology))
    elif divided:
        packed = settings.shared_devices_allocation_policy == "packed"
        selected = _Shares(resource, free, fixed).pick(need, packed)
    else:
        selected = _aligned(free, fixed, need, Links(topology))
    return required + tuple(device.id for device in selected)


# --- distance of two GPUs -------------------------------------------------------------------------------

PER_LINK = 100
_FURTHEST = 60
_WITHIN_NODE, _ACROSS = 40, 50


class Links:
    """Proximity of two units as a score that can be added up. Higher is nearer.

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
_REPEATS = 20  # of the same best score: a better one is improbable
_PRIME = 65_521  # the powers of the positions modulo this number are the shuffled orders
_MOST_COMPARISONS = 25_000  # of two GPUs, some 10 ms: a pod waits for the answer

Matrix = Sequence[Sequence[int]]
"""Score of each two GPUs by position, symmetric."""


def _aligned(
    free: Sequence[KubeletDevice], fixed: Sequence[KubeletDevice], need: int, links: Links
) -> list[KubeletDevice]:
    devices = [*fixed, *free]
    matrix = [[0] * len(devices) for _ in devices]
    for (at, first), (before, second) in combinations(enumerate(devices), 2):
        matrix[at][before] = matrix[before][at] = links.score(first.unit, second.unit)
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
    total = len(fixed) + len(free)
    if len({matrix[a][b] for a, b in combinations((*fixed, *free), 2)}) < 2:
        return (*fixed, *free[:need])
    two_groups = 2 * size >= total
    if total <= _TRY_ALL_GPUS or (two_groups and comb(len(free), need) <= _TRY_ALL_GROUPS):
        return (*fixed, *_best_of_all(matrix, fixed, free, size))
    return (*fixed, *_best_by_exchange(matrix, fixed, free, size))


def _worth(matrix: Matrix, group: Iterable[int]) -> int:
    return sum(matrix[a][b] for a, b in combinations(group, 2))


def _lost_score(matrix: Matrix, group: Collection[int], rest: Iterable[int]) -> int:
    """The score that the rest loses with this group: the sum over all pairs between the two."""
    return sum(matrix[a][b] for b in rest for a in group)


def _best_of_all(matrix: Matrix, fixed: tuple[int, ...], free: Sequence[int], size: int) -> tuple[int, ...]:
    """Tries every division: the best one, in it the nearest group, on a tie the one with the lowest loss for
    the rest, then the one with the lowest positions."""

    @cache
    def best(left: tuple[int, ...]) -> int:
        """The score of the best division of these positions."""
        if len(left) <= size:
            return _worth(matrix, left)
        first, *others = left
        return max(
            _worth(matrix, (first, *more)) + best(tuple(at for at in others if at not in more))
            for count in {size, len(left) % size or size}
            for more in combinations(others, count - 1)
        )

    def rank(selected: tuple[int, ...]) -> tuple[int, int, int]:
        group = (*fixed, *selected)
        rest = tuple(at for at in free if at not in selected)
        worth = _worth(matrix, group)
        return worth + best(rest), worth, -_lost_score(matrix, group, rest)

    return max(combinations(free, size - len(fixed)), key=rank)


def _best_by_exchange(
    matrix: Matrix, fixed: tuple[int, ...], free: Sequence[int], size: int
) -> tuple[int, ...]:
    """The best of several divisions, each improved by exchanges, until one score is the best
    repeatedly or the budget of comparisons is spent.

    At 16 GPUs the tests require 99 % of the best division.
    """
    positions = (*fixed, *free)
    best: tuple[tuple[int, int, int, list[int]], list[int]] | None = None
    budget, repeats = _MOST_COMPARISONS, 0
    for start in _starts(matrix, fixed, free, size):
        groups, comparisons = _exchanged(matrix, free, start)
        total = sum(_worth(matrix, group) for group in groups)
        if best is None or total >= best[0][0]:
            repeats = repeats + 1 if best is not None and total == best[0][0] else 0
            for group in groups:
                if len(group) == size and set(fixed) <= set(group):
                    lost = _lost_score(matrix, group, [at for at in positions if at not in group])
                    rank = (total, _worth(matrix, group), -lost, [-at for at in group])
                    if best is None or rank > best[0]:
                        best = rank, group
        budget -= comparisons
        if budget <= 0 or repeats == _REPEATS:
            break
    assert best is not None  # the first group of each division has all of `fixed`
    return tuple(at for at in best[1] if at not in fixed)


def _starts(
    matrix: Matrix, fixed: tuple[int, ...], free: Sequence[int], size: int
) -> Iterator[list[list[int]]]:
    """An endless sequence of divisions to improve: the greedy ones, then shuffled ones, the same in each
    call."""
    rest = (len(fixed) + len(free)) % size
    yield _greedy(matrix, fixed, free, size, 0)
    if rest:
        yield _greedy(matrix, fixed, free, size, rest)
    for power in count(2):
        order = [*fixed, *sorted(free, key=lambda at: pow(at + 2, power, _PRIME))]
        yield [order[at : at + size] for at in range(0, len(order), size)]


def _greedy(
    matrix: Matrix, fixed: tuple[int, ...], free: Sequence[int], size: int, rest: int
) -> list[list[int]]:
    """Groups of `size`, the first one with all of `fixed`; each takes the nearest free GPU until it is full.

    A group of `rest` GPUs is built before all others, unless `rest` is 0.
    """
    left = list(free)

    def fill(group: list[int], size: int) -> list[int]:
        near = [sum(row[at] for at in group) for row in matrix]
        while len(group) < size and left:
            nearest = max(left, key=lambda at: (near[at], -at))
            left.remove(nearest)
            group.append(nearest)
            near = [old + new for old, new in zip(near, matrix[nearest], strict=True)]
        return group

    smaller = [fill([], rest)] if rest else []
    groups = [fill([*fixed], size)]
    while left:
        groups.append(fill([], size))
    return groups + smaller


def _exchanged(
    matrix: Matrix, free: Sequence[int], groups: Sequence[Sequence[int]]
) -> tuple[list[list[int]], int]:
    """The division after each exchange of two free GPUs between groups that improves it, and the number of
    comparisons."""
    where = {at: number for number, group in enumerate(groups) for at in group}
    near = [[*map(sum, zip(*(matrix[at] for at in group), strict=True))] for group in groups]
    comparisons, improved = 0, True
    while improved:
        improved = False
        comparisons += comb(len(free), 2)
        for number, a in enumerate(free):
            row, here = matrix[a], near[where[a]]
            for b in free[:number]:
                there = near[where[b]]
                if here is not there and there[a] + here[b] > here[a] + there[b] + 2 * row[b]:
                    near[where[a]] = [n - x + y for n, x, y in zip(here, row, matrix[b], strict=True)]
                    near[where[b]] = [n + x - y for n, x, y in zip(there, row, matrix[b], strict=True)]
                    where[a], where[b] = where[b], where[a]
                    here = near[where[a]]
                    improved = True
    return [sorted(at for at in where if where[at] == number) for number in range(len(groups))], comparisons


# --- shares and partitions: spread over the physical GPUs, or packed onto them --------------------------
#
# The kubelet doesn't report what other pods hold: it is what a unit has, less what is available of it.


class _Counts:
    """Devices by unit, or by physical GPU: free, held by any container, and picked for this one."""

    def __init__(self, devices: Iterable[str], free: Iterable[str], fixed: Iterable[str]) -> None:
        self.free = Counter(free)
        self.held = Counter(devices)
        self.held.subtract(self.free)
        self.picked = Counter(fixed)

    def take(self, id: str) -> None:
        self.free[id] -= 1
        self.held[id] += 1
        self.picked[id] += 1


class _Shares:
    """One request: the free devices of each unit, by physical GPU, and those picked so far."""

    def __init__(
        self, resource: Resource, free: Sequence[KubeletDevice], fixed: Sequence[KubeletDevice]
    ) -> None:
        requested = (resource.devices, free, fixed)
        self._units = _Counts(*([device.unit.id for device in group] for group in requested))
        self._gpus = _Counts(*([device.unit.gpu for device in group] for group in requested))
        self._free: dict[str, dict[str, list[KubeletDevice]]] = {}  # by GPU and unit; the next device is last
        for unit in resource.units:
            self._free.setdefault(unit.gpu, {})[unit.id] = []
        for device in reversed(free):
            self._free[device.unit.gpu][device.unit.id].append(device)
        self._numa = {unit.gpu: unit.numa for unit in resource.units}
        self._nodes = {device.unit.numa for device in fixed}

    def pick(self, count: int, packed: bool) -> list[KubeletDevice]:
        """`count` of the free devices, of which there are more, one after the other; on a tie the first GPU
        and unit."""
        gpu_key = self._packed_gpu if packed else self._distributed_gpu
        unit_key = self._packed_unit if packed else self._distributed_unit
        picked: list[KubeletDevice] = []
        while len(picked) < count:
            gpu = min((gpu for gpu in self._free if self._gpus.free[gpu]), key=gpu_key)
            unit = min((unit for unit, devices in self._free[gpu].items() if devices), key=unit_key)
            picked.append(self._free[gpu][unit].pop())
            self._gpus.take(gpu)
            self._units.take(unit)
            self._nodes.add(self._numa[gpu])
        return picked

    def _distributed_gpu(self, gpu: str) -> tuple[object, ...]:
        """A GPU without a device for this container; of those the least used, then the nearest."""
        counts = self._gpus
        return (counts.picked[gpu] > 0, counts.held[gpu], counts.picked[gpu], self._far(gpu))

    def _packed_gpu(self, gpu: str) -> tuple[object, ...]:
        """The most used GPU; on a tie one with a device for this container, then the nearest, then the one
        with the least free."""
        counts = self._gpus
        return (-counts.held[gpu], -counts.picked[gpu], self._far(gpu), counts.free[gpu])

    def _distributed_unit(self, unit: str) -> tuple[object, ...]:
        return (self._units.picked[unit] > 0, self._units.held[unit], self._units.picked[unit])

    def _packed_unit(self, unit: str) -> tuple[object, ...]:
        return (-self._units.held[unit], self._units.free[unit])

    def _far(self, gpu: str) -> bool:
        nodes = self._nodes - {None}
        return bool(nodes) and self._numa[gpu] not in nodes


# --- partitions from as few GPUs as possible ------------------------------------------------------------
#
# Partitions of one GPU are alike, so the only question is how many come from which GPU: eight GPUs of 64
# partitions have at most 70 answers.

_MOST_SETS = 1000


def _fewest_gpus(
    free: Sequence[KubeletDevice], fixed: Sequence[KubeletDevice], need: int, links: Links
) -> list[KubeletDevice]:
    """`need` of `free`, which has more. GPUs of `fixed` come first; the GPU that is used last is the one with
    the most free partitions."""
    by_gpu: dict[str, list[KubeletDevice]] = {}
    for device in free:
        by_gpu.setdefault(device.unit.gpu, []).append(device)
    used = {device.unit.gpu for device in fixed}
    selected = [device for gpu in _fullest_first(by_gpu, used) for device in by_gpu[gpu]][:need]
    missing = need - len(selected)
    if missing > 0:
        others = {gpu: devices for gpu, devices in by_gpu.items() if gpu not in used}
        more = _nearest_gpus(others, fixed, missing, links)
        selected += [device for gpu in _fullest_first(others, more) for device in others[gpu]][:missing]
    return selected


def _fullest_first(by_gpu: Mapping[str, Sequence[KubeletDevice]], gpus: Collection[str]) -> list[str]:
    """GPUs with few free partitions first; of equals the first by index."""
    return sorted((gpu for gpu in by_gpu if gpu in gpus), key=lambda gpu: len(by_gpu[gpu]))


def _nearest_gpus(
    by_gpu: Mapping[str, Sequence[KubeletDevice]], fixed: Sequence[KubeletDevice], need: int, links: Links
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
