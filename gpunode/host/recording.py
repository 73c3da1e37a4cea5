"""Values of a recorded machine that can't be files, and the error for one that is malformed.

What all sections have in common is checked when a recording is loaded. What NVML, the CRI and the kubelet
reported is checked when it is read, as the class that its reader makes of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

from gpunode.errors import ConfigError
from gpunode.output.typed import PlainError, from_plain

RECORDING = ".gpunode/recording.json"
KERNEL_LOG = ".gpunode/kernel.log"
_MODE = re.compile(r"[0-7]{1,4}")
_AGAIN = "record the machine again; the format is in docs/recorded-machines.md"
_HINT = "correct that key, or record the machine again; the format is in docs/recorded-machines.md"


class _Command(NamedTuple):
    code: int = 0
    stdout: str = ""
    stderr: str = ""


class _Device(NamedTuple):
    major: int
    minor: int
    mode: str
    gid: int = 0


class _Problem(NamedTuple):
    code: str = ""
    message: str = ""


class _Image(NamedTuple):
    """An image's own settings."""

    Env: tuple[str, ...] | None = None


class _DaemonAnswers(NamedTuple):
    """One daemon's; the objects are checked by the clients in `daemons`."""

    info: Mapping[str, Any] = MappingProxyType({})
    version: Mapping[str, Any] | tuple[str, str] = MappingProxyType({})
    status: Mapping[str, Any] = MappingProxyType({})
    config: str | Mapping[str, Any] = ""
    images: Mapping[str, _Image | None] = MappingProxyType({})
    containers: tuple[Mapping[str, Any], ...] = ()
    allocatable: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    pods: tuple[Mapping[str, Any], ...] = ()
    problem: _Problem = _Problem()


class _Recording(NamedTuple):
    """The sections; docs/recorded-machines.md describes them."""

    commands: Mapping[str, _Command]
    devices: Mapping[str, _Device]
    sockets: Mapping[str, str]
    daemons: Mapping[str, _DaemonAnswers]
    nvml: Mapping[str, Any]
    filesystems: Mapping[str, Mapping[str, int]]
    modes: Mapping[str, str]
    unreadable: Mapping[str, str]


def parse_recording(text: str) -> dict[str, Any]:
    """The recording's sections; `ConfigError` names the invalid entry."""
    try:
        loaded = json.loads(text)
    except RecursionError as error:
        raise ConfigError(f"{RECORDING} is nested too deeply", hint=_AGAIN) from error
    except ValueError as error:
        raise ConfigError(f"{RECORDING} is {not_json(text, error)}", hint=_AGAIN) from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{RECORDING} doesn't contain a JSON object", hint=_AGAIN)
    for section in _Recording._fields:
        loaded.setdefault(section, {})
    with naming_the_key():
        recording = from_plain(_Recording, loaded)
        modes = {f"devices.{path}.mode": device.mode for path, device in recording.devices.items()}
        for where, mode in (
            modes | {f"modes.{path}": mode for path, mode in recording.modes.items()}
        ).items():
            if not _MODE.fullmatch(mode):
                raise PlainError(f'{where} must be a mode such as "0644"')
    return loaded


def not_json(text: str, error: ValueError) -> str:
    """What is wrong with a text that can't be parsed; bytes that are no UTF-8 are surrogates in it."""
    at = getattr(error, "pos", 0)
    is_binary = any("\udc80" <= char <= "\udcff" for char in text[at : at + 2])
    return "not UTF-8" if is_binary else f"not JSON: {error}"


@contextmanager
def naming_the_key() -> Iterator[None]:
    """A recorded value of a wrong type is a `ConfigError`, which names its key."""
    try:
        yield
    except PlainError as error:
        raise ConfigError(f"{RECORDING}: {error}", hint=_HINT) from error
