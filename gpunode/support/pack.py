"""A support bundle: what was kept of a machine, redacted, as one .tar.gz that `Host`'s drawer can unpack."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from gpunode._bundle import LINKS, MACHINE
from gpunode._recorder import Kept, programs_as_files
from gpunode.host import RECORDING
from gpunode.support.redact import (
    Redaction,
    known_variable,
    runs_known_program,
    shown_arguments,
    shown_variable,
)

_PROC = re.compile(r"/proc/([0-9]+)/(?:task/[0-9]+/)?(cmdline|environ)")
_OF_IMAGES = ("NVIDIA_", "CUDA_")
_GECOS = 4
KERNEL_LOG = ".gpunode/kernel.log"


def files_of(kept: Kept, redaction: Redaction) -> dict[str, bytes]:
    """Everything below machine/, by its path on the node without the first slash, and links.json."""
    inside: dict[str, bytes] = {}
    for path, data in programs_as_files(kept).items():
        inside[redaction.path(path).removeprefix("/")] = _cleaned(path, data, redaction)
    inside[RECORDING] = _json(redaction.value(_without_images(kept.recording)))
    if kept.log:
        inside[KERNEL_LOG] = redaction.text("\n".join(kept.log) + "\n").encode("utf-8", "surrogateescape")
    return inside


def _without_images(recording: Mapping[str, Any]) -> dict[str, Any]:
    """The recording with nothing of an image's environment but what is about GPUs: anybody's program is in
    it. podman prints an image's settings with all else that it knows of it."""
    found = {name: dict(section) for name, section in recording.items()}
    for socket, told in found.get("daemons", {}).items():
        images = told.get("images") if isinstance(told, dict) else None
        if isinstance(images, dict):
            kept = {name: _settings(one) for name, one in images.items()}
            found["daemons"][socket] = {**told, "images": kept}
    for line, answer in found.get("commands", {}).items():
        if "podman image inspect" in line:
            found["commands"][line] = {**answer, "stdout": _inspected(answer.get("stdout", ""))}
    return found


def _settings(config: Any) -> Any:
    listed = config.get("Env") if isinstance(config, dict) else None
    ours = [one for one in listed if str(one).startswith(_OF_IMAGES)] if isinstance(listed, list) else []
    return {"Env": ours} if isinstance(config, dict) else config


def _inspected(text: str) -> str:
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    first = told[0] if isinstance(told, list) and told else None
    config = first.get("Config") if isinstance(first, dict) else None
    return json.dumps([{"Config": _settings(config)}]) if isinstance(config, dict) else ""


def links_of(kept: Kept, redaction: Redaction) -> dict[str, str]:
    """Without such as would hide what is kept below them."""
    solid = {parent for path in (*kept.files, *kept.directories) for parent in _parents(path)}
    return {
        redaction.path(path): redaction.path(target)
        for path, target in kept.links.items()
        if path not in solid and path not in kept.directories
    }


def _parents(path: str) -> Iterator[str]:
    while path := path.rpartition("/")[0]:
        yield path


def _cleaned(path: str, data: bytes, redaction: Redaction) -> bytes:
    """Binary files, such as the loader's cache, are tables that hold no text of anybody's."""
    found = _PROC.fullmatch(path)
    if found is not None:
        data = _arguments(data) if found[2] == "cmdline" else _variables(data)
    elif path == "/etc/passwd":
        data = b"\n".join(map(_without_person, data.split(b"\n")))
    elif b"\0" in data[:8192]:
        return data
    text = data.decode("utf-8", "surrogateescape")
    return redaction.text(text).encode("utf-8", "surrogateescape")


def _arguments(data: bytes) -> bytes:
    """Of other programs only the first argument is kept."""
    argv = data.decode("utf-8", "surrogateescape").split("\0")
    shown = "\0".join(shown_arguments(argv)) if runs_known_program(argv) else argv[0] + "\0"
    return shown.encode("utf-8", "surrogateescape")


def _variables(data: bytes) -> bytes:
    text = data.decode("utf-8", "surrogateescape")
    return "\0".join(shown_variable(one) for one in text.split("\0") if known_variable(one)).encode(
        "utf-8", "surrogateescape"
    )


def _without_person(line: bytes) -> bytes:
    fields = line.split(b":")
    if len(fields) > _GECOS:
        fields[_GECOS] = b""
    return b":".join(fields)


def packed(
    top: str, inside: Mapping[str, bytes], kept: Kept, beside: Mapping[str, bytes], now: float
) -> bytes:
    """The archive: `beside` first, so that a person finds the report on top, then the machine."""
    import tarfile

    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", compresslevel=6) as archive:
        for name, data in beside.items():
            _add(archive, f"{top}/{name}", data, now, 0o600)
        solid = {parent for path in inside for parent in _parents("/" + path)}
        for path in sorted(kept.directories):
            if path not in solid and path != "/":
                _add(archive, f"{top}/{MACHINE}{path}", None, now, 0o755)
        for path, data in sorted(inside.items()):
            mode = 0o755 if f"/{path}" in kept.programs else 0o644
            moment = kept.times.get(f"/{path}", now)
            if f"/{path}" not in solid:
                _add(archive, f"{top}/{MACHINE}/{path}", data, moment, mode)
    return out.getvalue()


def _add(archive: Any, name: str, data: bytes | None, moment: float, mode: int) -> None:
    import tarfile

    entry = tarfile.TarInfo(name)
    entry.mtime, entry.mode = moment, mode
    if data is None:
        entry.type = tarfile.DIRTYPE
        archive.addfile(entry)
        return
    entry.size = len(data)
    archive.addfile(entry, io.BytesIO(data))


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode("utf-8", "surrogateescape")


def described(
    links: Mapping[str, str], about: Mapping[str, Any], report: Mapping[str, Any]
) -> dict[str, bytes]:
    """The files beside the machine that are JSON."""
    return {"about.json": _json(about), "report.json": _json(report), LINKS: _json(links)}
