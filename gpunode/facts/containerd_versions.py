"""What containerd passes over because of its files' versions.

After containerd's own source, ``LoadConfig`` and the plugins' ``ConfigMigration``. A file that names no
version is brought up to the one in force as it is read, and so changes nothing. Among those that name one the
last decides for all of them, up to 2.2: before 2.0 it says under which name the CRI's table is read at all;
2.0 to 2.2 take the table of version 2 along only if version 2 is in force, and its runtimes only if that of
version 3 has none. From 2.3 on each file is brought up by itself, and nothing is passed over.
"""

from __future__ import annotations

from typing import Any

from gpunode.dataclass import dataclass
from gpunode.facts.containerd import CRI_PLUGINS, ContainerdConfig, dig

IMAGES = "io.containerd.cri.v1.images"
_SHORT, _OLD, _NEW = (CRI_PLUGINS[number] for number in (1, 2, 3))
_EACH_FILE_BY_ITSELF = (2, 3)


@dataclass(frozen=True)
class PassedOver:
    """A CRI table that isn't read: `what` of it is nowhere else, runtimes and settings, in words."""

    path: str
    plugin: str
    what: tuple[str, ...]


def version_in_force(config: ContainerdConfig) -> int:
    """The version that decides which tables count; a main file without one is version 1 before 2.0."""
    named = (tree.get("version") for tree in config.trees.values())
    least = 2 if config.deep else 1
    numbers = [one for one in named if isinstance(one, int) and one >= least]
    return numbers[-1] if numbers else 3 if config.deep else 1


def passed_over(config: ContainerdConfig) -> tuple[PassedOver, ...]:
    """Tables that this containerd doesn't read, as far as something of them is lost by that."""
    if not config.release or config.release >= _EACH_FILE_BY_ITSELF:
        return ()
    names = _names(config)
    tables = [
        (path, plugin, table, _full(config, tree, plugin) in names)
        for path, tree in config.trees.items()
        for plugin in (_SHORT, _OLD, _NEW)
        if isinstance(table := dig(tree, "plugins", plugin), dict)
    ]
    kept = [table for _, _, table, read in tables if read]
    lost = ((path, plugin, _lost(config, table, kept)) for path, plugin, table, read in tables if not read)
    return tuple(PassedOver(path, plugin, what) for path, plugin, what in lost if what)


def _names(config: ContainerdConfig) -> tuple[str, ...]:
    """Under which names runtimes are read."""
    force = version_in_force(config)
    if config.deep:
        newer = any(dig(tree, "plugins", _NEW, "containerd", "runtimes") for tree in config.trees.values())
        return (_NEW,) if force > 2 or newer else (_OLD,)
    return (_SHORT,) if force == 1 else (_OLD,)


def _full(config: ContainerdConfig, tree: dict[str, Any], plugin: str) -> str:
    """2.0 and up give the short names of a file without version their full ones."""
    return _OLD if plugin == _SHORT and config.deep and tree.get("version", 1) in (0, 1) else plugin


def _lost(config: ContainerdConfig, table: dict[str, Any], kept: list[dict[str, Any]]) -> tuple[str, ...]:
    """Handlers, their cgroup driver and registries; what else a table has falls to the same default."""
    runtimes = dig(table, "containerd", "runtimes")
    found = [
        name if systemd is None else f"{name}: SystemdCgroup = true"
        for name, runtime in (runtimes if isinstance(runtimes, dict) else {}).items()
        for systemd in _missed(name, runtime, [dig(one, "containerd", "runtimes", name) for one in kept])
    ]
    registry = dig(table, "registry")
    moved = config.deep and version_in_force(config) > 2  # into a table of their own, which it reads alone
    if moved and isinstance(registry, dict) and _says(registry) and not _images(config):
        found.append("registry")
    return tuple(found)


def _missed(name: str, runtime: Any, kept: list[Any]) -> tuple[bool | None, ...]:
    """Nothing, (None,) for the whole handler, (True,) for SystemdCgroup alone. runc is compiled in."""
    systemd = dig(runtime, "options", "SystemdCgroup") is True
    there = [one for one in kept if isinstance(one, dict)]
    if not there and (name != "runc" or dig(runtime, "options", "BinaryName")):
        return (None,)
    lost = systemd and not any(dig(one, "options", "SystemdCgroup") is True for one in there)
    return (True,) if lost else ()


def _says(registry: dict[str, Any]) -> bool:
    return any(registry.get(key) for key in ("config_path", "mirrors", "configs"))


def _images(config: ContainerdConfig) -> bool:
    return isinstance(dig(config.merged, "plugins", IMAGES, "registry"), dict)
