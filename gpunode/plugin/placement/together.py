"""Partitions that are worth most on the same GPU: on as few GPUs as will do, those the nearest. Pure.

Partitions of one GPU are alike, so that the question is only how many come from which GPU: eight GPUs of 64
partitions have at most 70 answers, where 64 single things have more than can be looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import combinations, islice
from math import comb
from typing import Any

from gpunode.plugin.model import Device
from gpunode.plugin.placement.scores import Nearness

_MOST_SETS = 1000


def choose_together(
    free: Sequence[Device],
    fixed: Sequence[Device],
    need: int,
    nearness: Nearness,
    order: Callable[[Device], Any],
) -> list[Device]:
    """`need` of `free`, which has more. GPUs of `fixed` come first; a GPU that is begun last is the one with
    most to spare, and of one GPU the free partitions just suffice."""
    by_gpu: dict[str, list[Device]] = {}
    for device in sorted(free, key=order):
        by_gpu.setdefault(device.unit.gpu, []).append(device)
    begun = {device.unit.gpu for device in fixed}
    chosen = [device for gpu in _by_room(by_gpu, begun & by_gpu.keys()) for device in by_gpu[gpu]][:need]
    missing = need - len(chosen)
    if missing > 0:
        others = {gpu: found for gpu, found in by_gpu.items() if gpu not in begun}
        more = _nearest(others, fixed, missing, nearness)
        chosen += [device for gpu in _by_room(others, more) for device in others[gpu]][:missing]
    return chosen


def _by_room(by_gpu: Mapping[str, Sequence[Device]], gpus: Collection[str]) -> list[str]:
    """GPUs with little room first; among equals the first by index."""
    return sorted((gpu for gpu in by_gpu if gpu in gpus), key=lambda gpu: len(by_gpu[gpu]))


def _nearest(
    by_gpu: Mapping[str, Sequence[Device]], fixed: Sequence[Device], need: int, nearness: Nearness
) -> tuple[str, ...]:
    """The fewest GPUs that have `need` between them: nearest to each other and to `fixed`, then with least
    to spare. Where there are too many sets of them, the best of the first ones."""
    room = {gpu: len(found) for gpu, found in by_gpu.items()}
    count, total = 0, 0
    for most in sorted(room.values(), reverse=True):
        if total >= need:
            break
        count, total = count + 1, total + most
    begun = list({device.unit.gpu: device for device in fixed}.values())
    one_of = {gpu: found[0] for gpu, found in by_gpu.items()}

    def worth(gpus: tuple[str, ...]) -> tuple[int, int]:
        members = [*begun, *(one_of[gpu] for gpu in gpus)]
        near = sum(nearness(a.unit, b.unit) for a, b in combinations(members, 2))
        return near, -sum(room[gpu] for gpu in gpus)

    sets: Iterable[tuple[str, ...]] = combinations(room, count)
    if comb(len(room), count) > _MOST_SETS:
        roomy = sorted(room, key=lambda gpu: -room[gpu])
        sets = islice(combinations(roomy, count), _MOST_SETS)
    return max((gpus for gpus in sets if sum(room[gpu] for gpu in gpus) >= need), key=worth)
