"""The container engines of this node, and the limits that they set for a specification."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gpunode.cdi import refresh
from gpunode.cdi.build import Form, Sources, generate
from gpunode.cdi.locations import (
    NVIDIA_UNITS,
    STANDARD,
    nvidia_keeps,
    nvidia_refreshes,
    refuse_conflict,
    remarks,
    rivals,
)
from gpunode.cdi.nodes import need_groups
from gpunode.cdi.spec import encode, made_by_gpunode
from gpunode.cdi.versions import DOTS, GROUPS, NEWEST, UNKNOWN_ENGINE, Version, limit, oldest
from gpunode.errors import GpunodeError
from gpunode.facts.cdi import unlisted
from gpunode.facts.daemons import Daemon, find_daemon
from gpunode.facts.effective import engine_settings
from gpunode.facts.podman import CONFIG
from gpunode.facts.registry import ENGINES
from gpunode.host import Host


def installed(host: Host, names: Iterable[str] = tuple(sorted(ENGINES))) -> tuple[Daemon, ...]:
    """The named engines that are installed; one whose files can't be read doesn't hide the others."""
    result = []
    for name in names:
        try:
            daemon = find_daemon(name, host)
        except GpunodeError:
            continue
        if daemon is not None:
            result.append(daemon)
    return tuple(result)


def specification_paths(host: Host, engines: Iterable[Daemon]) -> tuple[str, ...]:
    """`STANDARD`, and the same file in the last directory of each engine that doesn't read that one."""
    paths = [STANDARD]
    standard, _, name = STANDARD.rpartition("/")  # the last of the default directories
    for engine in engines:
        listed = [place.rstrip("/") for place in engine_settings(host, engine).cdi_directories]
        directories = [place for place in listed if place.startswith("/")]
        if directories and standard in unlisted(directories):
            paths.append(f"{directories[-1]}/{name}")
    return tuple(dict.fromkeys(paths))


def kept_elsewhere(host: Host) -> tuple[str, ...]:
    """gpunode's own specifications in directories that only some engine here reads."""
    # podman's files have fixed paths; finding it would start its program, for a release that doesn't matter
    podman = Daemon("podman", None, (), CONFIG, "", "", None)
    engines = (*installed(host, [name for name in sorted(ENGINES) if name != "podman"]), podman)
    paths = specification_paths(host, engines)[1:]
    return tuple(path for path in paths if made_by_gpunode(host.read_bytes(path)))


def readable(host: Host, dev_root: str = "", *, dots: bool = False) -> Version:
    """The newest specification that all engines of this node read; with `dots` its class has one.

    Only engines with a release that doesn't read the newest version whose features this node uses are
    queried: running a program for its version takes as long as everything else.
    """
    used = GROUPS if need_groups(host, dev_root.rstrip("/")) else DOTS if dots else UNKNOWN_ENGINE
    matter = [name for name in sorted(ENGINES) if oldest(name) < used]
    return limit(installed(host, matter)) if matter else NEWEST


# What an engine needs for CDI in addition to its own configuration.


class EngineFiles(NamedTuple):
    """Files as path and content. A refresh rewrites the `generated` ones; `units` are those to enable."""

    files: tuple[tuple[str, bytes], ...] = ()
    generated: frozenset[str] = frozenset()
    units: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def engine_files(host: Host, engines: tuple[Daemon, ...], *, units: bool) -> EngineFiles:
    """The specification that all of `engines` read, and where systemd runs the units that keep it up to date.

    `GpunodeError` if the GPUs can't be described or another file already defines them in the same directory.
    """
    newest = min(limit(engines), readable(host))
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
    by_nvidia = nvidia_keeps(host, built, newest)
    if by_nvidia:
        notes.append(f"{NVIDIA_UNITS[1]} keeps {STANDARD}, which has all devices")
        if not elsewhere:
            return EngineFiles(notes=tuple(notes))
    files: list[tuple[str, bytes]] = [*([] if by_nvidia else [(STANDARD, data)]), *elsewhere]
    generated = frozenset(path for path, _ in files)
    enabled_units: tuple[str, ...] = ()
    if by_nvidia:
        notes.append(f"{NVIDIA_UNITS[1]} doesn't write {elsewhere[0][0]}: run gpunode cdi refresh after it")
    elif nvidia_refreshes(host):
        notes.append(
            f"{NVIDIA_UNITS[1]} will write {STANDARD} again, as it was: not every engine can use that; "
            f"systemctl disable --now {' '.join(NVIDIA_UNITS)} && gpunode cdi refresh --install"
        )
    elif units and host.systemd_runs():
        files += refresh.files(host, [_directory(path) for path in paths[1:]])
        enabled_units = refresh.UNITS
    elif units:
        notes.append(f"systemd doesn't run here: after a reboot, write {STANDARD} again: gpunode cdi refresh")
    return EngineFiles(tuple(files), generated, enabled_units, tuple(notes))


def _directory(path: str) -> str:
    return path.rpartition("/")[0]
