"""Fixes that depend on how this very node gets its driver: repositories, DKMS, prebuilt modules, keys."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gpunode.checks import fixes
from gpunode.checks.driver import targets
from gpunode.facts import driver, gpu_support
from gpunode.facts.kernel_headers import kernel_devel
from gpunode.facts.node import Node
from gpunode.packages.driver_choice import choose
from gpunode.packages.driver_model import OPEN, Wish
from gpunode.packages.driver_situation import read_situation
from gpunode.result import Fix

_DOWNLOADS = "https://www.nvidia.com/en-us/drivers/"
_RUN_FILES = "https://us.download.nvidia.com"
_DESKTOP = {"x86_64": "XFree86/Linux-x86_64", "aarch64": "XFree86/aarch64"}
_ARM_LOADER = "/lib/ld-linux-aarch64.so.1"
_FIRST_G07 = 590  # SUSE's and NVIDIA's packages for SUSE have G07 in their names from this branch
_LEGACY = "https://www.nvidia.com/en-us/drivers/unix/legacy-gpu/"
# Ubuntu's prebuilt modules: kernel/nvidia-550srv-open/nvidia.ko is linux-modules-nvidia-550-server-open-...
_PREBUILT = re.compile(r"^kernel/nvidia-(\d+)(srv)?(-open)?/nvidia\.ko", re.MULTILINE)
# kmod-nvidia-580.159.03-5.14.0-427.13.1
_FOR_ONE_KERNEL = re.compile(r"(kmod-nvidia(?:-open)?-\d+\.[\d.]+)-\d+\.\d+\.\d+-")


def install_driver(node: Node, branch: int = 0) -> Fix:
    """The driver that `gpunode driver plan` chooses, or of this branch; a reboot exchanges a loaded one."""
    last = targets.last_branch(node)
    if 0 < last < targets.LONG_TERM and node.distribution.id != "ubuntu":
        return Fix(f"follow {_LEGACY}")
    option = f"--branch {branch} " if branch and branch != choose(read_situation(node), Wish()).branch else ""
    command = f"gpunode driver install {option}--yes"
    if node.module is None:
        return Fix(command)
    return Fix(f"{command} && reboot", True, "reboot")


def newer_run_file() -> Fix:
    """For a driver that came with NVIDIA's .run installer, whose files packages would overwrite."""
    return Fix(f"follow {_DOWNLOADS} to a newer .run installer, which is how this driver came")


_AGAIN = {"debian": "apt install --reinstall", "rhel": "dnf reinstall", "suse": "zypper install --force"}


def reinstall(node: Node, names: Iterable[str]) -> Fix | None:
    """These packages again, over whatever else wrote their files; None on an unknown distribution."""
    command = _AGAIN.get(node.distribution.family)
    return Fix(f"{command} {' '.join(names)} && reboot", True, "reboot") if command else None


def newer_for_kernel(node: Node, release: str) -> Fix:
    """A driver that compiles for a kernel; the node boots that kernel once it has the module."""
    install = install_driver(node)
    proof = f" && modinfo -k {release} -F version nvidia"
    return Fix(f"{install.command.removesuffix(' && reboot')}{proof} && reboot", True, "reboot")


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
        return f"zypper install --force {suse_modules(node)}"
    if node.dkms:
        return ""
    for kernel in node.kernels:
        found = _PREBUILT.search(node.host.read_text(f"/lib/modules/{kernel.release}/modules.dep") or "")
        if found:
            server, flavour = "-server" if found[2] else "", found[3] or ""
            return f"apt update && apt install linux-modules-nvidia-{found[1]}{server}{flavour}-{release}"
    if node.host.executable("/usr/bin/nvidia-uninstall") and node.module and node.module.version:
        return _run_file(node, node.module.version, f"--kernel-name={release}")
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
    again = "" if signed else _build_again(node)
    return Fix(f"{again}mokutil --import {key} && reboot", True, "reboot")


