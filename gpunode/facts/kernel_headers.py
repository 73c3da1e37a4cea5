"""Which package has the headers of a kernel: what DKMS builds modules against."""

from __future__ import annotations

import re

_AMAZONS_FIRST = "6.1"
_ARCHITECTURE = re.compile(r"\.(?:x86_64|aarch64)$")


def kernel_devel(release: str) -> str:
    """The package with the headers of a kernel on RHEL and Oracle Linux: 5.14.0-427.el9.x86_64+rt has
    kernel-rt-devel-5.14.0-427.el9.x86_64. Amazon Linux 2023's kernels after its first have their series in
    the name: kernel6.12-devel-6.12.40-63.114.amzn2023.x86_64."""
    base, _, kind = release.partition("+")
    series = re.match(r"\d+\.\d+", base)
    if series and ".amzn2023" in base and series[0] != _AMAZONS_FIRST:
        return f"kernel{series[0]}-devel-{base}"
    kind = kind or ("uek" if "uek." in release else "")
    return f"kernel-{kind}-devel-{base}" if kind else f"kernel-devel-{base}"


def linux_headers(release: str) -> str:
    """The package with the headers of a kernel on Debian and Ubuntu. Proxmox VE has its own kernels, and from
    6.5 on its own name for them."""
    if release.endswith("-pve"):
        numbers = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
        return f"{'proxmox' if numbers >= (6, 5) else 'pve'}-headers-{release}"
    return f"linux-headers-{release}"


def header_package(family: str, release: str) -> tuple[str, str]:
    """Name and version of the package with a kernel's headers for debian, rhel or suse, empty for another
    family. Debian's name has the version; SUSE's release lacks the last part of it, the build's number."""
    if family == "debian":
        return linux_headers(release), ""
    if family == "rhel":
        base = release.partition("+")[0]
        return kernel_devel(release).removesuffix(f"-{base}"), _ARCHITECTURE.sub("", base)
    if family == "suse":
        version, _, flavour = release.rpartition("-")
        return f"kernel-{flavour}-devel", version
    return "", ""
