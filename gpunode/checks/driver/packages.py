"""Fixes that depend on how this very node gets its driver: repositories, DKMS, prebuilt modules, keys."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from gpunode.checks import fixes
from gpunode.errors import GpunodeError
from gpunode.facts import driver
from gpunode.facts.node import Node
from gpunode.facts.system import Distribution
from gpunode.result import Fix

if TYPE_CHECKING:
    from gpunode.facts.gpu_support import Supports

_CUDA_REPOSITORY = "developer.download.nvidia.com/compute/cuda/repos"
_REPOSITORY_DIRECTORIES = ("/etc/apt/sources.list.d", "/etc/yum.repos.d", "/etc/zypp/repos.d")
_FIRST_TURING = 0x1E00  # the open kernel modules drive nothing before it; branch 580 is the last that does
# Ubuntu's prebuilt modules: kernel/nvidia-550srv-open/nvidia.ko is linux-modules-nvidia-550-server-open-...
_PREBUILT = re.compile(r"^kernel/nvidia-(\d+)(srv)?(-open)?/nvidia\.ko", re.MULTILINE)
_KEYS = ("/var/lib/shim-signed/mok/MOK.der", "/var/lib/dkms/mok.pub", "/etc/pki/akmods/certs/public_key.der")


def install_driver(node: Node) -> Fix | None:
    """The driver from Ubuntu or NVIDIA's repository, which is added if it isn't there; None: unknown."""
    if node.distribution.id == "ubuntu":
        tool = "" if node.host.which("ubuntu-drivers") else "apt install ubuntu-drivers-common && "
        return Fix(f"{tool}ubuntu-drivers install --gpgpu && reboot", True, "reboot")
    install = _install_command(node)
    name = _repository_name(node.distribution)
    if not install or not name:
        return None
    repository = "" if has_repository(node) else _add_repository(node, name)
    return Fix(f"{repository}{install} && reboot", True, "reboot")


def suited_driver(node: Node, supports: Supports) -> Fix | None:
    """The driver that these GPUs need, instead of one that drives others. Ubuntu's own packages carry branch
    and kind in their names; elsewhere `install_driver` knows old GPUs from new ones."""
    if node.distribution.id != "ubuntu":
        return install_driver(node)
    if has_repository(node):
        return Fix(f"{_install_command(node)} && reboot", True, "reboot")
    here = next(iter(driver.version_numbers(node.driver_version)), 0)
    branch = min(here, supports.max) if supports.max else here
    kind = "" if supports.module == "proprietary" else "-open"
    return Fix(f"apt install nvidia-driver-{branch}-server{kind} && reboot", True, "reboot")


_AGAIN = {"debian": "apt install --reinstall", "rhel": "dnf reinstall", "suse": "zypper install --force"}
_NEWER = {"debian": "apt install", "rhel": "dnf upgrade", "suse": "zypper update"}


def reinstall(node: Node, names: Iterable[str]) -> Fix | None:
    """These packages again, over whatever else wrote their files; None on an unknown distribution."""
    command = _AGAIN.get(node.distribution.family)
    return Fix(f"{command} {' '.join(names)} && reboot", True, "reboot") if command else None


def upgrade_driver(node: Node) -> Fix:
    """The module's packages in the version that the repositories have by now."""
    names, family = driver.driver_packages(node.packages), node.distribution.family
    if not names or family not in _NEWER:
        return fixes.UPGRADE_DRIVER.for_family(family)
    return Fix(f"{_NEWER[family]} {' '.join(names)} && reboot", True, "reboot")


def _legacy(node: Node) -> bool:
    numbers = [int(gpu.device_id, 16) for gpu in node.gpus if re.fullmatch(r"0x[0-9a-f]{4}", gpu.device_id)]
    return any(number < _FIRST_TURING for number in numbers)


def _install_command(node: Node) -> str:
    legacy = _legacy(node)
    system = node.distribution
    if system.family == "debian":
        return f"apt install {'cuda-drivers-580' if legacy else 'nvidia-open'}"
    if system.family == "suse":
        old = "nvidia-driver-G06-kmp-default nvidia-compute-utils-G06"
        return f"zypper install {old if legacy else 'nvidia-open'}"
    modular = system.id == "amzn" or _repository_name(system) in ("rhel8", "rhel9")
    if system.family != "rhel" or (legacy and not modular):
        return ""
    packages = "nvidia-driver nvidia-driver-cuda" if legacy else "nvidia-open"
    stream = f"dnf module enable nvidia-driver:{'580-dkms' if legacy else 'open-dkms'} && "
    return f"{stream if modular else ''}dnf install kernel-devel-$(uname -r) {packages}"


