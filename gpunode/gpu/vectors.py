"""The sum that a GPU must get right, and how its answer is judged. Standard library only."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from functools import cache

ELEMENTS = 1 << 20


@dataclass(frozen=True)
class DeviceResult:
    """What became of one device. `status` is ok, fail, timeout or skip; `message` says why it isn't ok.

    `max_error` is the largest difference from the right sum, None if nothing was compared or a value was no
    number. `milliseconds` is the kernel's time from launch to end, without compilation and copies.
    """

    index: int
    uuid: str
    name: str
    elements: int = 0
    max_error: float | None = None
    milliseconds: float = 0.0
    status: str = "ok"
    message: str = ""


@cache
def inputs() -> tuple[array[float], array[float]]:
    """Two vectors of `ELEMENTS` float32.

    All values and all sums differ from one another and are exact in float32 (multiples of 1/4 below 2^21), so
    a swapped, stale or missing element can't hide and the right answer has no error at all. Made once, for
    all callers: nobody may change them.
    """
    return array("f", range(ELEMENTS)), array("f", [0.5 * i + 0.25 for i in range(ELEMENTS)])


@cache
def expected() -> array[float]:
    """The right sums; made once, as `inputs` are."""
    return array("f", [1.5 * i + 0.25 for i in range(ELEMENTS)])


def largest_error(got: array[float], want: array[float]) -> float | None:
    """The largest absolute difference of two equally long vectors; None if a value is no finite number."""
    if memoryview(got) == memoryview(want):  # as arrays they are compared ten times as slowly
        return 0.0
    errors = [abs(left - right) for left, right in zip(got, want, strict=True)]
    return None if any(map(math.isnan, errors)) or math.inf in errors else max(errors)


def judge(
    index: int, uuid: str, name: str, got: array[float], want: array[float], milliseconds: float
) -> DeviceResult:
    """Compare a device's answer element by element with the right one, `want`."""
    error = largest_error(got, want)
    if error == 0.0:
        return DeviceResult(index, uuid, name, len(got), error, milliseconds)
    wrong = [i for i, (left, right) in enumerate(zip(got, want, strict=True)) if left != right]
    first = wrong[0]
    message = (
        f"{len(wrong)} of {len(got)} sums are wrong, the first at {first}: {got[first]!r} instead of"
        f" {want[first]!r}; the GPU or its memory is faulty"
    )
    return DeviceResult(index, uuid, name, len(got), error, milliseconds, "fail", message)
