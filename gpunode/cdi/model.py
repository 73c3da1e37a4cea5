"""The nouns of a CDI specification, limited to what gpunode writes (CDI's SPEC.md has the whole format)."""

from __future__ import annotations

from gpunode.dataclass import dataclass

Version = tuple[int, int, int]
NEWEST: Version = (1, 1, 0)  # what gpunode knows of; it writes the lowest that will do
READ_ONLY = ("ro", "nosuid", "nodev", "rbind", "rprivate")
SOCKET = ("nosuid", "nodev", "noexec", "rbind", "rprivate")


@dataclass(frozen=True, order=True)
class NodeEdit:
    """A device file by its path in the container; `host_path` is empty where it is the same on the node.

    Numbers are left out on purpose. NVIDIA's uvm and caps drivers get another major at every module load, and
    an engine that finds none looks at the node itself (`fillMissingInfo` in CDI's container-edits_unix.go, in
    every release since 0.3.0): what isn't recorded can't become stale. A daemon remembers what it saw until
    the file changes, though, so a comment holds the numbers (`Spec.numbers`) and the file changes with them.

    The mode is written: without it, engines up to CDI library 1.0 make the container's node 0666, and later
    ones take the node's own mode but give it to root:root. 0 is an unknown mode, and `gid` 0 root's group.
    """

    path: str
    host_path: str = ""
    mode: int = 0
    gid: int = 0


@dataclass(frozen=True, order=True)
class Mount:
    """A bind mount of a file, a socket or a directory."""

    container_path: str
    host_path: str
    options: tuple[str, ...] = READ_ONLY


@dataclass(frozen=True)
class Hook:
    """A program that the low-level runtime starts. `args` begin with the program's own name."""

    path: str
    args: tuple[str, ...]
    env: tuple[str, ...] = ()
    name: str = "createContainer"


@dataclass(frozen=True)
class Edits:
    """What is done to a container. Its processes join the groups `gids` (CDI 0.7.0 and later)."""

    env: tuple[str, ...] = ()
    nodes: tuple[NodeEdit, ...] = ()
    mounts: tuple[Mount, ...] = ()
    hooks: tuple[Hook, ...] = ()
    gids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Device:
    """One name that a container may ask for, and what it gets beside the specification's common edits."""

    name: str
    edits: Edits


@dataclass(frozen=True)
class Spec:
    """One specification. `kind` is ``vendor/class``; `edits` are what every device of it needs.

    `numbers` are path, major and minor of every device file in it.
    """

    kind: str
    devices: tuple[Device, ...]
    edits: Edits
    version: Version = (0, 5, 0)
    numbers: tuple[tuple[str, int, int], ...] = ()
