"""The vector-add of a node that isn't there: for recorded and simulated machines, on this machine's CPU."""

from __future__ import annotations

import dataclasses
import operator
import time
from array import array

from gpunode.gpu.vectors import DeviceResult, inputs, judge

NOTICE = "simulated: computed on the CPU"


def vector_add(index: int, uuid: str, name: str) -> DeviceResult:
    """The sums that a GPU would compute, computed and compared for real; `message` says where."""
    left, right = inputs()
    start = time.perf_counter()
    got = array("f", map(operator.add, left, right))
    milliseconds = (time.perf_counter() - start) * 1000
    return dataclasses.replace(judge(index, uuid, name, got, milliseconds), message=NOTICE)
