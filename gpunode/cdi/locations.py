"""Directories and authors of specifications, and which one an engine uses if two name the same device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gpunode.cdi.build import Built
from gpunode.cdi.spec import Spec, made_by_gpunode
from gpunode.cdi.versions import Version, reads, text
from gpunode.errors import GpunodeError, PreconditionError
from gpunode.facts.cdi import DIRECTORIES, SpecFile, nvidia_specs, stale_edits, stale_parts
from gpunode.facts.daemons import Daemon
from gpunode.facts.driver import loaded_module, version_numbers
from gpunode.facts.systemd import UNIT_DIRECTORIES, read_unit
from gpunode.host import Host
from gpunode.output.result import many

STANDARD = "/var/run/cdi/nvidia.yaml"
NVIDIA_UNITS = ("nvidia-cdi-refresh.path", "nvidia-cdi-refresh.service")


class Rivals(NamedTuple):
    """Other files that name a device which will also be named at `path`.

    `beside` are in the same directory: engines then use neither. `before` are hidden by `path`, `after` hide
    it.
    """

    path: str
    beside: tuple[SpecFile, ...] = ()
    before: tuple[SpecFile, ...] = ()
    after: tuple[SpecFile, ...] = ()


def rivals(host: Host, path: str, spec: Spec, *, elsewhere: bool = False) -> Rivals:
    """Compare with every specification of NVIDIA's kinds here; one that can't be parsed names no device.

    `elsewhere`: `path` is in a directory that only some engine reads; nothing else in it may name a device.
    """
    own = rank(host, path)
    names = {device.name for device in spec.devices}
    sides: dict[str, list[SpecFile]] = {"beside": [], "before": [], "after": []}
    if own is None and not elsewhere:
        return Rivals(path)
    for other in nvidia_specs(host, DIRECTORIES if own is not None else (path.rpartition("/")[0],)):
        if _same(host, other.path, path):
            continue
        if other.kind == spec.kind and names & set(other.names):
            place = rank(host, other.path)
            beside = own is None or place is None or place == own
            side = "beside" if beside else "before" if (place or 0) < (own or 0) else "after"
            sides[side].append(other)
    return Rivals(path, *(tuple(sides[side]) for side in ("beside", "before", "after")))


def rank(host: Host, path: str, directories: Sequence[str] = DIRECTORIES) -> int | None:
    """A directory's position in the engines' order, the later one wins; None if engines don't read it."""
    directory = host.realpath(path.rpartition("/")[0] or "/")
    real = [host.realpath(directory) for directory in directories]
    return real.index(directory) if directory in real else None


def _same(host: Host, path: str, other_path: str) -> bool:
    split = [path.rpartition("/") for path in (path, other_path)]
    return split[0][2] == split[1][2] and host.realpath(split[0][0]) == host.realpath(split[1][0])


def refuse_conflict(others: Rivals) -> None:
    """`PreconditionError` where a second file would make the devices of both unusable."""
    if others.beside:
        other = others.beside[0].path
        raise PreconditionError(
            f"{other} defines the same devices; with a second file beside it engines would use neither",
            hint=f"remove it: rm {other}, or write over it: gpunode cdi generate --output-file {other}",
            code="cdi-conflict",
        )


def remarks(others: Rivals) -> tuple[str, ...]:
    """Warnings about the other files."""
    if len(others.before) > 1:
        # CDI's cache drops a device that two files of one directory have, regardless of later directories
        paths = " and ".join(other.path for other in others.before)
        return (
            f"{paths} define the same devices: engines use none of them, not even those in {others.path}; "
            f"remove all but one: rm {others.before[0].path}",
        )
    hidden = (
        f"{other.path} defines the same devices: {others.path} wins, but what only it names stays; "
        f"remove it if it is old: rm {other.path}"
        for other in others.before
    )
    hiding = (
        f"{other.path} defines the same devices and wins over {others.path}; remove it: rm {other.path}"
        for other in others.after
    )
    return (*hidden, *hiding)


def nvidia_refreshes(host: Host) -> bool:
    """Whether NVIDIA's own service is enabled here: it writes `STANDARD`, and two services would overwrite
    each other."""
    links = (
        f"{place}/{target}.target.wants/{unit}"
        for place in UNIT_DIRECTORIES
        for target in ("multi-user", "paths")
        for unit in NVIDIA_UNITS
    )
    try:
        there = any(host.is_symlink(link) for link in links)
    except GpunodeError:
        return False
    return there and read_unit(host, NVIDIA_UNITS[1]) is not None


