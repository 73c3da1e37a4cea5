"""Kernels that wait for a reboot, as the distribution itself tells: Debian's list, RHEL's chosen entry."""

from __future__ import annotations

from gpunode.errors import Unreadable
from gpunode.facts.driver import Kernel, newer_kernels, version_key
from gpunode.host import Host

PACKAGES = "/run/reboot-required.pkgs"
GRUB = "/boot/grub2/grubenv"


def kernel_waiting(host: Host, kernels: tuple[Kernel, ...], running: str) -> str | None:
    """The installed kernel for which update-notifier asks for a reboot; None if it asks for none. Other
    packages on its list don't touch GPUs, and a driver's are compared with what is loaded."""
    lines = (host.read_text(PACKAGES) or "").splitlines()
    asked = {line.strip().removeprefix("linux-image-").removeprefix("unsigned-") for line in lines}
    newer = newer_kernels(kernels, running)
    waiting = (one.release for one in newer if one.release in asked)
    return max(waiting, key=version_key, default=None)


def chosen_kernel(host: Host) -> str:
    """The boot entry that grubby or grub2-set-default chose, such as ``MACHINEID-5.14.0-503.el9.x86_64``;
    empty if nobody did. `Unreadable` for an ordinary user where /boot is closed."""
    lines = (host.read_text(GRUB) or "").splitlines()
    return next((line.partition("=")[2].strip() for line in lines if line.startswith("saved_entry=")), "")


def chosen_release(host: Host, kernels: tuple[Kernel, ...]) -> str:
    """The installed kernel that this entry boots; empty if nobody chose one, or if this user may not look."""
    try:
        chosen = chosen_kernel(host)
    except Unreadable:
        return ""
    return next((one.release for one in kernels if chosen.endswith(f"-{one.release}")), "")
