"""The container engines of this node, as far as they limit what a specification may be."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gpunode.cdi.model import NEWEST, Version
from gpunode.cdi.nodes import need_groups
from gpunode.cdi.versions import DOTS, GROUPS, UNKNOWN_ENGINE, limit, oldest
from gpunode.errors import GpunodeError
from gpunode.facts.containerd import find_containerd
from gpunode.facts.crio import find_crio
from gpunode.facts.daemons import Daemon
from gpunode.facts.docker import find_docker
from gpunode.facts.podman import find_podman
from gpunode.host import Host

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
