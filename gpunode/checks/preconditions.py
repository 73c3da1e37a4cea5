"""Preconditions of fix commands: what each kind of command needs on the node, and an alternative fix.

Every fix passes through `fitting`, so that checks don't need to know each kind of system.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from gpunode.checks import driver_packages, fixes
from gpunode.checks.fabric import DRIVER_PODS, GUEST_DRIVER
from gpunode.checks.finding import REPLACES_DRIVER, Fix
from gpunode.checks.platform import FLATCAR_EFFECT, FLATCAR_TOOLKIT, OTHER_WHOLE, RESTART_WSL, WHOLE
from gpunode.checks.toolkit import then_register
from gpunode.errors import GpunodeError
from gpunode.facts.node import Node
from gpunode.facts.system import CONTAINER, TRANSACTIONAL, WSL2

_ROUNDS = 4  # a fix that replaces another one has preconditions too
_GKE = "/home/kubernetes/bin"  # Google's node images install the driver and the kubelet below it
_GKE_INSTALLER = (
    "kubectl apply --filename https://raw.githubusercontent.com/GoogleCloudPlatform/"
    "container-engine-accelerators/master/nvidia-driver-installer/{}/daemonset-preloaded.yaml"
)
_TALOS_GUIDE = (
    "https://docs.siderolabs.com/talos/v1.13/configure-your-talos-cluster/hardware-and-drivers/nvidia-gpu"
)
_WSL_GUIDE = "https://docs.nvidia.com/cuda/wsl-user-guide/"
# distributions outside the three families: their driver and their toolkit, by os-release ID
_DRIVERS = {
    "arch": "pacman -Syu nvidia-open",
    "gentoo": "emerge x11-drivers/nvidia-drivers",
}
_TOOLKITS = {
    "arch": "pacman -Syu nvidia-container-toolkit",
    "azurelinux": "tdnf install nvidia-container-toolkit",
    "flatcar": FLATCAR_TOOLKIT[1],
    "gentoo": "emerge app-containers/nvidia-container-toolkit",
}
# what installs the module for another kernel if DKMS doesn't build it
_MODULES = {
    "arch": "pacman -Syu",
    "azurelinux": "tdnf update",
    "gentoo": "eselect kernel set linux-{release} && emerge @module-rebuild",
    "nixos": "nixos-rebuild boot",
    **dict.fromkeys(TRANSACTIONAL, "transactional-update pkg install --force {suse}"),
}
_LOADABLE = ("gentoo",)  # where the module that this installs can be loaded without a reboot


class Precondition(NamedTuple):
    """Fixes with a command that matches `commands` are offered if `holds` is true of it; otherwise `instead`
    returns the alternative to the fix."""

    commands: re.Pattern[str]
    holds: Callable[[Node, str], bool]
    instead: Callable[[Node, Fix], Fix]


def fitting(node: Node, fix: Fix) -> Fix:
    """The fix, or an alternative for this node if a precondition of its command is missing."""
    for _ in range(_ROUNDS):
        instead = _instead(node, fix)
        if instead is None or instead == fix:
            break
        fix = instead
    return replace(fix, needs_root=False) if fix.command.startswith("follow ") else fix


def _instead(node: Node, fix: Fix) -> Fix | None:
    for precondition in PRECONDITIONS:
        if precondition.commands.search(fix.command) and not _holds(node, precondition, fix.command):
            return precondition.instead(node, fix)
    return None


def _holds(node: Node, precondition: Precondition, command: str) -> bool:
    try:
        return precondition.holds(node, command)
    except GpunodeError:
        return True  # this user has no permission to look, so nothing excludes the command


def separate_reboot(fix: Fix) -> tuple[Fix, ...]:
    """Split a command that ends in a reboot into two fixes: the steps before the reboot, and the reboot."""
    if not fix.before_reboot:
        return (fix,)
    steps = tuple(step for step in fix.steps if step.disruptive != "reboot")
    disruptive = "none" if fix.disruptive == "reboot" else fix.disruptive
    first = replace(fix, command=fix.before_reboot, before_reboot="", disruptive=disruptive, steps=steps)
    return (first, fixes.REBOOT)


def _on_host(node: Node, fix: Fix) -> Fix:
    return Fix(fixes.ON_HOST)


def _in_windows(node: Node, fix: Fix) -> Fix:
    if fix.command == fixes.REBOOT.command:
        return RESTART_WSL
    return Fix(f"follow {_WSL_GUIDE}", needs_root=False)


def _no_image(node: Node, command: str) -> bool:
    return not node.distribution.immutable and not node.host.is_dir(_GKE)


def _of_image(node: Node, fix: Fix) -> Fix:
    """How to add driver and toolkit to an image-based system."""
    system = node.distribution.id
    if node.host.is_dir(_GKE):
        return Fix(_GKE_INSTALLER.format("cos" if system == "cos" else "ubuntu"), needs_root=False)
    if "toolkit" in fix.command and system in _TOOLKITS:
        return _other_toolkit(node, fix)
    if system in TRANSACTIONAL:
        return _module_package(node)
    how, command = WHOLE.get(system, OTHER_WHOLE)
    return Fix(command, before=f"{how[:1].upper()}{how[1:]}")


def _packages(command: str) -> Fix:
    everything = command.startswith("pacman -Syu")
    if command == FLATCAR_TOOLKIT[1]:
        return Fix(command, disruptive="restart", effect=FLATCAR_EFFECT)
    return Fix(command, before="pacman -Syu upgrades every package of this system" if everything else "")


def _driver_refusals(node: Node) -> tuple[str, ...]:
    """Codes of the refusals of `gpunode driver install` on this node, whatever runs on the GPUs."""
    # the planner is a twentieth of the doctor's start, and only the fixes of a few faults need it
    from gpunode.packages.driver_choice import choose
    from gpunode.packages.driver_model import Wish, read_situation
    from gpunode.packages.driver_plan import against_system
    from gpunode.packages.driver_source import choose_route

    situation, wish = read_situation(node), Wish()
    choice = choose(situation, wish)
    route = choose_route(situation, wish, choice)
    return tuple(refusal.code for refusal in (*against_system(situation), *choice.refusals, *route.refusals))


def _other_driver(node: Node, fix: Fix) -> Fix:
    """How this node gets a driver if `gpunode driver install` refuses."""
    from gpunode.packages.driver_model import read_situation
    from gpunode.packages.driver_source import install_by_tdnf

    code = _driver_refusals(node)[0]
    system = node.distribution.id
    if code in _BY_REFUSAL:
        instead, kernel = _BY_REFUSAL[code](node, fix), _MODINFO.search(fix.command)
        if kernel and instead.before_reboot:
            return driver_packages.with_module(node, instead, kernel[1])
        return instead
    command = _DRIVERS.get(system) or install_by_tdnf(read_situation(node), driver_packages.chosen(node))
    if code == "no-repository" and command:
        return _packages(command).then_reboot()
    return Fix(f"follow {fixes.DRIVER_GUIDE}")


def _from_their_repository(node: Node, fix: Fix) -> Fix:
    """RPM Fusion and ELRepo use other package names than NVIDIA; their files conflict."""
    installed = node.packages.installed
    command = "dnf upgrade 'kmod-nvidia*' 'nvidia-x11-drv*'"
    if "akmod-nvidia" in installed or "xorg-x11-drv-nvidia" in installed:
        command = "dnf upgrade akmod-nvidia 'xorg-x11-drv-nvidia*' && akmods --force"
    return Fix(command, disturbs=REPLACES_DRIVER, note=fixes.NO_REBOOT).then_reboot()


_BY_REFUSAL: dict[str, Callable[[Node, Fix], Fix]] = {
    "container": _on_host,
    "wsl2": _in_windows,
    "tegra": lambda node, fix: Fix("apt update && apt upgrade"),
    "run-installer": lambda node, fix: driver_packages.NEWER_RUN_FILE,
    "vgpu-guest": lambda node, fix: GUEST_DRIVER,
    "immutable": _of_image,
    "driver-container": lambda node, fix: DRIVER_PODS,
    "other-source": _from_their_repository,
}


def _other_toolkit(node: Node, fix: Fix) -> Fix:
    instead = _TOOLKITS.get(node.distribution.id, f"follow {fixes.TOOLKIT_GUIDE}")
    install = _packages(instead)
    return install if "--upgrade" in fix.command else then_register(node, install)


def _has_dkms(node: Node, command: str) -> bool:
    """DKMS builds the driver on this node; a distribution with another method may still have the program."""
    return bool(node.dkms) and node.distribution.id not in _MODULES


def _replace_dkms(node: Node, fix: Fix) -> Fix:
    if node.distribution.id in _MODULES:
        release = re.search(r"dkms autoinstall -k ([\w.+~-]+)", fix.command)
        return _module_package(node, release[1] if release else node.kernel)
    return driver_packages.install_driver(node)


def _module_package(node: Node, release: str = "") -> Fix:
    """The module from this system's packages; a module for the running kernel is then loaded."""
    system = node.distribution.id
    command = _MODULES[system].format(release=release, suse=driver_packages.suse_modules(node))
    if system not in _LOADABLE:
        return _packages(command).then_reboot()
    return Fix(f"{command} && modprobe nvidia" if release == node.kernel else command)


