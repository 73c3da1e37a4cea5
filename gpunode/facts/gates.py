"""Which release of a program can do what, from the reference table."""

from __future__ import annotations

from gpunode.tables import numbers, table

TABLE = "version_gates"


def can(component: str, gate: str, version: tuple[int, ...]) -> bool | None:
    """Whether this release has it; None if its version isn't known.

    Where several release lines got it, one counts for its own line (1.7.30: 1.7 from .30 on), the newest for
    everything after it.
    """
    if not version:
        return None
    lines = sorted(numbers(one) for one in _since(component, gate))
    whole = (*version, 0, 0)  # a release may have fewer numbers than the table
    return whole >= lines[-1] or any(whole[:2] == line[:2] and whole >= line for line in lines)


def first(component: str, gate: str) -> str:
    """The releases that brought it, for people: ``1.7.30 or 2.1.0``."""
    return " or ".join(_since(component, gate))


def _since(component: str, gate: str) -> tuple[str, ...]:
    rows = table(TABLE).rows
    return tuple(row["since"] for row in rows if (row["component"], row["gate"]) == (component, gate))
