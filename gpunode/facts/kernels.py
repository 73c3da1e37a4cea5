"""Installed kernels: their modules on disk, their order, and the packages with their headers."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from gpunode.facts.driver import MODULE_FILES
from gpunode.host import Host


class Kernel(NamedTuple):
    """One installed kernel and whether an NVIDIA module was built for it."""

    release: str
    has_module: bool


def modules_dep(release: str) -> str:
    """The index of a kernel's modules on disk (modules.dep(5))."""
    return f"/lib/modules/{release}/modules.dep"


def has_module_file(host: Host, release: str, *names: str) -> bool:
    """Whether a kernel has one of these modules on disk, by default NVIDIA's."""
    return lists_module(host.read_text(modules_dep(release)) or "", *names)


def initramfs_of(host: Host, release: str) -> os.stat_result | None:
    """The initramfs of a kernel, as update-initramfs(8), dracut(8) or kernel-install(8) names it."""
    names = (f"initrd.img-{release}", f"initramfs-{release}.img", f"initrd-{release}")
    return next((status for name in names if (status := host.stat(f"/boot/{name}"))), None)


def installed_kernels(host: Host) -> tuple[Kernel, ...]:
    """Kernels that could be booted: a module index and an image. Removed ones leave no image behind."""
    kernels = []
    for release in host.listdir("/lib/modules"):
        index = host.read_text(modules_dep(release))
        image = host.stat(f"/boot/vmlinuz-{release}") or host.stat(f"/lib/modules/{release}/vmlinuz")
        if index is not None and image:
            kernels.append(Kernel(release, lists_module(index)))
    return tuple(kernels)


def lists_module(index: str, *names: str) -> bool:
    """Whether a modules.dep has one of these modules, by default NVIDIA's (compressed or not) anywhere below
    the kernel's directory."""
    ends = (":", ".gz:", ".xz:", ".zst:")
    return any(f"/{name}.ko{end}" in index for name in names or MODULE_FILES for end in ends)


def flavour(release: str) -> str:
    """The part that distinguishes kernels of one version: ``generic`` of 6.8.0-45-generic, ``x86_64+rt`` on
    RHEL, and Oracle's own kernels from Red Hat's. Arch Linux appends the release to it (arch1-1)."""
    match = re.search(r"-([a-z][a-z0-9-]*|64kb)$", release)
    if match:
        return "arch" if match[1].startswith("arch") else match[1]
    return f"{release.rpartition('.')[2]}{'+uek' if 'uek.' in release else ''}"


def newer_kernels(kernels: tuple[Kernel, ...], running: str) -> tuple[Kernel, ...]:
    """Installed kernels of the running one's flavour that are newer: one of them boots next."""
    now = version_key(running)
    same = (kernel for kernel in kernels if flavour(kernel.release) == flavour(running))
    return tuple(kernel for kernel in same if version_key(kernel.release) > now)


def version_key(release: str) -> tuple[int, ...]:
    """A kernel release as numbers, without the digits of the distribution's release (el9_4, deb13) and of the
    architecture: 55.9.1.el10_0 is newer than 55.el10."""
    bare = re.sub(r"\.el\d\w*|\.x86_64|\.aarch64|-(?:cloud-|rt-)?(?:amd64|arm64)$", "", release)
    return tuple(int(part) for part in re.findall(r"\d{1,9}", bare, re.ASCII))


def has_headers(host: Host, release: str) -> bool:
    """Whether modules can be built for this kernel: its build directory exists and is configured."""
    return host.stat(f"/lib/modules/{release}/build/include/generated/autoconf.h") is not None


# Packages with a kernel's headers, which DKMS needs to build modules.

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
