"""The NVIDIA kernel module: loaded, on disk for each kernel, waiting in DKMS."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from gpunode.dataclass import dataclass
from gpunode.facts.packages import Packages
from gpunode.host import Host

PARAMETERS = "/proc/driver/nvidia/params"
# Debian builds the same module as nvidia-current and the kernel shows it with an underscore
MODULE_NAMES = ("nvidia", "nvidia_current")
_IN_MODULES_DEP = re.compile(r"^[^:\s]*/nvidia(?:-current)?\.ko(?:\.\w+)?:", re.MULTILINE)
SHIM_KEY = "/var/lib/shim-signed/mok/MOK.der"
DKMS_KEY = "/var/lib/dkms/mok.pub"
AKMODS_KEY = "/etc/pki/akmods/certs/public_key.der"
_KEYS = (SHIM_KEY, DKMS_KEY, AKMODS_KEY)
_LONGEST = 64  # characters; a version has ten
_NUMBERS = re.compile(r"\d{1,9}", re.ASCII)


@dataclass(frozen=True)
class LoadedModule:
    """The running module; `live` is False while it is still coming up or going away."""

    name: str
    version: str
    live: bool
    open: bool


@dataclass(frozen=True)
class Kernel:
    """One installed kernel and whether an NVIDIA module was built for it."""

    release: str
    has_module: bool


@dataclass(frozen=True)
class ModuleFile:
    """The module that the next ``modprobe nvidia`` would load; empty strings where modinfo says nothing."""

    version: str
    signer: str


def version_numbers(text: str) -> tuple[int, ...]:
    """``550.54.14`` as numbers that compare; () if there are none. Drivers have two or three parts."""
    return tuple(int(part) for part in _NUMBERS.findall(text)[:4])


def loaded_module(host: Host) -> LoadedModule | None:
    """From /sys/module; None if the kernel has no NVIDIA module."""
    for name in MODULE_NAMES:
        place = f"/sys/module/{name}"
        if not host.is_dir(place):
            continue
        state = (host.read_text(f"{place}/initstate") or "live").strip()
        version = (host.read_text(f"{place}/version") or "").strip()
        version = version if len(version) <= _LONGEST else ""  # it becomes part of paths
        banner = host.read_text("/proc/driver/nvidia/version") or ""
        return LoadedModule(name, version, state == "live", "Open Kernel Module" in banner)
    return None


def module_loaded(host: Host, name: str) -> bool:
    """Whether the kernel has a module of this name (with underscores), built in or loaded."""
    return host.is_dir(f"/sys/module/{name}")


def parameters(host: Host) -> dict[str, str]:
    """The settings that the loaded driver runs with, names without NVreg_, strings without their quotes; {}
    where /proc/driver/nvidia/params isn't there."""
    pairs = (line.partition(":") for line in (host.read_text(PARAMETERS) or "").splitlines())
    return {name.strip(): value.strip().strip('"') for name, colon, value in pairs if colon}


def has_module_file(host: Host, release: str, name: str) -> bool:
    """Whether a kernel has a module of this name (as its file is called) on disk."""
    index = host.read_text(f"/lib/modules/{release}/modules.dep") or ""
    return any(f"/{name}.ko{end}" in index for end in (":", ".gz:", ".xz:", ".zst:"))


def initramfs_of(host: Host, release: str) -> os.stat_result | None:
    """The initramfs of a kernel, as update-initramfs(8), dracut(8) or kernel-install(8) names it."""
    names = (f"initrd.img-{release}", f"initramfs-{release}.img", f"initrd-{release}")
    return next((found for name in names if (found := host.stat(f"/boot/{name}"))), None)


def installed_kernels(host: Host) -> tuple[Kernel, ...]:
    """Kernels that could be booted: a module index and an image. Removed ones leave no image behind."""
    found = []
    for release in host.listdir("/lib/modules"):
        index = host.read_text(f"/lib/modules/{release}/modules.dep")
        image = host.stat(f"/boot/vmlinuz-{release}") or host.stat(f"/lib/modules/{release}/vmlinuz")
        if index is not None and image:
            found.append(Kernel(release, lists_module(index)))
    return tuple(found)


def lists_module(modules_dep: str) -> bool:
    """Whether a modules.dep names nvidia.ko (compressed or not) anywhere below the kernel's directory."""
    return _IN_MODULES_DEP.search(modules_dep) is not None


def module_for(host: Host, release: str) -> bool:
    """Whether there is an NVIDIA module for this kernel."""
    return lists_module(host.read_text(f"/lib/modules/{release}/modules.dep") or "")


