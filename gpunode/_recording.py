"""`Host`'s third drawer: what a recorded machine holds that can't be a file, checked when it is read."""

from __future__ import annotations

from typing import Any

from gpunode.errors import ConfigError
from gpunode.pattern import pattern

RECORDING = ".gpunode/recording.json"
KERNEL_LOG = ".gpunode/kernel.log"
SECTIONS = ("commands", "devices", "sockets", "daemons", "nvml", "filesystems", "modes", "unreadable")
_DEVICE_NUMBERS = (("major", None), ("minor", None), ("gid", 0))
_OCTAL = pattern(r"[0-7]{1,4}")


def parse_recording(text: str) -> dict[str, Any]:
    """The recording's sections; `ConfigError` names the entry that can't be right."""
    import json

    try:
        loaded = json.loads(text)
    except RecursionError as error:
        raise ConfigError(f"{RECORDING} is nested too deep") from error
    except ValueError as error:
        raise ConfigError(f"{RECORDING} is not JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{RECORDING} does not hold a JSON object")
    for section in SECTIONS:
        entries = loaded.setdefault(section, {})
        if not isinstance(entries, dict):
            raise ConfigError(f"{RECORDING}: {section} is no JSON object")
        for key, value in entries.items():
            problem = _problem(section, value)
            if problem:
                raise ConfigError(f"{RECORDING}: {section}: {key!r}: {problem}")
    return loaded


def _problem(section: str, value: Any) -> str:
    """What is wrong with one entry, empty if nothing. `nvml` is judged by its reader, which has the nouns."""
    if section == "sockets":
        return "" if isinstance(value, str) else "the state is no string"
    if section == "unreadable":
        return "" if isinstance(value, str) else "the reason is no string"
    if section == "modes":
        return "" if isinstance(value, str) and _OCTAL.fullmatch(value) else 'the mode is no text like "0644"'
    if section == "nvml":
        return ""
    if not isinstance(value, dict):
        return "not a JSON object"
    if section == "filesystems":
        whole = all(type(number) is int and number >= 0 for number in value.values())
        return "" if whole else "size, left, inodes and inodesLeft are whole numbers"
    if section == "commands":
        texts = all(isinstance(value.get(name, ""), str) for name in ("stdout", "stderr"))
        return (
            "" if texts and type(value.get("code", 0)) is int else "code, stdout or stderr has a wrong type"
        )
    if section == "devices":
        numbers = all(type(value.get(name, default)) is int for name, default in _DEVICE_NUMBERS)
        mode = value.get("mode")
        octal = isinstance(mode, str) and _OCTAL.fullmatch(mode) is not None
        return (
            ""
            if numbers and octal
            else 'a device has whole numbers major, minor and gid, and a mode like "0666"'
        )
    return ""
