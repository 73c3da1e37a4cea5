"""Free space of the file systems that hold images and pods, and the limits below which the kubelet evicts
pods."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpunode.facts.processes import Process
from gpunode.host import Host
from gpunode.host.reading import FileSystem

# the kubelet's defaults (pkg/kubelet/apis/config/v1beta1/defaults.go)
DEFAULTS = {"nodefs.available": "10%", "imagefs.available": "15%", "nodefs.inodesFree": "5%"}
_UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "K": 10**3, "M": 10**6}
_UNITS |= {"k": 10**3, "G": 10**9, "T": 10**12}


@dataclass(frozen=True)
class Place:
    """A directory and its file system; `signal` is nodefs or imagefs."""

    path: str
    signal: str
    room: FileSystem


def places(host: Host, desired: Iterable[tuple[str, str]]) -> tuple[Place, ...]:
    """`desired` are directories and their signals; those that don't exist are left out."""
    found = ((path, signal, host.file_system(path)) for path, signal in desired)
    return tuple(Place(path, signal, room) for path, signal, room in found if room is not None and room.size)


def limits(texts: Iterable[str], process: Process | None) -> Mapping[str, str]:
    """evictionHard of a KubeletConfiguration, or --eviction-hard; {} if neither is set. The flag takes
    precedence."""
    found: dict[str, str] = {}
    for text in texts:
        found.update(parse_eviction_hard(text))
    flag = process.option("--eviction-hard") if process else None
    return parse_flag(flag) if flag else found


def parse_eviction_hard(text: str) -> dict[str, str]:
    """From YAML, JSON, or a file of flags (microk8s' args/kubelet)."""
    flag = re.search(r"""--eviction-hard[= ]["']?([^"'\n]+)""", text)
    if flag:
        return parse_flag(flag[1])
    start = re.search(r"""["']?evictionHard["']?[ \t]*:[ \t]*(\{[^}]*\}|\n(?:[ \t]+\S.*(?:\n|$))*)""", text)
    if not start:
        return {}
    pairs = re.findall(r"""["']?([a-zA-Z]+\.[a-zA-Z]+)["']?[ \t]*:[ \t]*["']?([0-9][\w.%]*)""", start[1])
    return dict(pairs)


def parse_flag(text: str) -> dict[str, str]:
    """``nodefs.available<10%,imagefs.available<15%``."""
    pairs = (part.partition("<") for part in text.split(","))
    return {key.strip(): value.strip() for key, less, value in pairs if less}


def amount(limit: str, whole: int) -> int | None:
    """A limit in absolute numbers: ``10%`` of `whole`, or ``1Gi``; None if it is neither."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)(%|[KMGT]i?|k)?", limit, re.ASCII)
    if not found:
        return None
    number, unit = float(found[1]), found[2] or ""
    return int(whole * number / 100) if unit == "%" else int(number * _UNITS[unit])
