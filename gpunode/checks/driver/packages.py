"""Fixes that depend on how this very node gets its driver: repositories, DKMS, prebuilt modules, keys."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from gpunode.checks import fixes
from gpunode.checks.driver import targets
from gpunode.facts import driver
from gpunode.facts.kernel_headers import kernel_devel
from gpunode.facts.node import Node
from gpunode.facts.package_locks import module_stream
from gpunode.facts.system import Distribution
from gpunode.result import Fix

if TYPE_CHECKING:
    from gpunode.facts.gpu_support import Supports

_DOWNLOADS = "https://www.nvidia.com/en-us/drivers/"
_LEGACY = "https://www.nvidia.com/en-us/drivers/unix/legacy-gpu/"
# Ubuntu's prebuilt modules: kernel/nvidia-550srv-open/nvidia.ko is linux-modules-nvidia-550-server-open-...
_PREBUILT = re.compile(r"^kernel/nvidia-(\d+)(srv)?(-open)?/nvidia\.ko", re.MULTILINE)
# kmod-nvidia-580.159.03-5.14.0-427.13.1
_FOR_ONE_KERNEL = re.compile(r"(kmod-nvidia(?:-open)?-\d+\.[\d.]+)-\d+\.\d+\.\d+-")


def install_driver(node: Node) -> Fix | None:
    """The newest driver for these GPUs, from where this node has its own, else from Ubuntu or NVIDIA's
    repository, which is added if it isn't there; None: unknown."""
    if targets.run_installed(node):
        return Fix(f"follow {_DOWNLOADS} to a newer .run installer, which is how this driver came")
    ubuntu = node.distribution.id == "ubuntu"
    here = targets.from_ubuntu(node, targets.newer_branch(node), targets.module_for(node))
    if here:
        return Fix(f"apt update && apt install {here} && reboot", True, "reboot")
    if ubuntu and not targets.has_repository(node):
        tool = "" if node.host.which("ubuntu-drivers") else "apt install ubuntu-drivers-common && "
        return Fix(f"{tool}ubuntu-drivers install --gpgpu && reboot", True, "reboot")
    install = _install_command(node)
    name = _repository_name(node.distribution)
    if targets.last_branch(node) and not install:
        return Fix(f"follow {_LEGACY}")
    if not install or not (name or ubuntu):
        return None
    repository = "" if targets.has_repository(node) else _add_repository(node, name)
    return Fix(f"{repository}{install} && reboot", True, "reboot")


def suited_driver(node: Node, supports: Supports) -> Fix | None:
    """The driver that these GPUs need, instead of one that drives others. Ubuntu's own packages carry branch
    and kind in their names; elsewhere `install_driver` knows old GPUs from new ones."""
    if node.distribution.id != "ubuntu" or targets.has_repository(node):
        return install_driver(node)
    number = next(iter(driver.version_numbers(node.driver_version)), 0)
    branch = min(number, supports.max) if supports.max else number
    kind = "" if supports.module == "proprietary" else "-open"
    names = targets.from_ubuntu(node, branch, supports.module or "open")
    return Fix(f"apt install {names or f'nvidia-driver-{branch}-server{kind}'} && reboot", True, "reboot")


_AGAIN = {"debian": "apt install --reinstall", "rhel": "dnf reinstall", "suse": "zypper install --force"}
_NEWER = {"debian": "apt update && apt install", "rhel": "dnf upgrade", "suse": "zypper update"}


def reinstall(node: Node, names: Iterable[str]) -> Fix | None:
    """These packages again, over whatever else wrote their files; None on an unknown distribution."""
    command = _AGAIN.get(node.distribution.family)
    return Fix(f"{command} {' '.join(names)} && reboot", True, "reboot") if command else None


def upgrade_driver(node: Node) -> Fix:
    """The module's packages in the version that the repositories have by now."""
    names, family = driver.driver_packages(node.packages), node.distribution.family
    if not names or family not in _NEWER:
        return install_driver(node) or fixes.UPGRADE_DRIVER.for_family(family)
    return Fix(f"{_NEWER[family]} {' '.join(names)} && reboot", True, "reboot")


def newer_for_kernel(node: Node, release: str) -> Fix:
    """A driver that compiles for a kernel: nobody boots it before there is a module."""
    command = upgrade_driver(node).command
    proof = f" && modinfo -k {release} -F version nvidia && reboot"
    return Fix(command.replace(" && reboot", proof), True, "reboot" if " && reboot" in command else "none")


def _install_command(node: Node) -> str:
    """Of NVIDIA's repository; empty where it has no driver for such old GPUs."""
    system, last = node.distribution, targets.last_branch(node)
    if last and last < targets.LONG_TERM:
        return ""
    if system.family == "debian":
        return f"apt install {'cuda-drivers-580' if last else 'nvidia-open'}"
    if system.family == "suse":
        old = "nvidia-driver-G06-kmp-default nvidia-compute-utils-G06"
        return f"zypper install {old if last else 'nvidia-open'}"
    return _dnf_command(node, old=bool(last)) if system.family == "rhel" else ""


