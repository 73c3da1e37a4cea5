"""Builds of the kernel module by DKMS and akmods, why one failed, and signatures that Secure Boot accepts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from gpunode.host import Host

_TREE = "/var/lib/dkms"
_AKMODS = "/var/cache/akmods"  # KMOD/VERSION-for-KERNEL.failed.log (akmodsbuild(1))
_TAIL_BYTES = 1 << 20
_REALTIME = "is a PREEMPT_RT kernel"  # NVIDIA's conftest.sh
_FORBIDDEN = "GPL-incompatible module nvidia"  # a symbol that this kernel keeps from the proprietary module
# of the driver's sources, or of the kernel's headers below them; failures of the compiler itself don't count
_ERROR = r"\S+\.[ch]:\d+:\d+: error: "


class FailedBuild(NamedTuple):
    """The first line with the reason, with its number (None in a log too long to be read from its start);
    `realtime` if the driver refuses the kernel as a realtime one."""

    path: str
    line: int | None
    text: str
    version: str
    realtime: bool


def failed_build(host: Host, release: str) -> FailedBuild | None:
    """The last failed build for this kernel, None if there was none, or no compiler error in it."""
    for path, version in _logs(host, release):
        text = host.read_tail(path, _TAIL_BYTES)
        for number, line in enumerate(text.splitlines(), 1):
            realtime = _REALTIME in line
            if realtime or _FORBIDDEN in line or (" error: " in line and re.search(_ERROR, line)):
                whole = number if len(text) < _TAIL_BYTES else None
                return FailedBuild(path, whole, line.strip()[:200], version, realtime)
    return None


def _logs(host: Host, release: str) -> Iterator[tuple[str, str]]:
    """Logs of failed builds for this kernel, each with the driver's version."""
    for module in host.listdir(_TREE):
        if not module.startswith("nvidia"):
            continue
        for version in host.listdir(f"{_TREE}/{module}"):
            path = f"{_TREE}/{module}/{version}/build/make.log"
            lines = host.read_tail(path, _TAIL_BYTES).splitlines()
            if any(f"for kernel {release} " in f"{line} " for line in lines[:3]):
                yield path, version
    for module in host.listdir(_AKMODS):
        if module.startswith("nvidia"):
            for path in host.glob(f"{_AKMODS}/{module}", f"*-for-{release}.failed.log"):
                yield path, path.rpartition("/")[2].partition("-")[0]


def dkms_name(host: Host, version: str) -> str:
    """DKMS's name for this driver version: ``nvidia/580.159.03``, with Debian's packages
    ``nvidia-current/550.163.01``."""
    names = (name for name, here in dkms_trees(host) if here == version)
    return f"{next(names, 'nvidia')}/{version}"


def dkms_trees(host: Host) -> Iterator[tuple[str, str]]:
    """DKMS's names of drivers and their versions with source in DKMS, whether built or not."""
    for module in host.listdir(_TREE):
        if module == "nvidia" or module.startswith(("nvidia-current", "nvidia-open", "nvidia-srv")):
            yield from ((module, name) for name in host.listdir(f"{_TREE}/{module}") if name[:1].isdigit())


# Secure Boot: whether the firmware enforces signatures, and the certificates that it accepts.

_SECURE_BOOT = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
SHIM_KEY = "/var/lib/shim-signed/mok/MOK.der"
DKMS_KEY = "/var/lib/dkms/mok.pub"
AKMODS_KEY = "/etc/pki/akmods/certs/public_key.der"
_KEYS = (SHIM_KEY, DKMS_KEY, AKMODS_KEY)


def enforces_signatures(host: Host) -> bool | None:
    """Whether the firmware enforces signatures; None if unknown (no EFI).

    An efivars file contains four bytes of attributes, then the variable: one byte, 1 for on.
    """
    data = host.read_bytes(_SECURE_BOOT)
    return data[4] == 1 if data is not None and len(data) == 5 else None


def waiting_keys(host: Host) -> bytes | None:
    """Certificates for which MokManager prompts during the next boot (mokutil --import); None if there are
    none. shim keeps them in the variable MokNew of its vendor's GUID, which mokutil writes."""
    return host.read_bytes("/sys/firmware/efi/efivars/MokNew-605dab50-e046-4300-abb6-3dd810dd8b23")


def signing_key(host: Host) -> str:
    """The certificate with which this node's own builds of modules are signed (DKMS, akmods); empty if it has
    none."""
    return next((path for path in _KEYS if host.exists(path)), "")


def key_enrolled(host: Host, path: str) -> bool | None:
    """Whether Secure Boot accepts modules signed with this certificate, according to mokutil(1); None if it
    doesn't report it."""
    answer = host.run(["mokutil", "--test-key", path], timeout=5.0)
    if "is already enrolled" in answer.stdout:
        return True
    known = ("is not enrolled", "is already in the enrollment")
    return False if any(words in answer.stdout for words in known) else None


def enrolled_keys(host: Host) -> str | None:
    """The certificates that Secure Boot accepts beside the firmware's, as mokutil(1) prints them."""
    answer = host.run(["mokutil", "--list-enrolled"], timeout=5.0)
    return answer.stdout if answer.ok else None
