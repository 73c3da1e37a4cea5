"""Which package has the headers of a kernel: what DKMS builds modules against."""

from __future__ import annotations

import re

_ARCHITECTURE = re.compile(r"\.(?:x86_64|aarch64)$")


def kernel_devel(release: str) -> str:
    """The package with the headers of a kernel on RHEL and Oracle Linux: 5.14.0-427.el9.x86_64+rt has
    kernel-rt-devel-5.14.0-427.el9.x86_64."""
    base, _, kind = release.partition("+")
    kind = kind or ("uek" if "uek." in release else "")
    return f"kernel-{kind}-devel-{base}" if kind else f"kernel-devel-{base}"


def header_package(family: str, release: str) -> tuple[str, str]:
    """Name and version of the package with a kernel's headers for debian, rhel or suse, empty for another
    family. Debian's name has the version; SUSE's release lacks the last part of it, the build's number."""
    if family == "debian":
        return f"linux-headers-{release}", ""
    if family == "rhel":
        base = release.partition("+")[0]
        return kernel_devel(release).removesuffix(f"-{base}"), _ARCHITECTURE.sub("", base)
    if family == "suse":
        version, _, flavour = release.rpartition("-")
        return f"kernel-{flavour}-devel", version
    return "", ""
