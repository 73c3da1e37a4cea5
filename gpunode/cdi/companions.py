"""What an engine that is made ready for CDI needs beside its own configuration."""

from __future__ import annotations

from dataclasses import dataclass

from gpunode.cdi import refresh
from gpunode.cdi.build import Form
from gpunode.cdi.document import encode
from gpunode.cdi.generate import Sources, generate
from gpunode.cdi.places import NVIDIA_UNITS, STANDARD, nvidia_refreshes, refuse_conflict, remarks, rivals
from gpunode.cdi.versions import limit
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
    built = generate(host, Sources(), Form(limit=limit(engines)))
    found = rivals(host, STANDARD, built.spec)
    refuse_conflict(found)
    files: list[tuple[str, bytes]] = [(STANDARD, encode(built.spec, "yaml"))]
    notes = [*built.notes, *remarks(found)]
    wanted: tuple[str, ...] = ()
    if units and nvidia_refreshes(host):
        notes.append(
            f"{NVIDIA_UNITS[1]} keeps {STANDARD} fresh here, so no unit of ours is added; to change that: "
            f"systemctl disable --now {' '.join(NVIDIA_UNITS)} && gpunode cdi refresh --install"
        )
    elif units and systemd_runs(host):
        files += refresh.files(host)
        wanted = refresh.UNITS
    elif units:
        notes.append(f"systemd doesn't run here: after a reboot, write {STANDARD} again: gpunode cdi refresh")
    return Companions(tuple(files), frozenset({STANDARD}), wanted, tuple(notes))
