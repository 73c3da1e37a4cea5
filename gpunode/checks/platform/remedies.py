"""What mends the platform's findings, beside the shared remedies of fixes.py."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpunode.checks.fixes import everywhere
from gpunode.checks.hardware.remedies import kernel_argument
from gpunode.result import Fix

ALLOW_DEVICES = everywhere("setsebool -P container_use_devices on")
TEACH_APPARMOR = everywhere("aa-logprof")
# profiles that an engine makes as it starts: no file holds them, a container is given another one
_MADE_BY = {
    "docker-default": "https://docs.docker.com/engine/security/apparmor/",
    "snap.docker.": "https://docs.docker.com/engine/security/apparmor/",
    "containers-default": "https://docs.podman.io/en/latest/markdown/podman-run.1.html",
    "cri-containerd": "https://kubernetes.io/docs/tutorials/security/apparmor/",
    "crio-default": "https://kubernetes.io/docs/tutorials/security/apparmor/",
}
_LXC_NUMBER = re.compile(r"^lxc-(\d+)_")  # Proxmox VE names the profile after the container
_LXC_GUIDE = "https://pve.proxmox.com/wiki/Linux_Container"
# packages can't be verified while the clock is wrong, so nothing is installed for it
SET_CLOCK = everywhere("timedatectl set-ntp true")
UNIFIED_CGROUPS = kernel_argument("systemd.unified_cgroup_hierarchy=1")
UPDATE_WSL = everywhere("wsl.exe --update && wsl.exe --shutdown", "restart", needs_root=False)
NO_CGROUPS = Fix("gpunode toolkit config set nvidia-container-cli.no-cgroups=true")
# the package that owns the lists (NVIDIA/nvidia-container-runtime#123)
RESTORE_LISTS = everywhere("apt install --reinstall nvidia-l4t-init")


def pass_devices(paths: Sequence[str]) -> Fix:
    """On the machine that runs the LXC container. Nothing in here tells its number, and a made-up one would
    be that of another container."""
    return Fix(f"follow {_LXC_GUIDE} to hand {', '.join(paths)} to this container", needs_root=False)


def teach_apparmor(profile: str) -> Fix:
    """Whoever holds this profile: an LXC container's is chosen by its features, an engine's per container."""
    if profile.startswith("lxc-"):
        return _allow_nesting(profile)
    guide = next((url for name, url in _MADE_BY.items() if profile.startswith(name)), None)
    return Fix(f"follow {guide}", needs_root=False) if guide else TEACH_APPARMOR.other


def _allow_nesting(profile: str) -> Fix:
    number = _LXC_NUMBER.match(profile)
    if number is None:
        return Fix(f"follow {_LXC_GUIDE} to let this container nest others", needs_root=False)
    return Fix(f"pct set {number[1]} -features nesting=1 && pct reboot {number[1]}", disruptive="restart")


PASS_DEVICES = everywhere(
    pass_devices(("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm")).command, needs_root=False
)

_REMOVE = {"debian": "apt remove", "rhel": "dnf remove", "suse": "zypper remove"}


def remove_packages(family: str, packages: Sequence[str]) -> Fix:
    """Packages that shouldn't be here, and what the loader finds without them."""
    if not packages or family not in _REMOVE:
        return Fix("ldconfig")
    return Fix(f"{_REMOVE[family]} {' '.join(packages)} && ldconfig")


# where a system is declared or built as a whole: what brings driver and toolkit there (its own manual)
WHOLE = {
    "nixos": (
        "its configuration sets services.xserver.videoDrivers, hardware.nvidia.open and "
        "hardware.nvidia-container-toolkit.enable",
        "nixos-rebuild switch",
    ),
    "flatcar": (
        "Flatcar builds the driver itself; NVIDIA_DRIVER_VERSION in /etc/flatcar/nvidia-metadata chooses it",
        "systemctl restart nvidia.service",
    ),
    "talos": (
        "Talos takes the extensions nvidia-open-gpu-kernel-modules and nvidia-container-toolkit",
        "follow https://factory.talos.dev/ to build an image with both",
    ),
    "bottlerocket": (
        "Bottlerocket has variants for NVIDIA GPUs",
        "follow https://bottlerocket.dev/en/os/latest/#/concepts/variants/",
    ),
    "cos": ("Container-Optimized OS has an installer for the driver", "cos-extensions install gpu"),
}
OTHER_WHOLE = (
    "this system is an image: driver and toolkit belong into it, or come with NVIDIA's GPU operator",
    "follow https://docs.nvidia.com/datacenter/cloud-native/gpu-operator/latest/",
)
OTHER_WAY = everywhere(OTHER_WHOLE[1])
