"""The container engines of this node, as far as they limit what a specification may be."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gpunode.cdi.document import made_by_gpunode
from gpunode.cdi.model import NEWEST, Version
from gpunode.cdi.nodes import need_groups
from gpunode.cdi.places import STANDARD
from gpunode.cdi.versions import DOTS, GROUPS, UNKNOWN_ENGINE, limit, oldest
from gpunode.errors import GpunodeError
from gpunode.facts.configured import configured
from gpunode.facts.containerd import find_containerd
from gpunode.facts.crio import find_crio
from gpunode.facts.daemons import Daemon
from gpunode.facts.docker import find_docker
from gpunode.facts.podman import find_podman
from gpunode.host import Host

_STANDARD_REAL = "/run/cdi"  # /var/run leads to /run
_FINDERS: dict[str, Callable[[Host], Daemon | None]] = {
    "containerd": find_containerd,
    "crio": find_crio,
    "docker": find_docker,
    "podman": find_podman,
}


def installed(host: Host, names: Iterable[str] = tuple(_FINDERS)) -> tuple[Daemon, ...]:
    """Those of the named engines that are here; one whose files can't be read doesn't hide the others."""
    found = []
    for name in names:
        try:
            daemon = _FINDERS[name](host)
        except GpunodeError:
            continue
        if daemon is not None:
            found.append(daemon)
    return tuple(found)


def specification_paths(host: Host, engines: Iterable[Daemon]) -> tuple[str, ...]:
    """`STANDARD`, and the same file in the last directory of each engine that doesn't read that one."""
    paths = [STANDARD]
    standard, _, name = STANDARD.rpartition("/")
    for engine in engines:
        listed = [place.rstrip("/") for place in configured(host, engine).cdi_directories]
        directories = [place for place in listed if place.startswith("/")]
        if directories and not {standard, _STANDARD_REAL} & set(directories):
            paths.append(f"{directories[-1]}/{name}")
    return tuple(dict.fromkeys(paths))


def kept_elsewhere(host: Host) -> tuple[str, ...]:
    """Specifications of gpunode's own in directories that only some engine here reads."""
    paths = specification_paths(host, installed(host))[1:]
    return tuple(path for path in paths if made_by_gpunode(host.read_bytes(path)))


def newest_used(host: Host, dev_root: str = "", *, dots: bool = False) -> Version:
    """The newest version that a specification of this node makes use of, where engines read it."""
    if need_groups(host, dev_root.rstrip("/")):
        return GROUPS
    return DOTS if dots else UNKNOWN_ENGINE


def readable(host: Host, wanted: Version) -> Version:
    """The newest specification that all engines of this node read.

    Only engines are asked of which some release doesn't read `wanted`: a program that says its version takes
    as long as all the rest.
    """
    matter = [name for name in _FINDERS if oldest(name) < wanted]
    return limit(installed(host, matter)) if matter else NEWEST
