"""Shares and partitions: spread over the physical GPUs, or packed onto them.

What others hold isn't told by anybody; it is what a unit has less what is available of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpunode.plugin.model import Device, Resource, Unit

_Key = tuple[object, ...]


class _Bucket:
    """Free devices of one unit, the next one last. `held` counts those of others and of this request."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.free: list[Device] = []
        self.held = 0
        self.picked = 0


class _Parent:
    """A physical GPU with its units."""

    def __init__(self, buckets: list[_Bucket]) -> None:
        self.buckets = buckets
        self.held = sum(bucket.held for bucket in buckets)
        self.picked = 0
        self.free = sum(len(bucket.free) for bucket in buckets)

    @property
    def numa(self) -> int | None:
        return self.buckets[0].unit.numa


class Shares:
    """One request: what is free of each unit, by physical GPU, and what was picked so far."""

    def __init__(self, resource: Resource, available: Iterable[Device], must: Iterable[Device]) -> None:
        buckets: dict[str, _Bucket] = {}
        for device in resource.devices:
            bucket = buckets.get(device.unit.id)
            if bucket is None:
                bucket = buckets[device.unit.id] = _Bucket(device.unit)
            bucket.held += 1
        for device in available:
            bucket = buckets[device.unit.id]
            bucket.free.append(device)
            bucket.held -= 1
        by_gpu: dict[str, list[_Bucket]] = {}
        for bucket in sorted(buckets.values(), key=lambda bucket: (bucket.unit.order, bucket.unit.id)):
            bucket.free.sort(key=_share_number, reverse=True)
            by_gpu.setdefault(bucket.unit.gpu, []).append(bucket)
        self._parents = {gpu: _Parent(some) for gpu, some in by_gpu.items()}
        self._nodes: set[int] = set()
        for device in must:
            parent = self._parents[device.unit.gpu]
            parent.picked += 1
            buckets[device.unit.id].picked += 1
            self._note_node(parent)

    def pick(self, count: int, packed: bool) -> list[Device]:
        """At most `count` devices, one after the other."""
        picked: list[Device] = []
        while len(picked) < count:
            parents = [parent for parent in self._parents.values() if parent.free]
            if not parents:
                break
            parent = min(parents, key=self._packed if packed else self._distributed)
            buckets = [bucket for bucket in parent.buckets if bucket.free]
            bucket = min(buckets, key=_packed if packed else _distributed)
            picked.append(bucket.free.pop())
            for counts in (parent, bucket):
                counts.held += 1
                counts.picked += 1
            parent.free -= 1
            self._note_node(parent)
        return picked

    def _distributed(self, parent: _Parent) -> _Key:
        """A GPU that this container has nothing of, the least used, a near one; `min` takes the first."""
        return (parent.picked > 0, parent.held, parent.picked, self._far(parent))

    def _packed(self, parent: _Parent) -> _Key:
        """The most used GPU; of equals one that this container has, a near one, one with least to give."""
        return (-parent.held, -parent.picked, self._far(parent), parent.free)

    def _far(self, parent: _Parent) -> bool:
        return bool(self._nodes) and parent.numa not in self._nodes

    def _note_node(self, parent: _Parent) -> None:
        if parent.numa is not None:
            self._nodes.add(parent.numa)


def choose_shares(
    resource: Resource, available: Sequence[Device], must: Sequence[Device], count: int, packed: bool
) -> list[Device]:
    """`count` of `available` (or as many as there are) beside `must`, which are not among them."""
    return Shares(resource, available, must).pick(count, packed)


def _distributed(bucket: _Bucket) -> _Key:
    return (bucket.picked > 0, bucket.held, bucket.picked)


def _packed(bucket: _Bucket) -> _Key:
    return (-bucket.held, len(bucket.free))


def _share_number(device: Device) -> tuple[int, str]:
    number = device.id.rpartition("::")[2]
    return (int(number) if number.isdecimal() else 0, device.id)
