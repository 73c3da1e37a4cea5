"""OCI hooks that NVIDIA's old packages, and ``nvidia-ctk runtime configure`` in its hook mode, installed.

Podman and CRI-O run every hook of their hooks directories that matches a container (oci-hooks(5)). NVIDIA's
injects GPUs wherever NVIDIA_VISIBLE_DEVICES is set; beside CDI or the nvidia runtime it injects them twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gpunode.dataclass import dataclass
from gpunode.errors import GpunodeError
from gpunode.host import Host

SYSTEM_DIRECTORIES = ("/usr/share/containers/oci/hooks.d", "/etc/containers/oci/hooks.d")
# its name until toolkit 1.9, and since
_PROGRAMS = ("nvidia-container-toolkit", "nvidia-container-runtime-hook")


@dataclass(frozen=True)
class OciHook:
    """One hook file and the program that it runs."""

    path: str
    program: str


def nvidia_hooks(host: Host, directories: Iterable[str]) -> tuple[OciHook, ...]:
    """NVIDIA's hooks in these directories; a file that this user may not read, or no JSON, is passed over."""
    found = []
    for directory in dict.fromkeys(directories):
        for path in _json_files(host, directory):
            program = _program(host, path)
            if program.rpartition("/")[2] in _PROGRAMS:
                found.append(OciHook(path, program))
    return tuple(found)


def _json_files(host: Host, directory: str) -> tuple[str, ...]:
    try:
        return host.glob(directory, "*.json")
    except GpunodeError:
        return ()


def _program(host: Host, path: str) -> str:
    """``hook.path`` of the 1.0.0 format, ``hook`` itself of 0.1.0; empty if there is neither."""
    import json

    try:
        tree: Any = json.loads(host.read_text(path) or "")
    except (GpunodeError, ValueError, RecursionError):
        return ""
    hook = tree.get("hook") if isinstance(tree, dict) else None
    program = hook.get("path") if isinstance(hook, dict) else hook
    return program if isinstance(program, str) else ""
