"""A specification as bytes: YAML or JSON. Nothing is imported for it: YAML's strings are JSON's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from gpunode.cdi.model import Edits, Spec
from gpunode.cdi.versions import text

FORMATS = ("yaml", "json")
# a comment, since engines refuse a field that they don't know and annotations need CDI 0.6.0
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
    """Whether these bytes are a YAML specification of ours; JSON has no place to say so."""
    return data is not None and data.startswith(MARKER.encode())


def as_tree(spec: Spec) -> dict[str, Any]:
    """The specification as plain data, by CDI's field names; empty fields are left out."""
    return {
        "cdiVersion": text(spec.version),
        "kind": spec.kind,
        "devices": [{"name": one.name, "containerEdits": _edits(one.edits)} for one in spec.devices],
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
            {"hostPath": one.host_path, "containerPath": one.container_path, "options": list(one.options)}
            for one in edits.mounts
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
    """A number, or a double-quoted YAML string: JSON's, but for what YAML wants escaped (spec 1.2.2, 5.7)."""
    quoted = json.dumps(value, ensure_ascii=False)
    return re.sub(r"[^ -~]", lambda found: f"\\U{ord(found[0]):08x}", quoted)
