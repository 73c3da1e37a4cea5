"""An LXC or LXD container that means to run GPU containers itself."""

from __future__ import annotations

from gpunode.host import Host

_KIND = "/run/systemd/container"  # systemd writes what it detected (systemd-detect-virt(1))
UID_MAP = "/proc/1/uid_map"


def in_lxc(host: Host) -> bool:
    return (host.read_text(_KIND) or "").strip() in ("lxc", "lxc-libvirt")


def unprivileged(host: Host) -> bool | None:
    """Whether root in here is an ordinary user outside (user_namespaces(7)); None if it can't be told."""
    words = (host.read_text(UID_MAP) or "").split()
    return words[:2] != ["0", "0"] if len(words) >= 3 else None
