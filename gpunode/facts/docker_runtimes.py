"""Docker's runtimes, as its file and the running daemon's /info alike have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpunode.facts.writers import is_nvidia_program


def programs(tree: Mapping[str, Any], key: str = "runtimes") -> dict[str, str]:
    """Programs by runtime; empty where the engine itself looks for one."""
    entries = tree.get(key)
    return {
        name: str(entry.get("path") or "") if isinstance(entry, dict) else ""
        for name, entry in (entries.items() if isinstance(entries, dict) else ())
    }


def nvidia_programs(tree: Mapping[str, Any], key: str = "runtimes") -> dict[str, str]:
    """Those of NVIDIA's runtimes, by name or program."""
    found = programs(tree, key).items()
    return {name: path for name, path in found if name == "nvidia" or is_nvidia_program(path)}
