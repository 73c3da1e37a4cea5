"""When a driver isn't installed by a tool: what would break running work, or not come up afterwards."""

from __future__ import annotations

from collections.abc import Iterator

from gpunode.facts.driver_targets import RUN_INSTALLER
from gpunode.facts.system import CONTAINER, TEGRA, WSL2
from gpunode.packages.driver_model import Refusal, Situation
from gpunode.packages.manager import Trouble

_FEW = 3
_OTHERWISE = "build it into the image (bootc, rpm-ostree), or take the GPU operator's driver container"
_TRANSACTIONAL = (
    "install it into the next snapshot and reboot: transactional-update pkg install"
    " nvidia-open-driver-G07-signed-cuda-kmp-default, then nvidia-compute-utils-G07 at its version"
    " (G06 in place of G07 for branch 580 and older)"
)
_INSTEAD = {
    "talos": "put nvidia-open-gpu-kernel-modules and nvidia-container-toolkit into the image's schematic",
    "bottlerocket": "boot one of its -nvidia variants, which have the driver",
    "cos": "it has an installer of its own: cos-extensions install gpu",
    "flatcar": "take its nvidia-drivers system extension, or the GPU operator's driver container",
    "nixos": "set hardware.nvidia and services.xserver.videoDrivers, then nixos-rebuild switch",
    **dict.fromkeys(("sle-micro", "sl-micro", "opensuse-microos"), _TRANSACTIONAL),
    "guix": "declare the driver in the system configuration, then guix system reconfigure",
}
_MAKE_KEY = {  # dkms(8) and Ubuntu's shim-signed; each is imported under a password that the console asks for
    True: "update-secureboot-policy --new-key && mokutil --import /var/lib/shim-signed/mok/MOK.der",
    False: "dkms generate_mok && mokutil --import /var/lib/dkms/mok.pub",
}
_REFRESH = {"apt": "apt-get update", "dnf": "dnf makecache --refresh", "zypper": "zypper refresh"}


def hint_of(code: str, manager: str, said: str) -> str:
    """What to do about a package manager's trouble where a driver is installed; else what was `said`."""
    refresh = _REFRESH.get(manager, "refresh its indexes")
    return {
        Trouble.SIGNATURE: "the repository's key is missing, expired or another: put the right one in place",
        Trouble.CONFLICTING_SOURCES: "two files name NVIDIA's repository with different keys: keep one",
        Trouble.NETWORK: "see the network and the proxy (sudo drops http_proxy: sudo -E), or name a mirror "
        f"with --repository; old indexes too: {refresh}",
        Trouble.NO_REPOSITORY: "there is nothing at that address: --repository takes the directory that "
        "holds rhel9, ubuntu2404 and so on",
        Trouble.NOT_FOUND: f"{manager}'s indexes are old: {refresh}, then gpunode driver plan",
        "half-installed": "see what is there and what is wanted: gpunode driver plan",
    }.get(code, said)


def against_node(situation: Situation) -> tuple[Refusal, ...]:
    """What makes every driver from packages the wrong thing on this node."""
    return (*against_system(situation), *_in_use(situation))


def against_system(situation: Situation) -> tuple[Refusal, ...]:
    """The same without the work that runs on the GPUs now."""
    return (*_kind(situation), *_other_ways(situation))


def _kind(situation: Situation) -> Iterator[Refusal]:
    if situation.kind == CONTAINER:
        yield Refusal(
            "container",
            "this is a container: the kernel's driver belongs to its host",
            "run gpunode on the host",
        )
    elif situation.kind == WSL2:
        yield Refusal(
            "wsl2", "in WSL 2 the driver is that of Windows", "install NVIDIA's driver for Windows, none here"
        )
    elif situation.kind == TEGRA:
        yield Refusal("tegra", "on Jetson the driver comes with JetPack", "upgrade JetPack: apt upgrade")
    elif not situation.gpus:
        yield Refusal(
            "no-gpu", "no NVIDIA GPU is on the PCI bus", "gpunode doctor says what it sees of the bus"
        )
    elif all(gpu.for_vms for gpu in situation.gpus):
        yield Refusal(
            "vfio",
            "every GPU here is kept for virtual machines",
            "the driver goes into the machines that get them",
        )
    if situation.vgpu_guest:
        yield Refusal(
            "vgpu-guest",
            "the GPUs here are virtual (vGPU): their driver must fit that of the virtual machine's host",
            "install the guest driver of the host's vGPU release, from NVIDIA's licensing portal",
        )
    if situation.distribution.immutable:
        name = situation.distribution.name or situation.distribution.id
        yield Refusal(
            "immutable",
            f"{name} is an image; packages can't be installed into it",
            _INSTEAD.get(situation.distribution.id, _OTHERWISE),
        )


def _other_ways(situation: Situation) -> Iterator[Refusal]:
    if situation.run_installed:
        yield Refusal(
            "run-installer",
            "the driver here came with NVIDIA's .run installer, whose files packages would overwrite",
            f"take it away first: {RUN_INSTALLER}, and reboot",
        )
    if situation.operator_driver:
        yield Refusal(
            "driver-container",
            f"the GPU operator brings the driver to this node ({situation.operator_driver})",
            "change it there (driver.version in the ClusterPolicy), or set driver.enabled=false first",
        )


def _in_use(situation: Situation) -> Iterator[Refusal]:
    users = situation.users.users
    if not users:
        return
    shown = ", ".join(str(one) for one in users[:_FEW])
    more = f" and {len(users) - _FEW} more" if len(users) > _FEW else ""
    yield Refusal(
        "gpu-in-use",
        f"the GPUs are in use: {shown}{more}",
        "drain the node or end them first: new GPU programs fail from the exchange until the reboot",
    )


def against_module(situation: Situation, *, signed: bool) -> tuple[Refusal, ...]:
    """Secure Boot: a module that this node builds itself is only loaded with a key that is enrolled."""
    if not situation.secure_boot or signed or situation.key_enrolled:
        return ()
    if situation.key_waits:
        return (
            Refusal(
                "secure-boot",
                "Secure Boot is on, and the key for modules waits to be confirmed",
                "reboot with the console open, choose Enroll MOK, then run this again",
            ),
        )
    what = (
        f"the key {situation.key} isn't enrolled" if situation.key else "no key is here to sign modules with"
    )
    if situation.key and situation.key_enrolled is None:
        what = f"mokutil doesn't tell whether the key {situation.key} is enrolled"
    make = _MAKE_KEY[situation.distribution.id == "ubuntu"]
    first = f"mokutil --import {situation.key}" if situation.key else make
    return (
        Refusal(
            "secure-boot",
            f"Secure Boot is on, the module would be built on this node, and {what}",
            f"{first}, reboot and choose Enroll MOK at the console; or take signed modules if there are any",
        ),
    )
