"""The programs behind CRI-O's handlers, and which of them NVIDIA's runtime finds.

CRI-O's packages put crun and runc into /usr/libexec/crio. nvidia-container-runtime takes the first of
``nvidia-container-runtime.runtimes`` that it finds, by default the bare names, and fails every pod without.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gpunode.facts.containerd import dig, parse_toml
from gpunode.facts.crio import CrioConfig, compiled_default
from gpunode.facts.toolkit_config import DEFAULT_PATH
from gpunode.facts.writers import is_nvidia_program
from gpunode.host import Host

NVIDIA_NAMES = ("nvidia", "nvidia-cdi", "nvidia-legacy")
RUNTIMES_KEY = ("nvidia-container-runtime", "runtimes")
_TOOLKIT_DEFAULT = ("runc", "crun")
_PACKAGED = ("/usr/libexec/crio/crun", "/usr/libexec/crio/runc")
_LOW_LEVEL = re.compile(r"crun|runc|youki")


def is_low_level(name: str, table: Mapping[str, Any]) -> bool:
    """Whether a handler starts ordinary containers through crun or runc."""
    program = str(table.get("runtime_path") or name).rpartition("/")[2]
    return table.get("runtime_type", "") in ("", "oci") and _LOW_LEVEL.fullmatch(program) is not None


def is_nvidias(name: str, table: Any) -> bool:
    """Whether a handler is NVIDIA's, by its name or its program."""
    program = table.get("runtime_path") if isinstance(table, dict) else None
    return name in NVIDIA_NAMES or (isinstance(program, str) and is_nvidia_program(program))


def low_level_paths(host: Host, config: CrioConfig, version: tuple[int, ...]) -> tuple[str, ...]:
    """Where crun and runc are: the default's first, then other handlers', then the packages' place."""
    default = config.named_default or compiled_default(version)
    tables = sorted(config.handlers.items(), key=lambda pair: pair[0] != default)
    named = [str(table.get("runtime_path", "")) for name, table in tables if is_low_level(name, table)]
    absolute = [path for path in (*named, *_PACKAGED) if path.startswith("/")]
    return tuple(path for path in dict.fromkeys(absolute) if host.executable(path))


def toolkit_runtimes(text: str) -> tuple[str, ...]:
    """What the toolkit's configuration makes NVIDIA's runtime look for, in order."""
    listed = dig(parse_toml(text, DEFAULT_PATH), *RUNTIMES_KEY)
    if not isinstance(listed, list):
        return _TOOLKIT_DEFAULT
    return tuple(one for one in listed if isinstance(one, str))
