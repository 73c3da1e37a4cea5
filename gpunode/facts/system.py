"""What kind of machine this is: distribution, kernel, bare metal or something else."""

from __future__ import annotations

import re
import stat
from typing import NamedTuple

from gpunode.errors import ConfigError, Unreadable
from gpunode.facts.processes import boot_time, uptime
from gpunode.host import Host
from gpunode.host.files import SMALL_BYTES

BARE_METAL = "bare-metal"
VM = "vm"
WSL2 = "wsl2"
TEGRA = "tegra"
CONTAINER = "container"

# os-release ids and ID_LIKE words, as the library `distro` normalises them
_FAMILIES = {
    "debian": {"debian", "ubuntu", "linuxmint", "raspbian"},
    "rhel": {
        "rhel",
        "fedora",
        "centos",
        "rocky",
        "almalinux",
        "amazon",
        "amzn",
        "oracle",
        "ol",
        "cloudlinux",
    },
    "suse": {"suse", "sles", "sled", "opensuse", "opensuse-leap", "opensuse-tumbleweed"},
}
# their root file systems are read-only or declared elsewhere, so package commands would be misleading
# SUSE's systems that install into a snapshot for the next boot
TRANSACTIONAL = (
    *("sle-micro", "sle-micro-rancher", "sl-micro", "suse-microos"),
    *("opensuse-microos", "opensuse-leap-micro", "opensuse-aeon", "opensuse-kalpa", "aeon", "kalpa"),
)
_IMMUTABLE = {
    *("nixos", "flatcar", "bottlerocket", "talos", "rhcos", "coreos", "cos", "ubuntu-core"),
    *("guix", *TRANSACTIONAL),
}
_OSTREE = "/run/ostree-booted"  # rpm-ostree and bootc: Fedora CoreOS, Silverblue, image mode of RHEL
_OS_RELEASE = ("/etc/os-release", "/usr/lib/os-release")
_VM_VENDORS = (
    "qemu", "kvm", "vmware", "xen", "microsoft corporation", "innotek", "amazon ec2", "google",
    "openstack", "nutanix", "parallels", "bochs", "digitalocean", "alibaba",
)  # fmt: skip
_KIND = "/run/systemd/container"  # systemd writes what it detected (systemd-detect-virt(1))
# these makers sell whole machines under the same vendor name; the product distinguishes them
_BARE_METAL_PRODUCTS = ("metal", "surface")


class Distribution(NamedTuple):
    """`id` and `version` are os-release's; `family` is debian, rhel, suse or other. Where the system is an
    image or declared as a whole (`immutable`), packages can't be installed, and the family is other."""

    id: str
    version: str
    name: str
    family: str
    immutable: bool = False


def family_of(identifier: str, like: str) -> str:
    """The package manager's family for an os-release ID and its ID_LIKE words."""
    if identifier in _IMMUTABLE:
        return "other"
    for word in (identifier, *like.split()):
        for family, members in _FAMILIES.items():
            if word in members:
                return family
    return "other"


def read_distribution(host: Host) -> Distribution:
    """From os-release in the host's root; empty strings for missing values."""
    from distro import LinuxDistribution

    try:
        # os-release(5); resolved here, because the library would follow an absolute link out of the root
        file = next((path for path in _OS_RELEASE if host.is_file(path)), None)
        if file is None:
            return Distribution("", "", "", "other")
        # the library opens the file itself, and a `RecordingHost` stores what it read
        host.read_bytes(file, SMALL_BYTES)
        # nor may it search /etc for another file: that could be a pipe
        distribution = LinuxDistribution(
            include_lsb=False,
            include_uname=False,
            include_oslevel=False,
            os_release_file=str(host.path(file)),
            distro_release_file="/dev/null",
        )
        identifier = distribution.id()
        # its `version` and `name` would read the debian_version of the machine that runs gpunode
        version = distribution.os_release_attr("version_id")
        name = distribution.os_release_attr("pretty_name") or distribution.os_release_attr("name")
        whole = identifier in _IMMUTABLE or host.exists(_OSTREE)
        family = "other" if whole else family_of(identifier, distribution.like())
        return Distribution(identifier, version, name, family, whole)
    except PermissionError as error:
        raise Unreadable("can't read /etc/os-release: permission denied", hint="run as root") from error
    except ConfigError as error:
        return Distribution("", "", error.message, "other")  # too large, a pipe, a directory
    except (OSError, ValueError):
        return Distribution("", "", "", "other")  # os-release isn't a valid file


