"""What an imported file takes away: before 2.0 containerd replaces a plugin's table by a later file's.

A file that was meant to add a handler drops the pause image, the registries and the cgroup driver of the main
file then (containerd issue 5837). What is lost by the files is only a candidate: the running daemon tells.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpunode.dataclass import dataclass
from gpunode.facts import gates
from gpunode.facts.containerd import ContainerdConfig, dig

_TOLD_WHOLE = ("runtimes", "mirrors")  # by name: one that it doesn't tell isn't there
_SECRET = ("auth", "configs", "headers")


@dataclass(frozen=True)
class Lost:
    """One setting of the CRI's table: `file` has it, and the table in `by` replaces that one."""

    keys: tuple[str, ...]
    value: Any
    file: str
    by: str

    @property
    def name(self) -> str:
        return ".".join(self.keys)

    def __str__(self) -> str:
        """For people; what may be a password isn't shown."""
        shown = "" if any(word in key for key in self.keys for word in _SECRET) else f" = {self.value}"
        return f"{self.name}{shown}"


def lost_settings(config: ContainerdConfig) -> tuple[Lost, ...]:
    """In the order of the files; () for a containerd that merges key by key."""
    if gates.can("containerd", "imports-merge", config.release) or (not config.release and config.deep):
        return ()
    found: dict[tuple[str, ...], Lost] = {}
    before: dict[tuple[str, ...], tuple[Any, str]] = {}
    for path, tree in config.trees.items():
        table = dig(tree, "plugins", config.plugin)
        if not isinstance(table, dict):
            continue
        here = dict(_leaves(table))
        for keys, (value, file) in before.items():
            if keys not in here:
                found.setdefault(keys, Lost(keys, value, file, path))
        before |= {keys: (value, path) for keys, value in here.items()}
        found = {keys: lost for keys, lost in found.items() if keys not in here}
    return tuple(found.values())


def _leaves(table: Mapping[str, Any], keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*keys, key))
        else:
            yield (*keys, key), value


def is_lost(running: Mapping[str, Any], one: Lost) -> bool:
    """Whether the running daemon goes without it; what it doesn't tell counts as kept."""
    value = in_force(running, one.keys)
    if value is not None:
        return bool(value != one.value)
    for depth, key in enumerate(one.keys[:-1]):
        if key in _TOLD_WHOLE and isinstance(in_force(running, one.keys[:depth]), Mapping):
            return in_force(running, one.keys[: depth + 2]) is None
    return False


def in_force(running: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    """A setting in the running daemon's own account (CRI Status), None if it doesn't tell.

    It spells keys its own way: ``sandboxImage`` for ``sandbox_image``, ``enableCDI`` for ``enable_cdi``.
    """
    here: Any = running
    for key in keys:
        if not isinstance(here, Mapping):
            return None
        wanted = key.replace("_", "").lower()
        here = next((value for name, value in here.items() if _same(name, key, wanted)), None)
    return here


def _same(name: object, key: str, wanted: str) -> bool:
    return name == key or (isinstance(name, str) and name.lower() == wanted)