def nvidia_keeps(host: Host, built: Built, limit: Version) -> bool:
    """Whether NVIDIA's own service writes `STANDARD` and the file there is right: it has every device of
    `built`, in a version that all engines here read, and nothing in it is stale. A file of ours would then
    only last until its next run.
    """
    if not nvidia_refreshes(host) or made_by_gpunode(host.read_bytes(STANDARD)):
        return False
    spec = next((spec for spec in nvidia_specs(host) if spec.path == STANDARD), None)
    if spec is None or spec.problem or spec.kind != built.spec.kind:
        return False
    names = {device.name for device in built.spec.devices}
    if not names <= set(spec.names) or version_numbers(spec.version) > limit:
        return False
    module = loaded_module(host)
    return not any(stale_parts(host, spec, module.version if module else "", built.gpus))


# How engines read the specifications on this node: which file each device comes from, and why others aren't
# used.


class FileState(NamedTuple):
    """One file. `author` is gpunode or empty; `problem` is why some engine here doesn't read it."""

    path: str
    kind: str
    cdi_version: str
    author: str
    problem: str


class ListedDevice(NamedTuple):
    """One device of one file by its qualified name.

    `state` is usable; hidden, when another file wins; conflict, when two files of one directory have it; or
    stale, when something that it needs doesn't exist. `reason` has the details.
    """

    name: str
    path: str
    state: str
    reason: str = ""


def files(host: Host, specs: Iterable[SpecFile], engines: Sequence[Daemon]) -> tuple[FileState, ...]:
    """Every file with its problem."""
    return tuple(
        FileState(spec.path, spec.kind, spec.version, _author(host, spec.path), _problem(spec, engines))
        for spec in specs
    )


def _author(host: Host, path: str) -> str:
    try:
        return "gpunode" if made_by_gpunode(host.read_bytes(path)) else ""
    except GpunodeError:
        return ""


def _problem(spec: SpecFile, engines: Sequence[Daemon]) -> str:
    if spec.problem:
        return spec.problem
    version = version_numbers(spec.version)
    for engine in engines:
        known = reads(engine.name, engine.version)
        if known is not None and known < version:
            release = engine.release or "of unknown release"
            return f"{engine.name} {release} reads CDI up to {text(known)}, this is {spec.version}"
    return ""


def listed(
    host: Host, specs: Sequence[SpecFile], driver: str = "", directories: Sequence[str] = DIRECTORIES
) -> tuple[ListedDevice, ...]:
    """Every device of every file, in the order of files; `driver` is the loaded module's version."""
    owners: dict[str, list[SpecFile]] = {}
    for spec in specs:
        for name in spec.names:
            owners.setdefault(f"{spec.kind}={name}", []).append(spec)
    common = {spec.path: tuple(stale_edits(host, spec.edits, driver)) for spec in specs}
    listing = []
    for spec in specs:
        for device in spec.devices:
            stale = (*common[spec.path], *stale_edits(host, device.edits, driver))
            listing.append(
                _listed_device(host, f"{spec.kind}={device.name}", spec, owners, stale, directories)
            )
    return tuple(listing)


def _listed_device(
    host: Host,
    name: str,
    spec: SpecFile,
    all_owners: Mapping[str, Sequence[SpecFile]],
    stale: tuple[str, ...],
    directories: Sequence[str],
) -> ListedDevice:
    """CDI's cache drops a device that one directory has twice, even where a later directory has it too."""
    owners = all_owners[name]
    ranks = [rank(host, owner.path, directories) or 0 for owner in owners]
    for place in ranks:
        if ranks.count(place) > 1:
            paths = [
                owner.path for owner, other_rank in zip(owners, ranks, strict=True) if other_rank == place
            ]
            return ListedDevice(name, spec.path, "conflict", " and ".join(dict.fromkeys(paths)))
    winner = max(zip(ranks, owners, strict=True), key=lambda pair: pair[0])[1]
    if winner is not spec:
        return ListedDevice(name, spec.path, "hidden", f"{winner.path} wins")
    if stale:
        more = f"; {many(len(stale) - 1, 'more outdated part')}" if len(stale) > 1 else ""
        return ListedDevice(name, spec.path, "stale", stale[0] + more)
    return ListedDevice(name, spec.path, "usable")