def _kernel_has_modules(node: Node, command: str) -> bool:
    """A kernel whose package was removed while it runs has no modules to load or to build into. A system
    without any kernel's modules hasn't removed them."""
    there = node.host.listdir("/lib/modules")
    return not node.kernel or not there or node.kernel in there


def _next_kernel(node: Node, fix: Fix) -> Fix:
    """Nothing can be loaded into this kernel any more: the next one must have the module."""
    upcoming = node.next_kernel
    if any(kernel.release == upcoming and kernel.has_module for kernel in node.kernels):
        note = f"The modules of the running kernel {node.kernel} were removed: a reboot starts {upcoming}"
        return replace(fixes.REBOOT, note=note)
    if upcoming == node.kernel:
        return driver_packages.install_driver(node)
    return driver_packages.build_module(node, upcoming).then_reboot()


def _key_exists(node: Node, command: str) -> bool:
    """The certificate exists, or the command creates it before the import."""
    match = _IMPORT.search(command)
    return match is None or node.host.exists(match[1]) or "--new-key" in command or "generate" in command


_IMPORT = re.compile(r"mokutil --import (\S+)")
_MODINFO = re.compile(r"modinfo -k (\S+)")
_GUIDES = f"follow ({re.escape(fixes.DRIVER_GUIDE)}|{re.escape(fixes.TOOLKIT_GUIDE)})"
_CALL = r"(?:^|&& |; )(?:\w+=\S+ )?"  # where a program is called, with its environment
_INSTALLS = r"gpunode (driver|toolkit) install\b"
PRECONDITIONS = (
    # a container's kernel, modules and machine belong to its host
    Precondition(
        re.compile(
            r"(?<!pct )\breboot\b|gpunode driver install|--gpu-reset\b|/etc/modprobe\.d|/sys/bus/pci"
            rf"|{_CALL}(modprobe|rmmod|dkms|akmods|mokutil|update-initramfs|dracut|update-grub)\b"
        ),
        lambda node, command: node.kind != CONTAINER,
        _on_host,
    ),
    Precondition(
        re.compile(rf"^reboot$|{_CALL}modprobe nvidia|gpunode driver install"),
        lambda node, command: node.kind != WSL2,
        _in_windows,
    ),
    Precondition(
        re.compile("^modprobe nvidia(-uvm)? &&"),
        lambda node, command: node.distribution.id != "talos",
        lambda node, fix: Fix(f"follow {_TALOS_GUIDE} to have Talos load nvidia and nvidia_uvm"),
    ),
    Precondition(re.compile(f"{_INSTALLS}|{_GUIDES}"), _no_image, _of_image),
    Precondition(
        re.compile(r"^cos-extensions\b"), lambda node, command: not node.host.is_dir(_GKE), _of_image
    ),
    Precondition(
        re.compile(f"follow {re.escape(fixes.DRIVER_GUIDE)}"),
        lambda node, command: "driver-container" not in _driver_refusals(node),
        lambda node, fix: DRIVER_PODS,
    ),
    Precondition(
        re.compile(r"gpunode driver install\b"),
        lambda node, command: not _driver_refusals(node),
        _other_driver,
    ),
    Precondition(
        re.compile(r"gpunode toolkit install\b"),
        lambda node, command: node.distribution.family != "other",
        _other_toolkit,
    ),
    Precondition(re.compile(rf"{_CALL}modprobe\b|\$\(uname -r\)"), _kernel_has_modules, _next_kernel),
    Precondition(re.compile(rf"{_CALL}dkms\b"), _has_dkms, _replace_dkms),
    Precondition(_IMPORT, _key_exists, lambda node, fix: driver_packages.make_key(node)),
)
