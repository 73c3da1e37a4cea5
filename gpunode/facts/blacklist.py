"""How nouveau and nova are kept from GPUs: files of modprobe.d, and what has the next boot know them."""

from __future__ import annotations

NOUVEAU_FILE = "/etc/modprobe.d/blacklist-nouveau.conf"
NOUVEAU_TEXT = "blacklist nouveau\noptions nouveau modeset=0\n"
NOVA_FILE = "/etc/modprobe.d/blacklist-nova.conf"
NOVA_TEXT = "blacklist nova_core\nblacklist nova_drm\nblacklist nova\n"
# by distribution family: the initramfs may hold nouveau, and loads it before any file of the root is read
INITRAMFS: dict[str, tuple[tuple[str, ...], ...]] = {
    "debian": (("update-initramfs", "-u", "-k", "all"),),
    "rhel": (
        ("dracut", "-f", "--regenerate-all"),
        ("grubby", "--update-kernel=ALL", "--args=rd.driver.blacklist=nouveau modprobe.blacklist=nouveau"),
    ),
    "suse": (("dracut", "-f", "--regenerate-all"),),
}