def _dnf_command(node: Node, *, old: bool) -> str:
    """dnf's modules stand for branches where there are any; a stream in use must be given up first."""
    modular = node.distribution.id == "amzn" or _repository_name(node.distribution) in ("rhel8", "rhel9")
    erase = " --allowerasing" if driver.driver_packages(node.packages) else ""
    plain = kernel_devel(node.kernel) == f"kernel-devel-{node.kernel}"
    install = f"dnf install{erase} {kernel_devel('$(uname -r)' if plain else node.kernel)}"
    if not modular:
        lock = "dnf install 'dnf-command(versionlock)' && dnf versionlock add '*nvidia*580*' && "
        return f"{lock}{install} cuda-drivers" if old else f"{install} nvidia-open"
    stream = "nvidia-driver:580-dkms" if old else "nvidia-driver:open-dkms"
    reset = "dnf module reset nvidia-driver && " if module_stream(node.host, "nvidia-driver") else ""
    packages = "nvidia-driver nvidia-driver-cuda" if old else "nvidia-open"
    return f"{reset}dnf module enable {stream} && {install} {packages}"


def _repository_name(system: Distribution) -> str:
    """NVIDIA's directory for this distribution, such as rhel9 or debian12; empty if there is none."""
    major = system.version.partition(".")[0]
    names = {"debian": "debian", "fedora": "fedora", "amzn": "amzn", "sles": "sles", "opensuse": "opensuse"}
    name = names.get(system.id.partition("-")[0]) or ("rhel" if system.family == "rhel" else "")
    return f"{name}{major}" if name and major.isdigit() and len(major) < 5 else ""


def _add_repository(node: Node, name: str) -> str:
    architecture = "sbsa" if node.host.exists("/lib/ld-linux-aarch64.so.1") else "x86_64"
    place = f"https://{targets.REPOSITORY}/{name}/{architecture}"
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
        return f"dnf install {kernel_devel(release)} && akmods --force --kernels {release}"
    if node.distribution.family == "suse":
        built = [one.name for one in node.packages.containing("nvidia") if "-kmp-" in one.name]
        return f"zypper install --force {' '.join(built)}" if built else ""
    if node.dkms:
        return ""
    for kernel in node.kernels:
        found = _PREBUILT.search(node.host.read_text(f"/lib/modules/{kernel.release}/modules.dep") or "")
        if found:
            server, flavour = "-server" if found[2] else "", found[3] or ""
            return f"apt update && apt install linux-modules-nvidia-{found[1]}{server}{flavour}-{release}"
    if node.host.executable("/usr/bin/nvidia-uninstall") and node.module and node.module.version:
        return f"sh NVIDIA-Linux-$(uname -m)-{node.module.version}.run --kernel-name={release}"
    return _precompiled(node, release) if node.distribution.family == "rhel" else ""


def _precompiled(node: Node, release: str) -> str:
    """NVIDIA's repository has a package for each driver and kernel, ELRepo one for all kernels."""
    for package in node.packages.starting("kmod-nvidia"):
        found = _FOR_ONE_KERNEL.match(package.name)
        if found:
            return f"dnf install {found[1]}-{re.sub(r'[.]el[0-9].*', '', release)}"
    return "dnf upgrade 'kmod-nvidia*'"


def enrol_key(node: Node, *, signed: bool) -> Fix | None:
    """Enrol the key that lies on this node; a module that DKMS left unsigned is first built again."""
    key = driver.signing_key(node.host)
    if not key:
        return None
    version = next(iter(node.dkms), None)
    again = ""
    if not signed and version:
        name = f"{driver.dkms_name(node.host, version)} -k $(uname -r)"
        again = f"dkms build --force {name} && dkms install --force {name} && "
    return Fix(f"{again}mokutil --import {key} && reboot", True, "reboot")


def install_libraries(node: Node) -> Fix | None:
    """The libraries' packages for the driver that is here; None where their names don't depend on it.

    Ubuntu's names carry the driver's branch and its server flavour, those of NVIDIA's repository for Ubuntu
    the branch until 590.
    """
    version = node.driver_version
    if version and targets.run_installed(node):
        return Fix(f"sh NVIDIA-Linux-$(uname -m)-{version}.run --no-kernel-modules")
    if node.distribution.family != "debian":
        return None
    if node.host.listdir("/var/lib/dkms/nvidia-current"):
        return Fix("apt install libnvidia-ml1 libcuda1 nvidia-smi && ldconfig")  # Debian's own packages
    if node.distribution.id == "debian":
        return Fix("apt install nvidia-driver-cuda && ldconfig")  # of NVIDIA's repository
    numbers = driver.version_numbers(node.module.version if node.module else next(iter(node.dkms), ""))
    if not numbers or (numbers[0] >= 590 and not targets.from_ubuntu(node, numbers[0])):
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
    here = [one.name for one in node.packages.starting("nvidia-firmware", "firmware-nvidia-gsp")]
    if len(here) == 1 and node.distribution.family == "debian":
        return reinstall(node, here)
    if node.distribution.id != "ubuntu" or not version:
        return None
    server = any("-server" in name for name in driver.driver_packages(node.packages))
    name = f"nvidia-firmware-{driver.version_numbers(version)[0]}{'-server' if server else ''}-{version}"
    return Fix(f"apt install --reinstall {name} && reboot", True, "reboot")
