"""Which version a specification needs, and which ones an engine reads.

An engine ignores a specification whose cdiVersion it doesn't know, and all devices in it are then
"unresolvable"; it also refuses one that uses more than its cdiVersion has.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from gpunode.cdi.model import NEWEST, Edits, Spec, Version
from gpunode.facts.daemons import Daemon
from gpunode.tables import numbers, table

OLDEST: Version = (0, 3, 0)
_NAMES: Version = (0, 5, 0)
DOTS: Version = (0, 6, 0)
GROUPS: Version = (0, 7, 0)  # additionalGids
UNKNOWN_ENGINE = _NAMES  # an engine of an unknown kind or release is taken to read this


@cache
def _readers() -> dict[str, tuple[tuple[Version, Version], ...]]:
    """By engine, oldest first: a release, and the specification that it and later ones read."""
    found: dict[str, tuple[tuple[Version, Version], ...]] = {}
    for row in table("cdi_versions").rows:
        pair = (numbers(row["since"]), numbers(row["reads"]))
        found[row["engine"]] = (*found.get(row["engine"], ()), pair)
    return found


def reads(engine: str, release: tuple[int, ...]) -> Version | None:
    """The newest specification that this release of an engine reads; None if it knows no CDI.

    An engine that isn't listed, or of which the release is unknown, is taken to read `UNKNOWN_ENGINE`.
    """
    readers = _readers()
    if engine not in readers or not release:
        return UNKNOWN_ENGINE
    padded = (*release, 0, 0)[:3]
    known = [version for since, version in readers[engine] if since <= padded]
    return known[-1] if known else None


def oldest(engine: str) -> Version:
    """What the first release of an engine with CDI reads."""
    return _readers()[engine][0][1]


def limit(engines: Iterable[Daemon]) -> Version:
    """The newest version that all of these engines read; those without CDI don't count, they read none."""
    versions = (reads(engine.name, engine.version) for engine in engines)
    return min((version for version in versions if version is not None), default=NEWEST)


def needed(spec: Spec) -> Version:
    """The lowest version that has everything in `spec`, by CDI's own rules (`MinimumRequiredVersion`)."""
    edits = (spec.edits, *(device.edits for device in spec.devices))
    if any(edit.gids for edit in edits):
        return GROUPS
    if "." in spec.kind.partition("/")[2]:
        return DOTS
    digits = any(not device.name[:1].isalpha() for device in spec.devices)
    return _NAMES if digits or any(_other_path(edit) for edit in edits) else OLDEST


def _other_path(edits: Edits) -> bool:
    return any(node.host_path for node in edits.nodes)


def text(version: Version) -> str:
    """``0.5.0``."""
    return ".".join(str(number) for number in version)
