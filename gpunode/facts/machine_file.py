"""A whole machine in one JSON object, and how it becomes a directory that ``--root`` reads.

``{"files": {path: text}, "binary": {path: base64}, "links": {path: target}, "dirs": [path],
"executables": [path], "libraries": {soname: path}, "recording": {...}}``. `libraries` become
/etc/ld.so.cache. In `files` a null byte is written as ``\\u0000``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from gpunode.errors import ConfigError
from gpunode.facts.ld_cache import CachedLibrary, build_ld_cache
from gpunode.host import RECORDING


def build_machine(spec: Mapping[str, Any], root: Path) -> Path:
    """Write the machine into `root`, a new or empty directory, and return it; else `ConfigError`."""
    if root.exists() and any(root.iterdir()):
        raise ConfigError(f"{root} is not empty", hint="a machine is only built in a new directory")
    root.mkdir(parents=True, exist_ok=True)
    made = {root}
    for path in spec.get("dirs", ()):
        _make(_inside(root, path), made)
    for path, content in contents(spec).items():
        target = _inside(root, path)
        _make(target.parent, made)
        target.write_bytes(content)
    for path in spec.get("executables", ()):
        target = _inside(root, path)
        _make(target.parent, made)
        target.write_bytes(b"#!/bin/sh\n")
        target.chmod(0o755)
    # links last: nothing is ever written through one
    links: set[Path] = set()
    for path, destination in spec.get("links", {}).items():
        link = _inside(root, path, links)
        _make(link.parent, made)
        link.symlink_to(destination)
        links.add(link)
    return root


def _make(directory: Path, made: set[Path]) -> None:
    if directory not in made:
        directory.mkdir(parents=True, exist_ok=True)
        made.add(directory)


def contents(spec: Mapping[str, Any]) -> dict[str, bytes]:
    """Every regular file of the machine, with what is made from the other sections."""
    import base64
    import json

    found = {path: text.encode("utf-8", "surrogateescape") for path, text in spec.get("files", {}).items()}
    found |= {path: base64.b64decode(text, validate=True) for path, text in spec.get("binary", {}).items()}
    libraries = spec.get("libraries", {})
    if libraries:
        entries = tuple(CachedLibrary(name, path) for name, path in libraries.items())
        found.setdefault("/etc/ld.so.cache", build_ld_cache(entries))
    if "recording" in spec:
        found["/" + RECORDING] = json.dumps(spec["recording"], indent=1).encode()
    return found


def _inside(root: Path, path: str, links: Collection[Path] = ()) -> Path:
    """Where a path of the machine lies; one that leaves the root or leads through `links` is refused."""
    pure = PurePosixPath(path)
    if not pure.is_absolute() or ".." in pure.parts:
        raise ConfigError(f"{path!r} is no absolute path inside the machine")
    target = root.joinpath(*pure.parts[1:])
    for step in (target, *target.parents) if links else ():
        if step in links:
            raise ConfigError(f"{path!r} leads through the link {step.relative_to(root)}")
    return target
