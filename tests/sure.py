"""What a test goes on from has to be there: narrowed for the type checker, a failure where it isn't."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def sure(found: T | None) -> T:
    """`found`, which must not be None."""
    assert found is not None, "there is None where the test expects something"
    return found