def flavour(release: str) -> str:
    """What tells kernels of one version apart: ``generic`` of 6.8.0-45-generic, ``x86_64+rt`` on RHEL, and
    Oracle's own kernels from Red Hat's. Arch Linux counts releases behind the word (arch1-1)."""
    named = re.search(r"-([a-z][a-z0-9-]*|64kb)$", release)
    if named:
        return "arch" if named[1].startswith("arch") else named[1]
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
    return tuple(int(part) for part in _NUMBERS.findall(bare))


def dkms_versions(host: Host) -> tuple[str, ...]:
    """Driver versions whose source DKMS has, whether built or not."""
    return tuple(version for _, version in _dkms_trees(host))


def dkms_name(host: Host, version: str) -> str:
    """What DKMS calls the driver of this version: ``nvidia/580.159.03``, with Debian's packages
    ``nvidia-current/550.163.01``."""
    names = (name for name, here in _dkms_trees(host) if here == version)
    return f"{next(names, 'nvidia')}/{version}"


def _dkms_trees(host: Host) -> Iterator[tuple[str, str]]:
    for module in host.listdir("/var/lib/dkms"):
        if module == "nvidia" or module.startswith(("nvidia-current", "nvidia-open", "nvidia-srv")):
            yield from (
                (module, name) for name in host.listdir(f"/var/lib/dkms/{module}") if name[:1].isdigit()
            )


def module_file(host: Host) -> ModuleFile | None:
    """What modinfo(8) says of the module on disk; None if modinfo finds none or isn't there."""
    for name in ("nvidia", "nvidia-current"):
        answer = host.run(["modinfo", "-F", "version", name], timeout=5.0)
        if answer.ok and answer.stdout.strip():
            signer = host.run(["modinfo", "-F", "signer", name], timeout=5.0)
            return ModuleFile(answer.stdout.strip(), signer.stdout.strip() if signer.ok else "")
    return None


def module_license(host: Host) -> str:
    """The license of the module on disk: ``Dual MIT/GPL`` for the open one, ``NVIDIA``; empty if unknown."""
    for name in ("nvidia", "nvidia-current"):
        answer = host.run(["modinfo", "-F", "license", name], timeout=5.0)
        if answer.ok and answer.stdout.strip():
            return answer.stdout.strip()
    return ""


def next_version(host: Host, release: str) -> str:
    """The version of the module that kernel `release` would load; empty if modinfo finds none."""
    for name in ("nvidia", "nvidia-current"):
        answer = host.run(["modinfo", "-k", release, "-F", "version", name], timeout=5.0)
        if answer.ok and answer.stdout.strip():
            return answer.stdout.strip()
    return ""


def has_headers(host: Host, release: str) -> bool:
    """Whether modules can be built for this kernel: its build directory is there and configured."""
    return host.stat(f"/lib/modules/{release}/build/include/generated/autoconf.h") is not None


def waiting_keys(host: Host) -> bytes | None:
    """Certificates that MokManager asks about during the next boot (mokutil --import); None if none waits.

    shim keeps them in the variable MokNew of its vendor's GUID, which mokutil writes.
    """
    return host.read_bytes("/sys/firmware/efi/efivars/MokNew-605dab50-e046-4300-abb6-3dd810dd8b23")


def signing_key(host: Host) -> str:
    """The certificate with which this node's own builds of modules are signed (DKMS, akmods); empty if it has
    none."""
    return next((path for path in _KEYS if host.exists(path)), "")


def key_enrolled(host: Host, path: str) -> bool | None:
    """Whether Secure Boot accepts what this certificate signed, as mokutil(1) tells; None if it doesn't."""
    answer = host.run(["mokutil", "--test-key", path], timeout=5.0)
    if "is already enrolled" in answer.stdout:
        return True
    known = ("is not enrolled", "is already in the enrollment")
    return False if any(words in answer.stdout for words in known) else None


def enrolled_keys(host: Host) -> str | None:
    """The certificates that Secure Boot accepts beside the firmware's, as mokutil(1) prints them."""
    answer = host.run(["mokutil", "--list-enrolled"], timeout=5.0)
    return answer.stdout if answer.ok else None


def driver_packages(packages: Packages) -> tuple[str, ...]:
    """Installed driver packages by name; libraries and tools aren't the driver."""
    return tuple(package.name for package in packages.containing("nvidia") if _is_driver(package.name))


def _is_driver(package: str) -> bool:
    named = re.match(r"(kmod-|akmod-)?nvidia-(driver|open|dkms|kernel|kmod|gfx)", package)
    return named is not None or package == "akmod-nvidia"  # RPM Fusion's
