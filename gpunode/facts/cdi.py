"""CDI specifications for NVIDIA devices, and what they refer to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gpunode.host import Host

DIRECTORIES = ("/etc/cdi", "/var/run/cdi")  # the CDI specification's default directories
VENDOR = "nvidia.com/"


@dataclass(frozen=True)
class CdiNode:
    """A device file that a spec puts into containers; numbers are None where the engine looks them up."""

    path: str
    major: int | None
    minor: int | None


@dataclass(frozen=True)
class CdiSpec:
    """One file. `problem` says why it can't be used, and then the rest is empty."""

    path: str
    kind: str
    devices: tuple[str, ...] = ()
    nodes: tuple[CdiNode, ...] = ()
    mounts: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()
    problem: str = ""


def nvidia_specs(host: Host) -> tuple[CdiSpec, ...]:
    """Every spec of kind ``nvidia.com/...``, and every file that should be one but can't be parsed."""
    found = []
    for directory in DIRECTORIES:
        names = (path for kind in ("*.json", "*.yaml", "*.yml") for path in host.glob(directory, kind))
        for path in names:
            text = host.read_text(path)
            spec = parse_spec(text or "", path)
            if spec is not None:
                found.append(spec)
    return tuple(found)


def parse_spec(text: str, path: str) -> CdiSpec | None:
    """One spec; None for another vendor's. A broken file is NVIDIA's only if its name or text says so."""
    try:
        tree = _load(text, path)
    except (ValueError, RecursionError) as error:
        ours = "nvidia" in path.rpartition("/")[2] or VENDOR in text
        return CdiSpec(path, "", problem=f"can't be parsed: {_one_line(error)}") if ours else None
    kind = tree.get("kind") if isinstance(tree, dict) else None
    if not isinstance(kind, str) or not kind.startswith(VENDOR):
        return None
    devices = [one for one in _list(tree, "devices") if isinstance(one, dict)]
    edits = [_dict(holder, "containerEdits") for holder in (tree, *devices)]
    return CdiSpec(
        path,
        kind,
        devices=tuple(str(device.get("name")) for device in devices),
        nodes=tuple(dict.fromkeys(node for edit in edits for node in _nodes(edit))),
        mounts=_strings(edits, "mounts", "hostPath"),
        hooks=_strings(edits, "hooks", "path"),
    )


def _load(text: str, path: str) -> Any:
    if path.endswith(".json"):
        import json

        return json.loads(text)
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return yaml.load(text, Loader=loader)  # noqa: S506 - both are safe loaders; the C one is 10 times faster
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _list(tree: Any, key: str) -> list[Any]:
    value = tree.get(key) if isinstance(tree, dict) else None
    return value if isinstance(value, list) else []


def _dict(tree: Any, key: str) -> dict[str, Any]:
    value = tree.get(key) if isinstance(tree, dict) else None
    return value if isinstance(value, dict) else {}


def _nodes(edits: dict[str, Any]) -> Iterator[CdiNode]:
    """hostPath is where the node lies on this machine; path is the container's and the default for it."""
    for node in _list(edits, "deviceNodes"):
        path = (node.get("hostPath") or node.get("path")) if isinstance(node, dict) else None
        if isinstance(path, str):
            yield CdiNode(path, _number(node.get("major")), _number(node.get("minor")))


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _strings(edits: list[dict[str, Any]], key: str, field: str) -> tuple[str, ...]:
    values = (item.get(field) for edit in edits for item in _list(edit, key) if isinstance(item, dict))
    return tuple(dict.fromkeys(value for value in values if isinstance(value, str)))
