"""Which release of an engine can do what, from the reference table."""

from __future__ import annotations

from gpunode.tables import table

TABLE = "engine_gates"


def can(engine: str, feature: str, version: tuple[int, ...]) -> bool | None:
    """Whether this release has the feature; None if its version isn't known.

    Where several release lines got it, one counts for its own line (1.7.30: 1.7 from .30 on), the newest for
    everything after it.
    """
    if not version:
        return None
    lines = sorted(_parsed(one) for one in _since(engine, feature))
    if version >= lines[-1]:
        return True
    return any(version[:2] == line[:2] and version >= line for line in lines)


def first(engine: str, feature: str) -> str:
    """The releases that brought it, for people: ``1.7.30 or 2.1``."""
    return " or ".join(_since(engine, feature))


def _since(engine: str, feature: str) -> tuple[str, ...]:
    rows = table(TABLE).rows
    return tuple(next(row["since"] for row in rows if (row["engine"], row["feature"]) == (engine, feature)))


def _parsed(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
