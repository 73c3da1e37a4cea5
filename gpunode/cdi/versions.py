"""Versions of the CDI specification, and which of them each engine reads.

An engine ignores a specification with a cdiVersion that it doesn't know, and all devices in it are then
"unresolvable"; it also refuses one that uses more than its cdiVersion has.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from gpunode.facts.daemons import Daemon
from gpunode.facts.tables import numbers, table

Version = tuple[int, int, int]
NEWEST: Version = (1, 1, 0)  # the newest version that gpunode supports; it writes the lowest sufficient one
OLDEST: Version = (0, 3, 0)
NAMES: Version = (0, 5, 0)  # device names that start with a digit, and hostPath
DOTS: Version = (0, 6, 0)  # in the class of a kind
GROUPS: Version = (0, 7, 0)  # additionalGids
UNKNOWN_ENGINE = NAMES  # an engine of an unknown kind or release is assumed to read this


@cache
def _readers() -> dict[str, tuple[tuple[Version, Version], ...]]:
    """By engine, oldest first: a release, and the specification that it and later ones read."""
    readers: dict[str, tuple[tuple[Version, Version], ...]] = {}
    for row in table("cdi_versions").rows:
        pair = (numbers(row["since"]), numbers(row["reads"]))
        readers[row["engine"]] = (*readers.get(row["engine"], ()), pair)
    return readers


def reads(engine: str, release: tuple[int, ...]) -> Version | None:
    """The newest specification that this release of an engine reads; None if it doesn't support CDI.

    An engine that isn't listed, or of an unknown release, is assumed to read `UNKNOWN_ENGINE`.
    """
    readers = _readers()
    if engine not in readers or not release:
        return UNKNOWN_ENGINE
    padded = (*release, 0, 0)[:3]
    known = [version for since, version in readers[engine] if since <= padded]
    return known[-1] if known else None


def oldest(engine: str) -> Version:
    """The version that the first release of an engine with CDI reads; of an engine that isn't listed as in
    `reads`."""
    return _readers()[engine][0][1] if engine in _readers() else UNKNOWN_ENGINE


def limit(engines: Iterable[Daemon]) -> Version:
    """The newest version that all of these engines read; those without CDI are ignored."""
    versions = (reads(engine.name, engine.version) for engine in engines)
    return min((version for version in versions if version is not None), default=NEWEST)


def text(version: Version) -> str:
    """``0.5.0``."""
    return ".".join(str(number) for number in version)
