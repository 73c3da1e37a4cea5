"""A value that must exist: narrowed for the type checker, a test failure if it is None."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def required(value: T | None) -> T:
    """`value`, which must not be None."""
    assert value is not None, "the test requires a value and got None"
    return value