def _repository_name(system: Distribution) -> str:
    """NVIDIA's directory for this distribution, such as rhel9 or debian12; empty if there is none."""
    major = system.version.partition(".")[0]
    names = {"debian": "debian", "fedora": "fedora", "amzn": "amzn", "sles": "sles", "opensuse": "opensuse"}
    name = names.get(system.id.partition("-")[0]) or ("rhel" if system.family == "rhel" else "")
    return f"{name}{major}" if name and major.isdigit() and len(major) < 5 else ""


def has_repository(node: Node) -> bool:
    """Whether NVIDIA's repository is among this node's."""
    for directory in _REPOSITORY_DIRECTORIES:
        for path in node.host.glob(directory, "*"):
            try:
                if _CUDA_REPOSITORY in (node.host.read_text(path) or ""):
                    return True
            except GpunodeError:
                continue
    return False


def _add_repository(node: Node, name: str) -> str:
    architecture = "sbsa" if node.host.exists("/lib/ld-linux-aarch64.so.1") else "x86_64"
    place = f"https://{_CUDA_REPOSITORY}/{name}/{architecture}"
    if node.distribution.family == "debian":
        package = "cuda-keyring_1.1-1_all.deb"
        return f"curl -fsSLO {place}/{package} && dpkg -i {package} && apt update && "
    if node.distribution.family == "suse":
        return f"zypper addrepo {place}/cuda-{name}.repo && "
    return f"curl -fsSL {place}/cuda-{name}.repo -o /etc/yum.repos.d/cuda-{name}.repo && "


def build_module(node: Node, release: str) -> Fix:
    """Get the module for kernel `release` the way the other kernels' came: DKMS, akmods or packages.

    For the running kernel it is loaded afterwards.
    """
    load = " && modprobe nvidia" if release == node.kernel else ""
    command = _without_dkms(node, release)
    if command:
        return Fix(command + load)
    fix = fixes.build_module_for(release).for_family(node.distribution.family)
    return Fix(fix.command + load)


def _without_dkms(node: Node, release: str) -> str:
    """Empty where DKMS builds the module, or where it can't be told who does."""
    if node.host.stat("/usr/sbin/akmods"):
        return f"dnf install kernel-devel-{release} && akmods --force --kernels {release}"
    if node.dkms or node.distribution.family == "suse":
        return ""
    for kernel in node.kernels:
        found = _PREBUILT.search(node.host.read_text(f"/lib/modules/{kernel.release}/modules.dep") or "")
        if found:
            server, flavour = "-server" if found[2] else "", found[3] or ""
            return f"apt update && apt install linux-modules-nvidia-{found[1]}{server}{flavour}-{release}"
    if node.host.executable("/usr/bin/nvidia-uninstall") and node.module and node.module.version:
        return f"sh NVIDIA-Linux-$(uname -m)-{node.module.version}.run --kernel-name={release}"
    return "dnf upgrade 'kmod-nvidia*'" if node.distribution.family == "rhel" else ""


def enrol_key(node: Node, *, signed: bool) -> Fix | None:
    """Enrol the key that lies on this node; a module that DKMS left unsigned is first built again."""
    key = next((path for path in _KEYS if node.host.exists(path)), None)
    if key is None:
        return None
    version = next(iter(node.dkms), None)
    again = ""
    if not signed and version:
        name = f"nvidia/{version} -k $(uname -r)"
        again = f"dkms build --force {name} && dkms install --force {name} && "
    return Fix(f"{again}mokutil --import {key} && reboot", True, "reboot")


def install_libraries(node: Node) -> Fix | None:
    """The libraries' packages for the driver that is here; None where their names don't depend on it.

    Before 590 Debian's and Ubuntu's names carry the driver's branch, on Ubuntu also its server flavour.
    """
    if node.distribution.family != "debian":
        return None
    if node.host.listdir("/var/lib/dkms/nvidia-current"):
        return Fix("apt install libnvidia-ml1 libcuda1 nvidia-smi && ldconfig")  # Debian's own packages
    numbers = driver.version_numbers(node.module.version if node.module else next(iter(node.dkms), ""))
    if not numbers or numbers[0] >= 590:
        return None
    server = any("-server" in name for name in driver.driver_packages(node.packages))
    branch = f"{numbers[0]}{'-server' if server else ''}"
    return Fix(f"apt install libnvidia-compute-{branch} nvidia-utils-{branch} && ldconfig")


def reinstall_libraries(node: Node) -> Fix:
    """The libraries again, in the version that the repositories have with the module."""
    return install_libraries(node) or fixes.INSTALL_LIBRARIES.for_family(node.distribution.family)


def reinstall_firmware(node: Node) -> Fix | None:
    """Ubuntu has a package of firmware for each version; elsewhere names don't depend on it."""
    version = node.module.version if node.module else ""
    if node.distribution.id != "ubuntu" or not version:
        return None
    server = any("-server" in name for name in driver.driver_packages(node.packages))
    name = f"nvidia-firmware-{driver.version_numbers(version)[0]}{'-server' if server else ''}-{version}"
    return Fix(f"apt install --reinstall {name} && reboot", True, "reboot")
