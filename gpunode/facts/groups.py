"""Groups of this node's own users (group(5)). Those of a directory service aren't in the file."""

from __future__ import annotations

from gpunode.host import Host

# whoever is in one of these may become root anyway, by sudo or su; the last is Google's machines'
_ADMINISTRATORS = ("root", "sudo", "wheel", "admin", "google-sudoers")


def members(host: Host, group: str) -> tuple[str, ...]:
    """Who is in a group beside those whose first group it is."""
    for line in (host.read_text("/etc/group") or "").splitlines():
        name, _, rest = line.partition(":")
        if name == group:
            return tuple(filter(None, rest.rpartition(":")[2].strip().split(",")))
    return ()


def without_administrators(host: Host, users: tuple[str, ...]) -> tuple[str, ...]:
    """Of these users those who can't become root otherwise."""
    administrators = {"root", *(user for group in _ADMINISTRATORS for user in members(host, group))}
    return tuple(user for user in users if user not in administrators)
