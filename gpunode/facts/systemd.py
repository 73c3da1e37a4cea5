"""The command that systemd would start: a unit's ExecStart with its drop-ins and environment files, read from
disk.

Only files are read (systemd.unit(5), systemd.service(5), systemd.exec(5)), so this works on a stopped
daemon, a recorded machine and a node whose systemd isn't reachable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from gpunode.host import Host
from gpunode.host.files import SMALL_BYTES

# systemd.unit(5), "System Unit Search Path": the first directory that has a file of a name wins
UNIT_DIRECTORIES = (
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
)
_VARIABLE = re.compile(r"\$\{(\w+)\}|\$(\w+)")
_PREFIXES = "@-:+!|"  # systemd.service(5), "COMMAND LINES": special executable prefixes


class SystemdUnit(NamedTuple):
    """One service unit. `files` are the fragment and its drop-ins; `argv` is the last ExecStart, expanded.

    `environment` are the variables that its files and environment files set.
    """

    name: str
    files: tuple[str, ...]
    argv: tuple[str, ...]
    environment: Mapping[str, str] = MappingProxyType({})

    @property
    def program(self) -> str:
        """Base name of the program that the unit starts; empty if it starts none."""
        return self.argv[0].rpartition("/")[2] if self.argv else ""


def read_unit(host: Host, name: str, places: tuple[str, ...] = UNIT_DIRECTORIES) -> SystemdUnit | None:
    """The unit `name` (with its suffix) in `places`; None if there is none or it is masked."""
    fragment = next((f"{place}/{name}" for place in places if host.is_file(f"{place}/{name}")), None)
    if fragment is None:
        return None
    files = (fragment, *_drop_ins(host, name, places))
    stem = name.rpartition(".")[0]
    specifiers = {"%%": "%", "%n": name, "%N": stem, "%p": stem}  # systemd.unit(5), "SPECIFIERS"
    environment: dict[str, str] = {}
    command = ""
    # a drop-in that this user may not read must not hide the rest
    texts = (host.text_or_empty(path, SMALL_BYTES) for path in files)
    for key, value in (pair for text in texts for pair in _service_settings(text)):
        if key == "Environment":
            environment |= dict(word.split("=", 1) for word in _words(value) if "=" in word)
        elif key == "EnvironmentFile":
            file = re.sub(r"%.", lambda match: specifiers.get(match[0], match[0]), value)
            environment |= _environment_file(host, file)
        elif key == "ExecStart":
            command = value  # an empty value resets the list; the last one is what a simple service runs
    return SystemdUnit(name, files, expand(command.lstrip(_PREFIXES), environment), environment)


def _drop_ins(host: Host, name: str, places: tuple[str, ...]) -> tuple[str, ...]:
    """Drop-in files in the order systemd applies them; a name in an earlier directory hides later ones."""
    result: dict[str, str] = {}
    for place in places:
        for path in host.glob(f"{place}/{name}.d", "*.conf"):
            result.setdefault(path.rpartition("/")[2], path)
    return tuple(result[key] for key in sorted(result))


def _service_settings(text: str) -> Iterator[tuple[str, str]]:
    """Key and value of every setting in [Service], continuation lines joined."""
    section = ""
    for line in re.sub(r"\\\n", " ", text).splitlines():
        stripped = line.strip()
        if stripped.startswith("["):
            section = stripped
        elif section == "[Service]" and "=" in stripped and stripped[0] not in "#;":
            key, _, value = stripped.partition("=")
            yield key.strip(), value.strip()


def _words(text: str) -> list[str]:
    import shlex

    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _environment_file(host: Host, value: str) -> dict[str, str]:
    """Variables of an EnvironmentFile; like systemd, a leading ``-`` means that it may be missing."""
    variables: dict[str, str] = {}
    for line in host.text_or_empty(value.lstrip("-"), SMALL_BYTES).splitlines():
        stripped = line.strip()
        if stripped and stripped[0] not in "#;" and "=" in stripped:
            key, _, raw = stripped.partition("=")
            variables[key.strip()] = " ".join(_words(raw))
    return variables


def expand(command: str, environment: dict[str, str]) -> tuple[str, ...]:
    """Words of a command line: ``$VAR`` alone splits into words, ``${VAR}`` and embedded ones don't."""
    words: list[str] = []
    for word in _words(command):
        alone = re.fullmatch(r"\$(\w+)", word)
        if alone:
            words += _words(environment.get(alone[1], ""))
        else:
            words.append(_VARIABLE.sub(lambda match: environment.get(match[1] or match[2], ""), word))
    return tuple(words)
