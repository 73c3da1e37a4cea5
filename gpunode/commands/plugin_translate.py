"""`gpunode plugin check-config --from gke`: the configuration of GKE's device plugin as gpunode's."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpunode.errors import ConfigError, UsageError
from gpunode.facts.located import MAX_STREAM_BYTES
from gpunode.host import Host
from gpunode.output.result import ErrorInfo, ExitCode, Result, Style, Text
from gpunode.plugin.config.gke import Left, WrongInput, documents, translate
from gpunode.plugin.config.resolve import settled

KIND = "PluginConfigTranslation"
_FORM = "it is gpu_config.json of a GKE node, or the ConfigMap of GKE's device plugin"
_STDIN_BYTES = MAX_STREAM_BYTES + 1  # more is refused by the reader, and not cut off


@dataclass(frozen=True)
class PluginConfigTranslation:
    """`data` of the envelope: our config file as a tree and as text, and what has no place in it."""

    source: str
    file: str
    config: dict[str, Any]
    text: str
    left: tuple[Left, ...]


def run(host: Host, source: str, file: str) -> Result:
    """Exit 1 where the file can't be meant, or what it says is wrong in any plugin."""
    if not file:
        raise UsageError("--from needs a file", hint=f"gpunode plugin check-config --from {source} FILE")
    shown = "standard input" if file == "-" else file
    content = _read(host, file)
    try:
        found, text = settled(translate(documents(content)))
    except WrongInput as error:
        raise ConfigError(f"{shown}: {error.message}", hint=error.hint or _FORM) from error
    data = PluginConfigTranslation(source, file, found.config, text, found.left)
    if found.problems:
        errors = tuple(ErrorInfo("config", f"{shown}: {one}") for one in found.problems)
        return Result(KIND, data, "error", ExitCode.FAILED, _messages(found.left), errors)
    lines = tuple(Text(line, Style.COMMAND) for line in text.splitlines())
    return Result(KIND, data, "warn" if found.left else "ok", messages=_messages(found.left), blocks=lines)


def _messages(left: tuple[Left, ...]) -> tuple[str, ...]:
    return tuple(f"left: {one.text}" for one in left)


def _read(host: Host, file: str) -> bytes:
    """The file lies on the node, or here if the path is relative, as with --config-file; - is stdin."""
    if file == "-":
        return sys.stdin.buffer.read(_STDIN_BYTES)
    reader = host if file.startswith("/") else Host(Path("/"), host.environ)
    path = str(Path(file).absolute())
    data = None if reader.is_dir(path) else reader.read_bytes(path)
    if data is None:
        raise ConfigError(f"{file} is no file", hint="name a file, or - for standard input")
    return data
