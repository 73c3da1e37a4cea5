"""The fabric manager: whether it runs, its version, and what it has logged since it was last started."""

from __future__ import annotations

import re

from gpunode.dataclass import dataclass
from gpunode.facts.packages import Packages
from gpunode.host import Host

LOG = "/var/log/fabricmanager.log"
UNIT = "nvidia-fabricmanager.service"
PROGRAM = "nv-fabricmanager"
_PACKAGES = ("nvidia-fabricmanager", "nvidia-fabric-manager")
_NOT_IT = ("-dev", "-devel")
_START = "is running with the following configuration options"
_TAIL_BYTES = 4 << 20  # its log may grow to a gigabyte
_VERSIONS = r"driver interface version ([\d.]+)\s+don't match with driver version ([\d.]+)"
_TOPOLOGY = "detected number of NVSwitches don't match"
_SWITCH_ERROR = r"detected NVSwitch (non-)?fatal error (\d+)"


@dataclass(frozen=True)
class LogFinding:
    """One telling line of the log. `kind`: version, topology, fatal or non-fatal; `text` without its time."""

    kind: str
    line: int
    text: str


def package_version(packages: Packages) -> tuple[str, str] | None:
    """Name and upstream version of the installed fabric manager; None if no package brings one."""
    for package in packages.starting(*_PACKAGES):
        if not package.name.endswith(_NOT_IT) and re.fullmatch(r"[\d.]+", package.upstream):
            return package.name, package.upstream
    return None


def read_log(host: Host) -> tuple[LogFinding, ...]:
    """What it has logged since its last start, each kind once, the last line of it. () without a log.

    The border is the line that it writes when it starts: its times are local ones, which tell no boot.
    """
    data = host.read_bytes(LOG)
    return parse_log(data[-_TAIL_BYTES:].decode("utf-8", "replace"), _lines_before(data)) if data else ()


def _lines_before(data: bytes) -> int:
    return data[:-_TAIL_BYTES].count(b"\n") if len(data) > _TAIL_BYTES else 0


def parse_log(text: str, skipped: int = 0) -> tuple[LogFinding, ...]:
    """The findings of a log whose first `skipped` lines were left out."""
    lines = text.splitlines()
    start = max((number for number, line in enumerate(lines) if _START in line), default=0)
    found: dict[str, LogFinding] = {}
    for number, line in enumerate(lines[start:], start + skipped + 1):
        kind = _kind(line)
        if kind:
            found[kind] = LogFinding(kind, number, re.sub(r"^(?:\[[^\]]*\]\s*)+", "", line)[:300])
    return tuple(found.values())


def _kind(line: str) -> str:
    if _TOPOLOGY in line:
        return "topology"
    if re.search(_VERSIONS, line):
        return "version"
    found = re.search(_SWITCH_ERROR, line) if "NVSwitch" in line else None
    return ("non-fatal" if found[1] else "fatal") if found else ""


def versions_in(text: str) -> tuple[str, str] | None:
    """The fabric manager's version and the driver's, from the line in which it refuses the driver."""
    found = re.search(_VERSIONS, text)
    return (found[1], found[2]) if found else None
