"""Reference tables: published facts, such as security bulletins and minimum versions, with a date.

Each is a JSON file beside this one: ``{"source": [addresses], "date": "YYYY-MM-DD", "about": a sentence,
"rows": [...]}``. The date is when the file was compared with its sources. Later publications aren't in it, so
no version may be called up to date because of a table.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

OLD_DAYS = 180
"""Beyond this age reports say that newer bulletins aren't known."""

_HERE = Path(__file__).parent
_DAY_SECONDS = 86400


class ReferenceTable(NamedTuple):
    """One file. `date` is ``YYYY-MM-DD``; `rows` are as in the file: objects, or what its ``about`` says."""

    name: str
    source: tuple[str, ...]
    date: str
    rows: tuple[Any, ...]

    def age_days(self, now: float) -> int:
        """Whole days from its date until `now`, seconds since the epoch; 0 for a clock that is behind."""
        from datetime import datetime, timezone

        timestamp = datetime.fromisoformat(self.date).replace(tzinfo=timezone.utc).timestamp()
        return max(0, int((now - timestamp) // _DAY_SECONDS))


@cache
def table(name: str) -> ReferenceTable:
    """The table in NAME.json."""
    tree = json.loads((_HERE / f"{name}.json").read_text())
    return ReferenceTable(name, tuple(tree["source"]), tree["date"], tuple(tree["rows"]))


def all_tables() -> tuple[ReferenceTable, ...]:
    """Every existing table, by name."""
    return tuple(table(path.stem) for path in sorted(_HERE.glob("*.json")))


def numbers(version: str) -> tuple[int, int, int]:
    """``1.17.8`` as numbers that compare; missing parts of a release are 0."""
    first, second, third = (*map(int, version.split(".")), 0, 0)[:3]
    return first, second, third


@cache
def gate(component: str, name: str) -> tuple[int, int, int]:
    """The first release of a program that has a feature, by version_gates.json."""
    return numbers(_since(component, name)[0])


# Features of a program's releases, from the reference table.

TABLE = "version_gates"


def can(component: str, gate: str, version: tuple[int, ...]) -> bool | None:
    """Whether this release has it; None if its version isn't known.

    If several release lines have it, each release counts for its own line (1.7.30: 1.7 from .30 on), the
    newest for everything after it.
    """
    if not version:
        return None
    lines = sorted(numbers(value) for value in _since(component, gate))
    whole = (*version, 0, 0)  # a release may have fewer numbers than the table
    return whole >= lines[-1] or any(whole[:2] == line[:2] and whole >= line for line in lines)


def first(component: str, gate: str) -> str:
    """The releases that introduced it, for people: ``1.7.30 or 2.1.0``."""
    return " or ".join(_since(component, gate))


def _since(component: str, gate: str) -> tuple[str, ...]:
    rows = table(TABLE).rows
    return tuple(row["since"] for row in rows if (row["component"], row["gate"]) == (component, gate))