def kernel_release(host: Host) -> str:
    """The output of ``uname -r``; empty for invalid text, because it becomes part of paths."""
    text = (host.read_text("/proc/sys/kernel/osrelease") or "").strip()
    return text if re.fullmatch(r"[\w.+~-]{1,64}", text, re.ASCII) else ""


def node_class(host: Host) -> str:
    """The most specific class that applies, because its rules differ the most."""
    if host.stat("/dev/dxg") or "microsoft" in kernel_release(host).lower():
        return WSL2
    family = (host.read_text("/sys/devices/soc0/family") or "").strip()
    compatible = host.read_text("/proc/device-tree/compatible") or ""
    if host.stat("/etc/nv_tegra_release") or family == "Tegra" or "nvidia,tegra" in compatible:
        return TEGRA
    # podman's and Docker's marker files, a pod's service account, and what systemd writes inside LXC and
    # others; it also writes that for WSL, which is excluded before
    marks = ("/run/.containerenv", "/.dockerenv", "/run/secrets/kubernetes.io", _KIND)
    if any(host.stat(mark) is not None for mark in marks):
        return CONTAINER
    return VM if _virtual(host) else BARE_METAL


def _virtual(host: Host) -> bool:
    vendor = (host.read_text("/sys/class/dmi/id/sys_vendor") or "").strip().lower()
    product = (host.read_text("/sys/class/dmi/id/product_name") or "").strip().lower()
    if any(word in product for word in _BARE_METAL_PRODUCTS):
        return False
    if vendor.startswith(_VM_VENDORS) or "virtual machine" in product or product.startswith("kvm"):
        return True
    lines = (host.read_text("/proc/cpuinfo") or "").splitlines()
    return " hypervisor" in next((line for line in lines if line.startswith("flags")), "")


# The machine's clock.

NOT_BEFORE = 1735689600  # 2025-01-01: no gpunode is older


def clock(host: Host) -> float:
    """Seconds since the epoch by the machine's own clock; on a recorded machine the time of the recording, 0
    if unknown."""
    if host.live:
        return host.now()
    boot, seconds = boot_time(host), uptime(host)
    return boot + seconds if boot and seconds else 0.0


# An LXC or LXD container that runs GPU containers itself.

UID_MAP = "/proc/1/uid_map"


def in_lxc(host: Host) -> bool:
    return (host.read_text(_KIND) or "").strip() in ("lxc", "lxc-libvirt")


def unprivileged(host: Host) -> bool | None:
    """Whether root in this container is an ordinary user outside (user_namespaces(7)); None if unknown."""
    words = (host.read_text(UID_MAP) or "").split()
    return words[:2] != ["0", "0"] if len(words) >= 3 else None


# Groups of this node's own users (group(5)). Those of a directory service aren't in the file.

# members of these groups may become root anyway, with sudo or su; the last is Google's machines'
_ADMINISTRATORS = ("root", "sudo", "wheel", "admin", "google-sudoers")


def members(host: Host, group: str) -> tuple[str, ...]:
    """Members of a group, without those whose primary group it is."""
    for line in (host.read_text("/etc/group") or "").splitlines():
        name, _, rest = line.partition(":")
        if name == group:
            return tuple(filter(None, rest.rpartition(":")[2].strip().split(",")))
    return ()


def without_administrators(host: Host, users: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the users who can't become root otherwise."""
    administrators = {"root", *(user for group in _ADMINISTRATORS for user in members(host, group))}
    return tuple(user for user in users if user not in administrators)


# Permissions of a file. A recorded machine has them in its recording, because a copy has the mode that the
# recording user gave it.


def mode_of(host: Host, path: str) -> int | None:
    """Permission bits of the path's target; None if there is none, or nothing is recorded."""
    if not host.live:
        recorded = host.recorded("modes", path)
        return int(recorded, 8) if recorded is not None else None
    status = host.stat(path)
    return stat.S_IMODE(status.st_mode) if status is not None else None
