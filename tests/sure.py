"""A value that must exist: narrowed for the type checker, a test failure if it is None."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def sure(found: T | None) -> T:
    """`value`, which must not be None."""
    assert found is not None, "the test requires a value and got None"
    return found
