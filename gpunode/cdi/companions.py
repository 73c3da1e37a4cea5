"""What an engine that is made ready for CDI needs beside its own configuration."""

from __future__ import annotations

from gpunode.cdi import refresh
from gpunode.cdi.build import Form
from gpunode.cdi.document import encode
from gpunode.cdi.engines import newest_used, readable, specification_paths
from gpunode.cdi.generate import Sources, generate
from gpunode.cdi.places import (
    NVIDIA_UNITS,
    STANDARD,
    nvidia_keeps,
    nvidia_refreshes,
    refuse_conflict,
    remarks,
    rivals,
)
from gpunode.cdi.versions import limit
from gpunode.dataclass import dataclass
from gpunode.facts.daemons import Daemon, systemd_runs
from gpunode.host import Host


@dataclass(frozen=True)
class Companions:
    """Files as path and content. A refresh rewrites the `generated` ones; `units` are to be enabled."""

    files: tuple[tuple[str, bytes], ...] = ()
    generated: frozenset[str] = frozenset()
    units: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def companions(host: Host, engines: tuple[Daemon, ...], *, units: bool) -> Companions:
    """The specification that all of `engines` read, and where systemd runs what keeps it fresh.

    `GpunodeError` if the GPUs can't be described or another file already defines them in the same directory.
    """
    newest = min(limit(engines), readable(host, newest_used(host)))
    built = generate(host, Sources(), Form(limit=newest))
    paths = specification_paths(host, engines)
    notes = [*built.notes]
    for path in paths:
        conflicts = rivals(host, path, built.spec, elsewhere=path != STANDARD)
        refuse_conflict(conflicts)
        notes += remarks(conflicts)
    data = encode(built.spec, "yaml")
    elsewhere = [(path, data) for path in paths[1:]]
    notes += [
        f"an engine reads CDI specifications in {_directory(path)} and not in"
        f" {_directory(STANDARD)}: {path} is written as well"
        for path in paths[1:]
    ]
    kept = nvidia_keeps(host, built, newest)
    if kept:
        notes.append(f"{NVIDIA_UNITS[1]} keeps {STANDARD}, which has all devices")
        if not elsewhere:
            return Companions(notes=tuple(notes))
    files: list[tuple[str, bytes]] = [*([] if kept else [(STANDARD, data)]), *elsewhere]
    generated = frozenset(path for path, _ in files)
    wanted: tuple[str, ...] = ()
    if kept:
        notes.append(f"{NVIDIA_UNITS[1]} doesn't write {elsewhere[0][0]}: run gpunode cdi refresh after it")
    elif nvidia_refreshes(host):
        notes.append(
            f"{NVIDIA_UNITS[1]} will write {STANDARD} again, as it was: not every engine can use that; "
            f"systemctl disable --now {' '.join(NVIDIA_UNITS)} && gpunode cdi refresh --install"
        )
    elif units and systemd_runs(host):
        files += refresh.files(host, [_directory(path) for path in paths[1:]])
        wanted = refresh.UNITS
    elif units:
        notes.append(f"systemd doesn't run here: after a reboot, write {STANDARD} again: gpunode cdi refresh")
    return Companions(tuple(files), generated, wanted, tuple(notes))


def _directory(path: str) -> str:
    return path.rpartition("/")[0]
