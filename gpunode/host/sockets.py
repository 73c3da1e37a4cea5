"""Unix and TCP sockets: connecting to daemons, identifying listeners, listening, notifying systemd."""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
from collections.abc import Callable
from pathlib import Path

from gpunode.errors import DaemonError, PreconditionError
from gpunode.host.files import socket_state_of

_BACKLOG = 128


def connect_unix(path: str, timeout: float) -> socket.socket:
    """A connected stream socket. `DaemonError` says why there is none: absent, refused, denied."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout)
    try:
        connection.connect(path)
    except OSError as error:
        connection.close()
        raise DaemonError(
            f"can't connect to {path}: {error.strerror or error}", code=socket_state_of(error)
        ) from error
    return connection


def listener(
    path: str, status: os.stat_result | None, connect: Callable[[str, float], socket.socket]
) -> tuple[str, int]:
    """The state of what `stat` found at `path`, and the listening process; see `Host.listener`."""
    if status is None:
        return "absent", 0
    if not stat.S_ISSOCK(status.st_mode):
        return "not-a-socket", 0
    try:
        with connect(path, 1.0) as connection:
            # the process that called listen(2) on the other side (unix(7)); 0 if it is in another namespace
            size = struct.calcsize("3i")
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
            return "listening", int(struct.unpack("3i", credentials)[0])
    except DaemonError as error:
        return error.code, 0


def refuses(path: Path) -> bool:
    """Whether no process listens on a socket file; never waits (unix(7): a full backlog is EAGAIN)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        try:
            connection.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


def listen_tcp(address: str, port: int) -> socket.socket:
    """A listening socket; an empty `address` means all of this node's addresses.

    `PreconditionError` says why there can't be one, and how to fix it.
    """
    place = f"{address or '*'}:{port}"
    try:
        addresses = socket.getaddrinfo(
            address or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )
    except OSError as error:
        raise PreconditionError(
            f"can't listen on {place}: {error.strerror or error}", hint="specify an address of this node"
        ) from error
    family, kind, protocol, _, where = addresses[0]
    try:
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        hint = "under systemd RestrictAddressFamilies forbids it: see docs/metrics.md"
        raise PreconditionError(f"can't listen on {place}: {error.strerror or error}", hint=hint) from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        hints = {
            errno.EADDRINUSE: f"find the process that uses it: ss -ltnp sport = :{port}; or use another port",
            errno.EACCES: "ports below 1024 need root",
            errno.EADDRNOTAVAIL: "specify an address of this node: ip -brief address",
        }
        hint = hints.get(error.errno or 0, "")
        raise PreconditionError(f"can't listen on {place}: {error.strerror or error}", hint=hint) from error
    return listening


def listen_unix(path: Path) -> socket.socket:
    """A listening socket, created with mode 0600: bind(2) uses the mode that the descriptor has. A dead
    socket at the path is removed; anything else, or a socket in use, stays and is a `PreconditionError`."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(listening.fileno(), 0o600)
        if path.is_socket() and refuses(path):
            path.unlink()
        listening.bind(os.fsencode(path))
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        reason = error.strerror or str(error)
        hints = {errno.EADDRINUSE: f"find the process that uses it: ss -xlp src {path}"}
        raise PreconditionError(
            f"can't listen on {path}: {reason}", hint=hints.get(error.errno or 0, "choose another directory")
        ) from error
    return listening


def send_datagram(address: str, message: str) -> None:
    """One datagram to a unix socket; ``@`` in front of the address is the abstract namespace's."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as datagram:
        datagram.connect("\0" + address[1:] if address[0] == "@" else address)
        datagram.sendall(message.encode())
