"""Container images as bytes: a layer from files, an archive as ``docker save`` writes it.

``docker load`` and ``ctr images import`` both take that format. The same input gives the same bytes: names
are sorted, every time is zero, every owner is root.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpunode.dataclass import dataclass, field


@dataclass(frozen=True)
class Entry:
    """One thing in a layer, by its absolute path: a file, a symlink (`target`) or a directory (neither)."""

    data: bytes | None = None
    target: str = ""
    mode: int = 0o755


@dataclass(frozen=True)
class ImageConfig:
    """What runs when nobody says otherwise. `architecture` is Go's name: amd64, arm64."""

    architecture: str
    entrypoint: tuple[str, ...]
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


def layer(entries: Mapping[str, Entry]) -> bytes:
    """An uncompressed layer tar; parents that nobody named become directories."""
    import io
    import tarfile

    complete = {**_parents(entries), **entries}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(complete):
            entry = complete[path]
            info = tarfile.TarInfo(path.lstrip("/"))
            info.mode = entry.mode
            if entry.target:
                info.type, info.linkname, info.mode = tarfile.SYMTYPE, entry.target, 0o777
            elif entry.data is None:
                info.type = tarfile.DIRTYPE
            else:
                info.size = len(entry.data)
            tar.addfile(info, io.BytesIO(entry.data or b""))
    return buffer.getvalue()


def _parents(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    from pathlib import PurePosixPath

    above = {str(parent) for path in entries for parent in PurePosixPath(path).parents}
    return {path: Entry() for path in above - {"/"}}


def archive(reference: str, content: bytes, config: ImageConfig, also: Sequence[str] = ()) -> bytes:
    """One image of one layer, as ``docker save`` would write it; `also` are more names for it."""
    import io
    import json
    import tarfile

    digest = sha256(content)
    document = json.dumps(_config(config, digest), sort_keys=True).encode()
    config_name = f"{sha256(document)}.json"
    manifest: list[dict[str, Any]] = [
        {"Config": config_name, "RepoTags": [reference, *also], "Layers": [f"{digest}/layer.tar"]}
    ]
    files = {
        config_name: document,
        f"{digest}/layer.tar": content,
        "manifest.json": json.dumps(manifest).encode(),
    }
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def _config(config: ImageConfig, digest: str) -> dict[str, Any]:
    return {
        "architecture": config.architecture,
        "os": "linux",
        "created": "1970-01-01T00:00:00Z",
        "config": {
            "Env": [f"{name}={value}" for name, value in config.env.items()],
            "Entrypoint": list(config.entrypoint),
            "Cmd": list(config.command),
            "WorkingDir": "/",
            **({"Labels": dict(config.labels)} if config.labels else {}),
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        "history": [{"created": "1970-01-01T00:00:00Z", "created_by": "gpunode"}],
    }


def sha256(data: bytes) -> str:
    """Hexadecimal digest."""
    import hashlib

    return hashlib.sha256(data).hexdigest()
