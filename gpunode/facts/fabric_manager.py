"""The fabric manager: whether it runs, its version, and what it has logged since it was last started."""

from __future__ import annotations

import re

from gpunode.dataclass import dataclass
from gpunode.facts.packages import Packages
from gpunode.host import Host

LOG = "/var/log/fabricmanager.log"
UNIT = "nvidia-fabricmanager.service"
PROGRAM = "nv-fabricmanager"
IB_UMAD = "ib_umad"
_SUBNET_MANAGER = "/opt/nvidia/nvlsm/sbin/nvlsm"  # which the fabric manager starts itself
_PACKAGES = ("nvidia-fabricmanager", "nvidia-fabric-manager")
_NOT_IT = "-dev"
_START = "is running with the following configuration options"
_TAIL_BYTES = 1 << 20  # its log may grow to a gigabyte
_NUMBER = r"(\d+(?:\.\d+)+)"
_VERSIONS = rf"driver interface version {_NUMBER}\s+don't match with driver version {_NUMBER}"
_TOPOLOGY = "detected number of NVSwitches don't match"
_SWITCH_ERROR = r"detected NVSwitch (non-)?fatal error (\d+)"


@dataclass(frozen=True)
class LogFinding:
    """One telling line of the log. `kind`: version, topology, fatal or non-fatal; `text` without its time."""

    kind: str
    line: int | None
    text: str


def package_version(packages: Packages) -> tuple[str, str] | None:
    """Name and upstream version of the installed fabric manager; None if no package brings one."""
    for package in packages.starting(*_PACKAGES):
        if _NOT_IT not in package.name and re.fullmatch(r"[\d.]+", package.upstream):
            return package.name, package.upstream
    return None


def lacking(host: Host) -> tuple[tuple[str, str, str], ...]:
    """What the fabric manager needs on a Blackwell baseboard (its user guide) and isn't here: place, what is
    seen there, and the package or the module that mends it."""
    found = []
    if not host.is_file(_SUBNET_MANAGER):
        found.append((_SUBNET_MANAGER, "not installed", "nvlsm"))
    if host.which("ibstat") is None:
        place, value = host.unsafe_program("ibstat") or ("ibstat", "not installed")
        found.append((place, value, "infiniband-diags"))
    if not host.is_dir(f"/sys/module/{IB_UMAD}"):
        found.append((f"/sys/module/{IB_UMAD}", "not loaded", IB_UMAD))
    return tuple(found)


def read_log(host: Host) -> tuple[LogFinding, ...]:
    """What it has logged since its last start, each kind once, the last line of it. () without a log.

    The border is the line that it writes when it starts: its times are local ones, which tell no boot.
    """
    text = host.read_tail(LOG, _TAIL_BYTES)
    found = host.stat(LOG) if text else None
    return parse_log(text, whole=found is not None and found.st_size <= _TAIL_BYTES)


def parse_log(text: str, *, whole: bool = True) -> tuple[LogFinding, ...]:
    """The findings of a log; where only its end is there, nobody knows the number of a line."""
    lines = text.splitlines()
    start = max((number for number, line in enumerate(lines) if _START in line), default=0)
    found: dict[str, LogFinding] = {}
    for number, line in enumerate(lines[start:], start + 1):
        kind = _kind(line)
        if kind:
            message = re.sub(r"^(?:\[[^\]]*\]\s*)+", "", line)[:300]
            found[kind] = LogFinding(kind, number if whole else None, message)
    return tuple(found.values())


def _kind(line: str) -> str:
    if _TOPOLOGY in line:
        return "topology"
    if "driver version" in line and re.search(_VERSIONS, line):
        return "version"
    found = re.search(_SWITCH_ERROR, line) if "NVSwitch" in line else None
    return ("non-fatal" if found[1] else "fatal") if found else ""


def versions_in(text: str) -> tuple[str, str] | None:
    """The fabric manager's version and the driver's, from the line in which it refuses the driver."""
    found = re.search(_VERSIONS, text)
    return (found[1], found[2]) if found else None
