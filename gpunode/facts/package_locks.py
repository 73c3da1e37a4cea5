"""What keeps packages at a version, beside dpkg's own holds: pins of apt, locks of dnf and of zypp, and the
branches that dnf's modules are."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

from gpunode.host import Host

_MODULES = "/etc/dnf/modules.d"


def locked(host: Host, family: str, *packages: str) -> bool:
    """Whether one of these packages is."""
    from gpunode.facts.auto_upgrades import apt_pins, dnf_locks, zypp_locks

    find = {"debian": apt_pins, "rhel": dnf_locks, "suse": zypp_locks}.get(family)
    patterns = tuple(find(host)) if find else ()
    return any(fnmatchcase(package, pattern) for package in packages for pattern in patterns)


def module_stream(host: Host, module: str) -> str:
    """The stream of a dnf module that is enabled here (``580-dkms``), empty if none is: packages of others
    aren't seen then (dnf's modularity)."""
    text = host.read_text(f"{_MODULES}/{module}.module") or ""
    if re.search(r"^state\s*=\s*enabled\s*$", text, re.MULTILINE) is None:
        return ""
    stream = re.search(r"^stream\s*=\s*(\S+)\s*$", text, re.MULTILINE)
    return stream[1] if stream else ""
