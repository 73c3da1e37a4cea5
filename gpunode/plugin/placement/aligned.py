"""Whole GPUs: the group that hangs together best and leaves the best groups for others.

Nothing is asked of the GPUs here. What is worked out for a machine is kept until its GPUs or their links
change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from gpunode.gpu.model import Topology
from gpunode.plugin.model import Resource, Unit
from gpunode.plugin.placement.divide import EXACT_GPUS, Choice, Divider
from gpunode.plugin.placement.later import Later
from gpunode.plugin.placement.scores import Nearness

_MOST_UNITS = 128
_MOST_ANSWERS = 4096
_MOST_MACHINES = 8
_later = Later()


class Machine:
    """One resource's units in people's order, and the search on them."""

    def __init__(self, units: Sequence[Unit], nearness: Nearness) -> None:
        self.units = tuple(sorted(units, key=lambda unit: (unit.order, unit.id)))
        self.positions = {unit.id: position for position, unit in enumerate(self.units)}
        self._nearness = nearness
        self._answers: dict[tuple[int, int, int], Choice] = {}
        self._warm = False

    @cached_property
    def divider(self) -> Divider:
        matrix = [[0] * len(self.units) for _ in self.units]
        for at, one in enumerate(self.units):
            for before, other in enumerate(self.units[:at]):
                matrix[at][before] = matrix[before][at] = self._nearness(other, one)
        return Divider(matrix)

    def choose(self, available: Sequence[int], must: Sequence[int], size: int) -> Choice:
        """Positions; see `Divider.choose`. A question that was asked before is answered from memory.

        Nobody waits longer than a quick search takes: if that isn't enough, the best that it has found is
        the answer, and the whole search is made meanwhile, for when the same is asked again.
        """
        if len(self.units) > _MOST_UNITS:
            rest = sorted(set(available) - set(must))
            return Choice((*must, *rest)[: max(size, 0)], exact=False)
        key = (sum(1 << at for at in available), sum(1 << at for at in must), size)
        found = self._answers.get(key)
        if found is None:
            found = self.divider.choose(available, must, size, quick=True)
            self._remember(key, found)
            if not self._warm:
                self._warm = True
                _later.put((id(self), "warm"), self._warm_up)
            if not found.exact:
                asked = (tuple(available), tuple(must), size)
                _later.put((id(self), key), lambda: self._remember(key, self.divider.choose(*asked)))
        return found

    def _warm_up(self) -> None:
        """What is worked out once for each size, before it is asked for."""
        for size in range(2, len(self.units)) if len(self.units) <= EXACT_GPUS else ():
            self.divider.choose(range(len(self.units)), (), size, quick=True)

    def _remember(self, key: tuple[int, int, int], found: Choice) -> None:
        if len(self._answers) >= _MOST_ANSWERS:
            self._answers = {}
        self._answers[key] = found


_Key = tuple[Resource, Topology, Callable[[Topology], Nearness]]
_machines: list[tuple[_Key, Machine]] = []  # the latest first; only ever replaced as a whole


def machine_of(resource: Resource, topology: Topology, nearness: Callable[[Topology], Nearness]) -> Machine:
    """The machine that these GPUs and links are: the same object while nothing but health has changed."""
    global _machines
    for (old, links, how), machine in _machines:
        if old is resource and links is topology and how is nearness:
            return machine
    units = resource.units
    machine = next(
        (
            same
            for (old, links, how), same in _machines
            if how is nearness and links == topology and old.units == units
        ),
        None,
    ) or Machine(units, nearness(topology))
    _machines = [((resource, topology, nearness), machine), *_machines[: _MOST_MACHINES - 1]]
    return machine
