"""The program that wrote an engine's configuration file, recognized by the form of the file.

nvidia-ctk and the toolkit's container, which the GPU operator runs, write TOML through go-toml v1: no
comments, everything sorted and indented. For containerd they copy the CRI's whole section into a drop-in,
whose values then override every later change of the main file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from gpunode.facts.toml import KeyPath, dig, leaves
from gpunode.output.typed import as_dict

NVIDIA_CTK = "nvidia-ctk"
GPU_OPERATOR = "gpu-operator"
# the runtime, and its variants with a mode of their own: nvidia-container-runtime.cdi, .legacy
_PROGRAM = re.compile(r"(^|/)nvidia-container-runtime(\.[a-z-]+)?$")
# the toolkit's container installs below TOOLKIT_INSTALL_DIR/toolkit, which is /usr/local/nvidia by default
_CONTAINERS_PLACE = "/toolkit/nvidia-container-runtime"
_HEADER = re.compile(r"^( *)\[([^\[\]]+)\]$")


class GeneratedCopy(NamedTuple):
    """A drop-in that holds a copy of the engine's whole section, as NVIDIA's tools generate it.

    `shadowed` are key paths (below the plugin's table) whose copied value is no longer the main file's;
    `lost` are those that only the main file has: containerd before 2.0 replaces the whole table, so they have
    no effect there. `handlers` maps the nvidia runtimes in it to their programs; `default` is the one of them
    that it makes the default, empty if none; `cdi` is whether it switches CDI on.
    """

    shadowed: tuple[KeyPath, ...]
    lost: tuple[KeyPath, ...]
    handlers: Mapping[str, str]
    default: str
    cdi: bool


def generated_copy(
    tree: Mapping[str, Any], main_tree: Mapping[str, Any], plugin: str
) -> GeneratedCopy | None:
    """The values that a drop-in copied from the main file's table of `plugin`; None if it is no such copy.

    A copy has only that one plugin (and the version), an nvidia runtime, and at least half of what the main
    file has there, or, where the main file has nothing, a runtime that isn't NVIDIA's: the copy was then made
    from the daemon's own dump.
    """
    section, own = (as_dict(dig(table, "plugins", plugin)) for table in (tree, main_tree))
    handlers = nvidia_handlers(section)
    if not handlers or set(tree) - {"version", "plugins"} or set(as_dict(dig(tree, "plugins"))) != {plugin}:
        return None
    default = dig(section, "containerd", "default_runtime_name")
    handler = default if isinstance(default, str) and default in handlers else ""
    cdi = section.get("enable_cdi") is True
    copied, there = (
        {path: value for path, value in leaves(table) if not _belongs(path, handlers, bool(handler), cdi)}
        for table in (section, own)
    )
    if there:
        is_copy = 2 * len(copied.keys() & there.keys()) >= len(there)
    else:
        is_copy = any(path[:2] == ("containerd", "runtimes") for path in copied)
    if not is_copy:
        return None
    shadowed = tuple(path for path, value in there.items() if path in copied and copied[path] != value)
    lost = tuple(path for path in there if path not in copied)
    return GeneratedCopy(shadowed, lost, handlers, handler, cdi)


def _belongs(path: KeyPath, handlers: Mapping[str, str], default: bool, cdi: bool) -> bool:
    """Whether the value at a path is the drop-in's purpose and not a copy."""
    if path[:2] == ("containerd", "runtimes"):
        return path[2:3] != () and path[2] in handlers
    if path == ("containerd", "default_runtime_name"):
        return default
    return path == ("enable_cdi",) and cdi


def nvidia_handlers(section: Mapping[str, Any]) -> dict[str, str]:
    """Runtimes of a CRI section whose program is NVIDIA's: name to program."""
    handlers = {}
    for name, runtime in as_dict(dig(section, "containerd", "runtimes")).items():
        program = dig(runtime, "options", "BinaryName")
        if isinstance(program, str) and is_nvidia_program(program):
            handlers[name] = program
    return handlers


def is_nvidia_program(path: str) -> bool:
    """Whether a runtime's program is nvidia-container-runtime or one of its variants."""
    return _PROGRAM.search(path) is not None


def nvidia_writer(text: str, tree: Mapping[str, Any]) -> str:
    """`NVIDIA_CTK`, `GPU_OPERATOR`, or empty if neither of them wrote this file.

    `tree` is the parsed file, of containerd, CRI-O or Docker. The operator's is recognized by the directory
    of its container's programs, nvidia-ctk's by the form of a file that names an nvidia runtime.
    """
    programs = [value for path, value in leaves(tree) if isinstance(value, str) and is_nvidia_program(value)]
    if not programs:
        return ""
    if any(_CONTAINERS_PLACE in program for program in programs):
        return GPU_OPERATOR
    written = _as_go_json(tree) if text.lstrip("\ufeff \t\r\n").startswith("{") else as_go_toml(text)
    return NVIDIA_CTK if written else ""


def _as_go_json(tree: Mapping[str, Any]) -> bool:
    """nvidia-ctk writes a runtime's arguments as ``args``; dockerd's own key is ``runtimeArgs``."""
    runtimes = [runtime for runtime in as_dict(dig(tree, "runtimes")).values() if isinstance(runtime, dict)]
    return any("args" in runtime and is_nvidia_program(str(runtime.get("path"))) for runtime in runtimes)


def as_go_toml(text: str) -> bool:
    """Whether a file has the form that go-toml v1 gives it.

    No comment, a header for every table on the way, an empty line before each, two blanks of indent per
    level, and keys in alphabetical order.
    """
    depth, last, before = 0, "", ""
    seen: set[str] = set()
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header is not None:
            if before or len(header[1]) % 2 or (header[1] and not seen):
                return False
            depth, last = len(header[1]) // 2 + 1, ""
            seen.add(header[2])
        elif line.lstrip().startswith("#"):
            return False
        elif line and not line.startswith(" " * (2 * depth) + " ") and "=" in line:
            key = line.strip().partition("=")[0].strip().strip('"')
            if line[: len(line) - len(line.lstrip())] != " " * (2 * depth) or key < last:
                return False
            last = key
        before = line.strip()
    return bool(seen) and all(_parent(name) in {"", *seen} for name in seen)


def _parent(header: str) -> str:
    """The header one level up, as written: without the last key, quoted or not."""
    return re.sub(r'(^|\.)("(?:[^"\\]|\\.)*"|[^."]+)$', "", header)
