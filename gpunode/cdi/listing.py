"""What engines make of the specifications on this node: which device comes from which file, and why not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gpunode.cdi.document import made_by_gpunode
from gpunode.cdi.places import rank
from gpunode.cdi.versions import reads, text
from gpunode.dataclass import dataclass
from gpunode.errors import GpunodeError
from gpunode.facts.cdi import DIRECTORIES, CdiSpec, stale_edits
from gpunode.facts.daemons import Daemon
from gpunode.facts.driver import version_numbers
from gpunode.host import Host


@dataclass(frozen=True)
class FileState:
    """One file. `author` is gpunode or empty; `problem` is why some engine here doesn't read it."""

    path: str
    kind: str
    cdi_version: str
    author: str
    problem: str


@dataclass(frozen=True)
class ListedDevice:
    """One device of one file by its qualified name.

    `state` is usable; hidden, when another file wins; conflict, when two files of one directory have it; or
    stale, when something that it needs isn't there. `reason` says which.
    """

    name: str
    path: str
    state: str
    reason: str = ""


def files(host: Host, specs: Iterable[CdiSpec], engines: Sequence[Daemon]) -> tuple[FileState, ...]:
    """Every file with what is wrong with it."""
    return tuple(
        FileState(spec.path, spec.kind, spec.version, _author(host, spec.path), _problem(spec, engines))
        for spec in specs
    )


def _author(host: Host, path: str) -> str:
    try:
        return "gpunode" if made_by_gpunode(host.read_bytes(path)) else ""
    except GpunodeError:
        return ""


def _problem(spec: CdiSpec, engines: Sequence[Daemon]) -> str:
    if spec.problem:
        return spec.problem
    version = version_numbers(spec.version)
    for engine in engines:
        known = reads(engine.name, engine.version)
        if known is not None and known < version:
            release = ".".join(map(str, engine.version)) or "of unknown release"
            return f"{engine.name} {release} reads CDI up to {text(known)}, this is {spec.version}"
    return ""


def listed(
    host: Host, specs: Sequence[CdiSpec], driver: str = "", directories: Sequence[str] = DIRECTORIES
) -> tuple[ListedDevice, ...]:
    """Every device of every file, in the order of files; `driver` is the loaded module's version."""
    owners: dict[str, list[CdiSpec]] = {}
    for spec in specs:
        for name in spec.names:
            owners.setdefault(f"{spec.kind}={name}", []).append(spec)
    common = {spec.path: tuple(stale_edits(host, spec.edits, driver)) for spec in specs}
    listing = []
    for spec in specs:
        for device in spec.devices:
            stale = (*common[spec.path], *stale_edits(host, device.edits, driver))
            listing.append(_one(host, f"{spec.kind}={device.name}", spec, owners, stale, directories))
    return tuple(listing)


def _one(
    host: Host,
    name: str,
    spec: CdiSpec,
    all_owners: Mapping[str, Sequence[CdiSpec]],
    stale: tuple[str, ...],
    directories: Sequence[str],
) -> ListedDevice:
    """CDI's cache drops a device that one directory has twice, even where a later directory has it too."""
    owners = all_owners[name]
    ranks = [rank(host, owner.path, directories) or 0 for owner in owners]
    for place in ranks:
        if ranks.count(place) > 1:
            paths = [owner.path for owner, other in zip(owners, ranks, strict=True) if other == place]
            return ListedDevice(name, spec.path, "conflict", " and ".join(dict.fromkeys(paths)))
    winner = max(zip(ranks, owners, strict=True), key=lambda pair: pair[0])[1]
    if winner is not spec:
        return ListedDevice(name, spec.path, "hidden", f"{winner.path} wins")
    if stale:
        more = f" and {len(stale) - 1} more" if len(stale) > 1 else ""
        return ListedDevice(name, spec.path, "stale", f"{stale[0]}{more}")
    return ListedDevice(name, spec.path, "usable")
