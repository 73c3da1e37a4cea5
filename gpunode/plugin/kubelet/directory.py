"""The kubelet's directories: looked at without gRPC."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import PurePosixPath

from gpunode.errors import PreconditionError, Unreadable
from gpunode.host import Host
from gpunode.plugin.settings import Settings


def check_directory(host: Host, path: str) -> bool:
    """Whether the directory is there. `PreconditionError` if it may not even be looked at."""
    try:
        return is_directory(host, path)
    except Unreadable as error:
        raise PreconditionError(error.message, hint="run as root, for example with sudo") from error


def is_directory(host: Host, path: str) -> bool:
    found = host.stat(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def is_socket(host: Host, path: str) -> bool:
    return identity(host, path) is not None


def identity(host: Host, path: str) -> tuple[int, int, int] | None:
    """What changes when a socket is made anew; None if there is no socket.

    The change time is part of it, as a new socket often gets the old one's inode number again.
    """
    found = host.stat(path)
    if found is None or not stat.S_ISSOCK(found.st_mode):
        return None
    return (found.st_dev, found.st_ino, found.st_ctime_ns)


def registry(settings: Settings) -> str:
    """Where the kubelet's plugin watcher looks: beside its device plugin directory."""
    return str(PurePosixPath(settings.directory).parent / "plugins_registry")


def registry_socket(host: Host, settings: Settings, resource: str) -> str:
    """A new path for a resource's socket in the plugin watcher's directory.

    Each has a name of its own. The kubelet delays its next attempt on a path by up to two minutes after
    failed ones, and its monitor (since 1.35) deregisters a path that was dead for a while.
    """
    stem, _, suffix = settings.endpoint(resource).rpartition(".")
    return f"{registry(settings)}/{stem}@{int(host.now() * 100) & 0xFFFFFFFF:08x}.{suffix}"


def registry_sockets(host: Host, settings: Settings, resource: str) -> Iterator[str]:
    """The sockets of a resource in the plugin watcher's directory, those of earlier releases included."""
    plain = settings.endpoint(resource)
    stem, _, suffix = plain.rpartition(".")
    for path in host.glob(registry(settings), f"{stem}*.{suffix}"):
        name = path.rpartition("/")[2]
        if name == plain or name.startswith(f"{stem}@"):
            yield path


def socket_directories(settings: Settings) -> tuple[str, ...]:
    """Where the kubelet's socket and ours lie."""
    kubelet = str(PurePosixPath(settings.kubelet_socket).parent) if settings.kubelet_socket else ""
    ours = registry(settings) if settings.registration == "watcher" else settings.directory
    return tuple(dict.fromkeys(path for path in (kubelet, ours) if path))
