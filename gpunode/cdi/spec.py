"""The types of a CDI specification, limited to what gpunode writes (CDI's SPEC.md has the whole format)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from gpunode.cdi.versions import DOTS, GROUPS, NAMES, OLDEST, Version, text

READ_ONLY = ("ro", "nosuid", "nodev", "rbind", "rprivate")
SOCKET = ("nosuid", "nodev", "noexec", "rbind", "rprivate")


class NodeEdit(NamedTuple):
    """A device file by its path in the container; `host_path` is empty where it is the same on the node.

    Numbers are left out on purpose. NVIDIA's uvm and caps drivers get another major at every module load, and
    an engine that finds none reads it from the node itself (`fillMissingInfo` in CDI's
    container-edits_unix.go, in every release since 0.3.0): unrecorded numbers can't become stale. A daemon
    caches them until the file changes, though, so a comment has the numbers (`Spec.numbers`) and the file
    changes with them.

    The mode is written: without it, engines up to CDI library 1.0 make the container's node 0666, and later
    ones take the node's own mode but give it to root:root. 0 is an unknown mode, and `gid` 0 root's group.
    """

    path: str
    host_path: str = ""
    mode: int = 0
    gid: int = 0


class Mount(NamedTuple):
    """A bind mount of a file, a socket or a directory."""

    container_path: str
    host_path: str
    options: tuple[str, ...] = READ_ONLY


class Hook(NamedTuple):
    """A program that the low-level runtime starts. `args` start with the program's own name."""

    path: str
    args: tuple[str, ...]
    env: tuple[str, ...] = ()
    name: str = "createContainer"


class Edits(NamedTuple):
    """Changes to a container. Its processes join the groups `gids` (CDI 0.7.0 and later)."""

    env: tuple[str, ...] = ()
    nodes: tuple[NodeEdit, ...] = ()
    mounts: tuple[Mount, ...] = ()
    hooks: tuple[Hook, ...] = ()
    gids: tuple[int, ...] = ()


class SpecDevice(NamedTuple):
    """A device name that a container may request, and its edits in addition to the common ones."""

    name: str
    edits: Edits


class Spec(NamedTuple):
    """One specification. `kind` is ``vendor/class``; `edits` are those of every device in it.

    `numbers` are path, major and minor of every device file in it.
    """

    kind: str
    devices: tuple[SpecDevice, ...]
    edits: Edits
    version: Version = (0, 5, 0)
    numbers: tuple[tuple[str, int, int], ...] = ()


def needed(spec: Spec) -> Version:
    """The lowest version that has everything in `spec`, by CDI's own rules (`MinimumRequiredVersion`)."""
    edits = (spec.edits, *(device.edits for device in spec.devices))
    if any(edit.gids for edit in edits):
        return GROUPS
    if "." in spec.kind.partition("/")[2]:
        return DOTS
    digits = any(not device.name[:1].isalpha() for device in spec.devices)
    elsewhere = any(node.host_path for edit in edits for node in edit.nodes)
    return NAMES if digits or elsewhere else OLDEST


# A specification as bytes: YAML or JSON. No library is needed: YAML's strings are JSON's.

FORMATS = ("yaml", "json")
# a comment, because engines refuse unknown fields and annotations need CDI 0.6.0
MARKER = "# Made by gpunode from what the driver tells: `gpunode cdi refresh` writes it anew, edits are lost."


def format_of(path: str) -> str | None:
    """yaml or json by a file's extension; engines read no other (.yml included), so None for any other."""
    extension = path.rpartition("/")[2].rpartition(".")[2]
    return extension if extension in FORMATS else None


def encode(spec: Spec, form: str) -> bytes:
    """The file's bytes; the same for equal specifications."""
    tree = as_tree(spec)
    if form == "json":
        return (json.dumps(tree, indent=2) + "\n").encode()
    numbers = (f"#   {path} {major}:{minor}" for path, major, minor in spec.numbers)
    heading = (MARKER, "# Device files when this was made:", *numbers, "---")
    return ("\n".join((*heading, *_lines(tree, ""))) + "\n").encode()


def made_by_gpunode(data: bytes | None) -> bool:
    """Whether these bytes are a YAML specification of gpunode's; JSON has no comment to say so."""
    return data is not None and data.startswith(MARKER.encode())


def as_tree(spec: Spec) -> dict[str, Any]:
    """The specification as plain data, by CDI's field names; empty fields are left out."""
    return {
        "cdiVersion": text(spec.version),
        "kind": spec.kind,
        "devices": [{"name": device.name, "containerEdits": _edits(device.edits)} for device in spec.devices],
        "containerEdits": _edits(spec.edits),
    }


def _edits(edits: Edits) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "env": list(edits.env),
        "deviceNodes": [
            _filled(path=node.path, hostPath=node.host_path, fileMode=node.mode, gid=node.gid)
            for node in edits.nodes
        ],
        "mounts": [
            {
                "hostPath": mount.host_path,
                "containerPath": mount.container_path,
                "options": list(mount.options),
            }
            for mount in edits.mounts
        ],
        "hooks": [
            _filled(hookName=hook.name, path=hook.path, args=list(hook.args), env=list(hook.env))
            for hook in edits.hooks
        ],
        "additionalGids": list(edits.gids),
    }
    return _filled(**tree)


def _filled(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value}


def _lines(value: Any, indent: str) -> Iterator[str]:
    """Block-style YAML of mappings and lists; strings are quoted, so that ``0`` and ``no`` stay strings."""
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, dict | list):
                yield f"{indent}{key}:"
                yield from _lines(item, indent + "  ")
            else:
                yield f"{indent}{key}: {_scalar(item)}"
        return
    for item in value:
        if isinstance(item, dict):
            first, *rest = _lines(item, indent + "  ")
            yield f"{indent}- {first.lstrip()}"
            yield from rest
        else:
            yield f"{indent}- {_scalar(item)}"


def _scalar(value: str | int) -> str:
    """A number, or a double-quoted YAML string: JSON's, with the additional escapes of YAML (spec 1.2.2,
    5.7)."""
    quoted = json.dumps(value, ensure_ascii=False)
    return re.sub(r"[^ -~]", lambda match: f"\\U{ord(match[0]):08x}", quoted)
