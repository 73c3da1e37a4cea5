"""The journal's manifest as `Journal.begin` writes it: a strange directory must not stop every run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_FILE: Mapping[str, type] = {
    "path": str, "existed": bool, "mode": int, "uid": int, "gid": int,
    "backup": str, "before": str, "after": str, "interim": list,
}  # fmt: skip
# what earlier releases didn't write, and what only some operations do
_MAY_FILE: Mapping[str, type] = {"directories": list, "generated": bool, "beside": bool}
_MAY: Mapping[str, type] = {
    "state": str, "operation": str, "engine": str, "manager": str, "config": str, "socket": str,
    "verb": str, "restartCommand": str, "runtimes": list, "units": list, "cdi": list,
}  # fmt: skip


def is_manifest(manifest: Any) -> bool:
    """Whether every field that gpunode reads again has its type; others are only shown."""
    if not isinstance(manifest, dict) or not _fits(manifest, {}, _MAY):
        return False
    before = manifest.get("activeBefore")
    handlers = before.get("handlers", []) if isinstance(before, dict) else []
    files = manifest.get("files", [])
    return isinstance(files, list) and isinstance(handlers, list) and all(map(_is_file, files))


def _is_file(file: Any) -> bool:
    if not isinstance(file, dict) or not _fits(file, _FILE, _MAY_FILE):
        return False
    return bool(file["path"].startswith("/")) and "/" not in file["backup"]


def _fits(found: Mapping[str, Any], must: Mapping[str, type], may: Mapping[str, type]) -> bool:
    """Whether the keys have their types, and lists hold strings; those of `may` can be absent."""
    kinds = {**must, **{key: kind for key, kind in may.items() if key in found}}
    return all(_is(found.get(key), kind) for key, kind in kinds.items())


def _is(value: Any, kind: type) -> bool:
    if not isinstance(value, kind):
        return False
    return not isinstance(value, list) or all(isinstance(one, str) for one in value)
