"""The device plugins' sockets in the kubelet's directory: who listens, and which are dead.

Each is only connected to; nothing is said. See `Host.listener`.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable
from pathlib import PurePosixPath

from gpunode.dataclass import dataclass
from gpunode.errors import Unreadable
from gpunode.host import Host
from gpunode.plugin.settings import KUBELET_SOCKET, Settings

_KUBELET = "kubelet.sock"


@dataclass(frozen=True)
class PluginSocket:
    """`state` as in `Host.socket_state`; `pid` and `program` of who listens, 0 and empty if it can't be told.

    `resource` is the one that a socket of this name serves by NVIDIA's convention and ours, else empty.
    """

    path: str
    state: str
    pid: int
    program: str
    resource: str


def pod_resources_socket(kubelet_socket: str, given: str) -> str:
    """Where to ask: as given, or for a kubelet in another place than usual beside its other sockets."""
    if given != Settings.pod_resources_socket or kubelet_socket in ("", KUBELET_SOCKET):
        return given
    return str(PurePosixPath(kubelet_socket).parent.parent / "pod-resources/kubelet.sock")


def plugin_sockets(host: Host, directory: str, resources: Iterable[str]) -> tuple[PluginSocket, ...]:
    """By name; `Unreadable` if the directory may not be listed."""
    settings = Settings()
    endpoints = {settings.endpoint(name): name for name in resources}
    found = []
    for name in host.listdir(directory):
        path = f"{directory}/{name}"
        if name == _KUBELET or not _is_socket(host, path, name):
            continue
        state, pid = host.listener(path)
        found.append(PluginSocket(path, state, pid, program(host, pid), endpoints.get(name, "")))
    return tuple(found)


def program(host: Host, pid: int) -> str:
    """The name of a process (proc(5)); empty if there is none or it can't be told."""
    try:
        return (host.read_text(f"/proc/{pid}/comm") or "").strip() if pid else ""
    except Unreadable:
        return ""


def _is_socket(host: Host, path: str, name: str) -> bool:
    """A recorded machine has its sockets in the recording, and at most a name in the tree."""
    if not host.live:
        return name.endswith(".sock")
    found = host.stat(path)
    return found is not None and stat.S_ISSOCK(found.st_mode)
