"""What mends the driver beside fixes.py: commands that no other layer needs."""

from __future__ import annotations

from gpunode.checks.fixes import DRIVER_GUIDE, Remedy, everywhere, per_family
from gpunode.facts.kernel_headers import kernel_devel, linux_headers


def install_headers(release: str) -> Remedy:
    """What DKMS builds against, for this kernel. SUSE's package has the flavour in its name."""
    return per_family(
        f"apt install {linux_headers(release)}",
        f"dnf install {kernel_devel(release)}",
        f"zypper install kernel-default-devel=$(echo {release} | sed 's/-default$//')",
        f"follow {DRIVER_GUIDE}",
    )


# MokManager gives up after ten seconds; there is nothing to do before the reboot but to know what it will ask
LIST_NEW_KEYS = everywhere("mokutil --list-new")

SHOW_MODPROBE = everywhere("modprobe --showconfig | grep -i nvidia", needs_root=False)

REINSTALL_FIRMWARE = per_family(
    "apt install --reinstall firmware-nvidia-gsp && reboot",
    "dnf reinstall nvidia-kmod-common && reboot",
    "zypper install --force kernel-firmware-nvidia-gspx-G06 && reboot",
    f"follow {DRIVER_GUIDE}",
    "reboot",
)

_KEEP = "/etc/apt/apt.conf.d/52keep-nvidia-driver"

# a list in apt's configuration grows with every file that names it
KEEP_DRIVER = per_family(
    'printf \'Unattended-Upgrade::Package-Blacklist { "nvidia-"; "libnvidia-"; "cuda-"; };\\n\' > ' + _KEEP,
    "dnf install 'dnf-command(versionlock)' && dnf versionlock add '*nvidia*'",
    "zypper addlock '*nvidia*'",
    f"follow {DRIVER_GUIDE}",
)

# cuda-drivers-580 is there as well, and goes on within its branch
HOLD_BRANCH = per_family(
    "apt-mark hold cuda-drivers",
    "dnf install 'dnf-command(versionlock)' && dnf versionlock add '*nvidia*'",
    "zypper addlock '*nvidia*'",
    f"follow {DRIVER_GUIDE}",
)

REMOVE_RUN_INSTALL = per_family(
    "nvidia-uninstall && apt install --reinstall nvidia-open && reboot",
    "nvidia-uninstall && dnf reinstall nvidia-open && reboot",
    "nvidia-uninstall && zypper install --force nvidia-open && reboot",
    "nvidia-uninstall && reboot",
    "reboot",
)

NO_OPERATOR_DRIVER = everywhere(
    "kubectl patch clusterpolicies.nvidia.com cluster-policy --type merge "
    '--patch \'{"spec":{"driver":{"enabled":false}}}\'',
    "drain",
    needs_root=False,
)

DROP_STUBS = everywhere("sed -i '\\#/stubs#d' /etc/ld.so.conf.d/*.conf /etc/ld.so.conf && ldconfig")

_LINK_RULE = (
    'ACTION=="add", DEVPATH=="/bus/pci/drivers/nvidia", '
    'RUN+="/usr/bin/nvidia-ctk system create-dev-char-symlinks --create-all"'
)

LOAD_AT_BOOT = everywhere("echo nvidia_uvm > /etc/modules-load.d/nvidia-uvm.conf")

LINK_AT_BOOT = everywhere(f"echo '{_LINK_RULE}' > /etc/udev/rules.d/71-nvidia-dev-char.rules")
