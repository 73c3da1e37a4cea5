"""Which version a specification needs, and which ones an engine reads.

An engine ignores a specification whose cdiVersion it doesn't know, and all devices in it are then
"unresolvable"; it also refuses one that uses more than its cdiVersion has.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpunode.cdi.model import NEWEST, Edits, Spec, Version
from gpunode.facts.daemons import Daemon

OLDEST: Version = (0, 3, 0)
_NAMES: Version = (0, 5, 0)
_DOTS: Version = (0, 6, 0)

# First release of each engine that reads a version of the specification: `CurrentVersion` of the
# container-device-interface package that the engine's tag vendors. An older branch's fix release may read
# more than a newer branch's first one (docker 25.0.17 and 26.0.0), so branches are listed where that is so.
_READS: dict[str, tuple[tuple[tuple[int, ...], Version], ...]] = {
    "containerd": (
        ((1, 7, 0), (0, 5, 0)),
        ((1, 7, 12), (0, 6, 0)),
        ((1, 7, 16), (0, 7, 0)),
        ((1, 7, 27), (0, 8, 0)),
        ((2, 0, 0), (0, 8, 0)),
        ((2, 0, 5), (1, 0, 0)),
        ((2, 1, 0), (1, 0, 0)),
        ((2, 2, 0), (1, 0, 0)),
        ((2, 2, 1), (1, 1, 0)),
        ((2, 3, 0), (1, 1, 0)),
    ),
    "docker": (
        ((25, 0, 0), (0, 6, 0)),
        ((25, 0, 17), (0, 8, 0)),
        ((26, 0, 0), (0, 6, 0)),
        ((26, 1, 0), (0, 7, 0)),
        ((27, 4, 0), (0, 8, 0)),
        ((28, 1, 0), (1, 0, 0)),
        ((29, 2, 0), (1, 1, 0)),
    ),
    "podman": (
        ((4, 1, 0), (0, 4, 0)),
        ((4, 3, 0), (0, 5, 0)),
        ((4, 7, 0), (0, 6, 0)),
        ((5, 1, 0), (0, 7, 0)),
        ((5, 2, 0), (0, 8, 0)),
        ((5, 5, 0), (1, 0, 0)),
    ),
    "crio": (
        ((1, 24, 0), (0, 3, 0)),
        ((1, 25, 0), (0, 5, 0)),
        ((1, 28, 0), (0, 6, 0)),
        ((1, 30, 0), (0, 7, 0)),
        ((1, 31, 0), (0, 8, 0)),
        ((1, 33, 0), (1, 0, 0)),
        ((1, 35, 0), (1, 1, 0)),
    ),
}


def reads(engine: str, release: tuple[int, ...]) -> Version | None:
    """The newest specification that this release of an engine reads; None if it knows no CDI.

    An engine that isn't listed, or that doesn't tell its release, is taken to read what all listed ones do.
    """
    if engine not in _READS or not release:
        return _NAMES
    padded = (*release, 0, 0)[:3]
    known = [version for since, version in _READS[engine] if since <= padded]
    return known[-1] if known else None


def oldest(engine: str) -> Version:
    """What the first release of an engine with CDI reads."""
    return _READS[engine][0][1]


def limit(engines: Iterable[Daemon]) -> Version:
    """The newest version that all of these engines read; those without CDI don't count, they read none."""
    versions = (reads(engine.name, engine.version) for engine in engines)
    return min((version for version in versions if version is not None), default=NEWEST)


def needed(spec: Spec) -> Version:
    """The lowest version that has everything in `spec`, by CDI's own rules (`MinimumRequiredVersion`)."""
    if "." in spec.kind.partition("/")[2]:
        return _DOTS
    digits = any(not device.name[:1].isalpha() for device in spec.devices)
    edits = (spec.edits, *(device.edits for device in spec.devices))
    return _NAMES if digits or any(_other_path(edit) for edit in edits) else OLDEST


def _other_path(edits: Edits) -> bool:
    return any(node.host_path for node in edits.nodes)


def text(version: Version) -> str:
    """``0.5.0``."""
    return ".".join(str(number) for number in version)
