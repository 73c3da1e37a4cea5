"""The vector-add of a node that isn't there: for recorded and simulated machines, on this machine's CPU."""

from __future__ import annotations

import operator
import time
from array import array
from collections.abc import Iterable, Iterator

from gpunode.dataclass import replace
from gpunode.gpu.vectors import DeviceResult, expected, inputs, judge

NOTICE = "simulated: computed on the CPU"


def vector_add(devices: Iterable[tuple[int, str, str]]) -> Iterator[DeviceResult]:
    """For each device (index, UUID, name) the sums that it would compute, computed and compared for real.

    `message` says that it is simulated; `milliseconds` are this machine's.
    """
    (left, right), want = inputs(), expected()
    for index, uuid, name in devices:
        start = time.perf_counter()
        got = array("f", map(operator.add, left, right))
        milliseconds = (time.perf_counter() - start) * 1000
        yield replace(judge(index, uuid, name, got, want, milliseconds), message=NOTICE)