def make_key(node: Node) -> Fix:
    """Make a key, sign the module with it and enrol it, by what builds modules on this node."""
    if node.host.stat("/usr/sbin/akmods"):
        steps = "kmodgenca --auto && akmods --force --rebuild && "
        return Fix(f"{steps}mokutil --import {driver.AKMODS_KEY} && reboot", True, "reboot")
    if not node.dkms:
        return Fix(f"follow {fixes.DRIVER_GUIDE}")
    if node.distribution.id == "ubuntu":
        steps, key = "update-secureboot-policy --new-key", driver.SHIM_KEY
    else:
        steps, key = "dkms generate_mok", driver.DKMS_KEY
    return Fix(f"{steps} && {_build_again(node)}mokutil --import {key} && reboot", True, "reboot")


def _build_again(node: Node) -> str:
    version = next(iter(node.dkms), None)
    if version is None:
        return ""
    name = f"{driver.dkms_name(node.host, version)} -k $(uname -r)"
    return f"dkms build --force {name} && dkms install --force {name} && "


def install_libraries(node: Node) -> Fix | None:
    """The libraries' packages for the driver that is here; None where their names don't depend on it.

    Ubuntu's names carry the driver's branch and its server flavour, those of NVIDIA's repository for Ubuntu
    the branch until 590.
    """
    version = node.driver_version
    if version and targets.run_installed(node):
        return libraries_of_run_file(node, version)
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


def suse_modules(node: Node) -> str:
    """The packages of the kernel module on SUSE: those that are installed, else the one for the driver here
    or, without any, for the driver that gpunode chooses."""
    built = [one.name for one in node.packages.containing("nvidia") if "-kmp-" in one.name]
    if built:
        return " ".join(built)
    choice = choose(read_situation(node), Wish())
    branch = gpu_support.branch(node.driver_version) or choice.branch
    is_open = choice.flavour == OPEN if node.module_open is None else node.module_open
    kernel = driver.flavour(node.kernel)
    if branch < _FIRST_G07:
        return f"nvidia-open-driver-G06-signed-kmp-{kernel}" if is_open else f"nvidia-driver-G06-kmp-{kernel}"
    return f"nvidia-open-driver-G07-signed-cuda-kmp-{kernel}" if is_open else "nvidia-driver-G07"


def suse_libraries(node: Node) -> str:
    """The package of the libraries and programs for computing, for the driver's branch."""
    number = "G06" if gpu_support.branch(node.driver_version) < _FIRST_G07 else "G07"
    return f"nvidia-compute-utils-{number}"


def libraries_of_run_file(node: Node, version: str) -> Fix:
    """NVIDIA's .run installer brings exactly one version's libraries, on any distribution."""
    return Fix(_run_file(node, version, "--no-kernel-modules"))


def _run_file(node: Node, version: str, option: str) -> str:
    """Download the installer and run it, since it leaves no copy behind. NVIDIA keeps its releases for data
    centres and those for desktops in two directories, and many in both."""
    architecture = "aarch64" if node.host.exists(_ARM_LOADER) else "x86_64"
    name = f"NVIDIA-Linux-{architecture}-{version}.run"
    places = (f"{_RUN_FILES}/{part}/{version}/{name}" for part in ("tesla", _DESKTOP[architecture]))
    fetch = " || ".join(f"curl -fO {place}" for place in places)
    return f"cd /root && {{ {fetch}; }} && sh {name} {option}"


def reinstall_libraries(node: Node) -> Fix:
    """The libraries again, in the version that the repositories have with the module."""
    return install_libraries(node) or fixes.INSTALL_LIBRARIES.for_family(node.distribution.family)


_FIRMWARE = ("nvidia-firmware", "firmware-nvidia-gsp", "kernel-firmware-nvidia-gsp")


def reinstall_firmware(node: Node) -> Fix | None:
    """Ubuntu has a package of firmware for each version; elsewhere names don't depend on it."""
    version = node.module.version if node.module else ""
    here = [one.name for one in node.packages.starting(*_FIRMWARE)]
    if len(here) == 1 and node.distribution.family in ("debian", "suse"):
        return reinstall(node, here)
    if node.distribution.id != "ubuntu" or not version:
        return None
    server = any("-server" in name for name in driver.driver_packages(node.packages))
    name = f"nvidia-firmware-{driver.version_numbers(version)[0]}{'-server' if server else ''}-{version}"
    return Fix(f"apt install --reinstall {name} && reboot", True, "reboot")
