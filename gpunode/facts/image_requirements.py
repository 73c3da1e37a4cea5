"""The language of NVIDIA_REQUIRE_*: what an image wants of the driver and the GPU it runs on.

Alternatives are divided by spaces, the conditions of one by commas: ``cuda>=12.4 brand=tesla,driver>=535``.
Properties are cuda, driver, arch (a GPU's compute capability) and brand; versions compare number by number,
zeros at the end count for nothing, brands without regard to case. The language is that of libnvidia-container
(dsl.c), which the runtime judges images by.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from gpunode.dataclass import dataclass

VERSIONS = ("cuda", "driver", "arch")
PROPERTIES = (*VERSIONS, "brand")
_CONDITION = re.compile(r"([^<>=!]+)(<=|>=|!=|=|<|>)([^<>=!]+)")
_NUMBERS = re.compile(r"[0-9.]+")
_LONGEST = 20_000  # characters; the longest of NVIDIA's own images has 3,000
_DIGITS = 9


@dataclass(frozen=True)
class Condition:
    """One comparison: ``driver``, ``>=``, ``535``."""

    name: str
    operator: str
    value: str

    def __str__(self) -> str:
        return f"{self.name}{self.operator}{self.value}"


def parse(text: str) -> tuple[tuple[Condition, ...], ...]:
    """Alternatives of conditions. ValueError for what the runtime calls an invalid expression."""
    if len(text) > _LONGEST:
        raise ValueError("longer than any requirement")
    groups = (tuple(map(_condition, filter(None, group.split(",")))) for group in text.split(" "))
    return tuple(filter(None, groups))


def _condition(text: str) -> Condition:
    found = _CONDITION.fullmatch(text)
    name = found[1].lower() if found else ""
    if found is None or name not in PROPERTIES:
        raise ValueError(f"{text!r} is no condition")
    if name in VERSIONS:
        numbers(found[3])
    elif found[2] not in ("=", "!="):
        raise ValueError(f"{text!r}: brands have no order")
    return Condition(name, found[2], found[3])


def numbers(text: str) -> tuple[int, ...]:
    """A version as numbers that compare, without zeros at its end. ValueError if it is none."""
    parts = [part for part in text.split(".") if part]
    if not _NUMBERS.fullmatch(text) or not parts or max(map(len, parts)) > _DIGITS:
        raise ValueError(f"{text!r} is no version")
    found = [int(part) for part in parts]
    while found and found[-1] == 0:
        found.pop()
    return tuple(found)


def satisfied(
    alternatives: Iterable[Iterable[Condition]], facts: Mapping[str, Collection[str]]
) -> bool | None:
    """Whether one alternative holds; None if that can't be told. No alternative at all requires nothing.

    `facts` maps a property to the values that it may have: one where it is known, several or
    none where it isn't.
    """
    answers = [_all(_holds(one, facts.get(one.name, ())) for one in group) for group in alternatives]
    if True in answers or not answers:
        return True
    return None if None in answers else False


def _all(answers: Iterable[bool | None]) -> bool | None:
    told = tuple(answers)
    if False in told:
        return False
    return None if None in told else True


def _holds(condition: Condition, values: Collection[str]) -> bool | None:
    answers = {_compared(condition, value) for value in values}
    return answers.pop() if len(answers) == 1 else None


def _compared(condition: Condition, value: str) -> bool:
    if condition.name == "brand":
        return (value.lower() == condition.value.lower()) == (condition.operator == "=")
    one, other = numbers(value), numbers(condition.value)
    return {
        "=": one == other,
        "!=": one != other,
        "<": one < other,
        "<=": one <= other,
        ">": one > other,
        ">=": one >= other,
    }[condition.operator]
