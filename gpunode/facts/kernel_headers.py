"""Which package has the headers of a kernel: what DKMS builds modules against."""

from __future__ import annotations


def kernel_devel(release: str) -> str:
    """The package with the headers of a kernel on RHEL and Oracle Linux: 5.14.0-427.el9.x86_64+rt has
    kernel-rt-devel-5.14.0-427.el9.x86_64."""
    base, _, kind = release.partition("+")
    kind = kind or ("uek" if "uek." in release else "")
    return f"kernel-{kind}-devel-{base}" if kind else f"kernel-devel-{base}"


def header_package(family: str, release: str) -> tuple[str, str]:
    """Name and version of the package with a kernel's headers for debian, rhel or suse; the version is empty
    where the name has it, both are for another family. SUSE's release is the package's version without the
    build number that rpm has behind it."""
    if family == "debian":
        return f"linux-headers-{release}", ""
    if family == "rhel":
        return kernel_devel(release), ""
    if family == "suse":
        version, _, flavour = release.rpartition("-")
        return f"kernel-{flavour}-devel", version
    return "", ""
