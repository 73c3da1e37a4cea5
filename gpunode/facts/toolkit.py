"""The NVIDIA Container Toolkit: which of its programs are here and how old they are."""

from __future__ import annotations

from gpunode.dataclass import dataclass, replace
from gpunode.facts.daemons import parse_version
from gpunode.host import Host

PROGRAMS = (
    "nvidia-container-runtime",
    "nvidia-container-runtime-hook",
    "nvidia-ctk",
    "nvidia-cdi-hook",
    "nvidia-container-cli",
)
# the GPU operator and the toolkit's own container install here, outside PATH
_OTHER_PLACES = ("/usr/local/nvidia/toolkit", "/run/nvidia/toolkit")
_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True)
class Toolkit:
    """`programs` maps each program found to its path. `version` is () if none of them tells it."""

    programs: dict[str, str]
    version: tuple[int, ...]
    version_source: str


def find_toolkit(host: Host) -> Toolkit:
    """Look for the toolkit's programs and ask the first one that knows for its version."""
    found: dict[str, str] = {}
    for name in PROGRAMS:
        path = host.which(name) or _elsewhere(host, name)
        if path:
            found[name] = path
    version, source = _version(host, found)
    return Toolkit(found, version, source)


def hook_program(host: Host, name: str) -> str | None:
    """Where one of the toolkit's programs is, the same from a shell and from a systemd unit: the system's
    directories come before whatever PATH says.
    """
    return replace(host, environ={}).which(name) or host.which(name) or _elsewhere(host, name)


def _elsewhere(host: Host, name: str) -> str | None:
    return next((f"{place}/{name}" for place in _OTHER_PLACES if host.executable(f"{place}/{name}")), None)


def _version(host: Host, programs: dict[str, str]) -> tuple[tuple[int, ...], str]:
    """nvidia-ctk exists from 1.9; before it the CLI had the toolkit's number.

    The runtime is asked last and only believed for 1.x: as its own package it counted to 3.14.
    """
    for name in ("nvidia-ctk", "nvidia-container-cli", "nvidia-container-runtime"):
        if name not in programs:
            continue
        answer = host.run([programs[name], "--version"], timeout=_TIMEOUT_SECONDS)
        version = parse_version(answer.stdout) if answer.ok else ()
        if version and (name != "nvidia-container-runtime" or version[0] == 1):
            return version, f"{programs[name]} --version"
    return (), ""
