"""Who holds a package manager's lock, from the kernel's list of locks (proc_locks(5))."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from gpunode.errors import GpunodeError
from gpunode.host import Host
from gpunode.packages.manager import Lock

_LINE = re.compile(r"^\d+: (?:POSIX|FLOCK|OFDLCK)\s+\S+\s+WRITE (-?\d+) ([0-9a-f]+):([0-9a-f]+):(\d+) ")
_AT_WORK = (
    *("apt", "apt-get", "aptitude", "dpkg", "unattended-upgr", "packagekitd", "synaptic", "apt.systemd.dai"),
    *("dnf", "dnf5", "dnf-automatic", "yum", "rpm", "zypper", "YaST", "y2base"),
)


def holder(host: Host, paths: Sequence[str]) -> Lock | None:
    """The first of these files that another process holds locked; None if none is, or it can't be told.

    A lock that an overlay or a container hides isn't seen; the manager itself says so when it is started.
    """
    listed = [match for line in _locks(host).splitlines() if (match := _LINE.match(line))]
    for path in paths:
        found = host.stat(path) if listed else None
        for match in listed if found else ():
            assert found is not None
            if int(match[4]) != found.st_ino or int(match[1]) == os.getpid():
                continue
            pid = max(0, int(match[1]))
            name = _name(host, pid)
            same_device = (int(match[2], 16), int(match[3], 16)) == (
                os.major(found.st_dev),
                os.minor(found.st_dev),
            )
            if same_device or name in _AT_WORK:  # a file of btrfs or an overlay has two device numbers
                return Lock(path, pid, name)
    return None


def _locks(host: Host) -> str:
    try:
        return host.read_text("/proc/locks") or ""
    except GpunodeError:
        return ""


def _name(host: Host, pid: int) -> str:
    try:
        return (host.read_text(f"/proc/{pid}/comm") or "").strip() if pid else ""
    except GpunodeError:
        return ""
