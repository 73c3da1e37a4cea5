"""Which container engines this node uses: only the state of a used engine can be a fault."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from gpunode.errors import DaemonError, GpunodeError
from gpunode.facts.docker import rootless_docker
from gpunode.facts.node import Node
from gpunode.facts.registry import ENGINES

_OFF = ("disabled", "masked", "masked-runtime", "bad")


class Role(NamedTuple):
    """`used`: GPU containers on this node need the engine. `reason` says why or why not, for users."""

    used: bool
    reason: str


def _absent(node: Node, engine: str) -> Role:
    title = ENGINES[engine].title
    unsafe = node.host.unsafe_program(ENGINES[engine].program)
    reason = f"is at {unsafe[0]}, but {unsafe[1]}" if unsafe else "isn't installed on this node"
    return Role(False, f"{title} {reason}")


def docker_role(node: Node) -> Role:
    """Docker counts unless the kubelet uses another engine, or it is only installed beside containerd."""
    if node.docker is None:
        return _absent(node, "docker")
    kubelet = node.kubelet
    if kubelet is not None and kubelet.joined:
        if kubelet.engine == "docker":
            return Role(True, f"the kubelet uses Docker ({kubelet.endpoint})")
        return Role(False, f"the kubelet uses {kubelet.engine} ({kubelet.endpoint}), not Docker")
    rootless = rootless_docker(node.host) if node.docker.process is None else None
    if rootless is not None and _docker_is_off(node):
        return Role(
            False, f"a user's rootless Docker is running (pid {rootless.pid}), the system's Docker is not"
        )
    return Role(True, "Docker is this node's container engine")


def _docker_is_off(node: Node) -> bool:
    """Whether root has disabled docker.service or has none: every user can run a process called dockerd,
    which proves nothing about a stopped service."""
    try:
        units = [node.units.get(name) for name in ("docker.service", "docker.socket")]
    except GpunodeError:
        return False  # systemd hangs
    known = [unit for unit in units if unit is not None]
    if not known and not node.host.systemd_runs():
        return not node.host.exists("/etc/init.d/docker")  # sysvinit and OpenRC
    return bool(known) and not any(unit.installed and unit.file not in _OFF for unit in known)


def containerd_role(node: Node) -> Role:
    """containerd's CRI counts if the kubelet uses it, or if it is the only engine here.

    Docker starts its own containerd and doesn't need its CRI, nor does nerdctl: Docker rules it out as long
    as no kubelet has joined a cluster, nerdctl as long as no kubelet exists.
    """
    if node.containerd is None:
        return _absent(node, "containerd")
    kubelet = node.kubelet
    if node.docker is not None and (kubelet is None or not kubelet.joined):
        return Role(False, "containerd only serves Docker on this node: no kubelet uses its CRI")
    if kubelet is None:
        if node.host.which("nerdctl"):
            return Role(False, "containerd serves nerdctl on this node, which needs no CRI")
        return Role(True, "containerd is the only container engine of this node")
    if kubelet.engine != "containerd":
        return Role(False, f"the kubelet uses {kubelet.engine} ({kubelet.endpoint}), not containerd")
    if _same_socket(kubelet.endpoint, node.containerd.socket):
        return Role(True, f"the kubelet uses containerd ({kubelet.endpoint})")
    return Role(
        False,
        f"the kubelet uses another containerd ({kubelet.endpoint}), not the one at {node.containerd.socket}",
    )


def crio_role(node: Node) -> Role:
    """CRI-O counts if the kubelet uses it, or if it is the only engine here."""
    if node.crio is None:
        return _absent(node, "crio")
    kubelet = node.kubelet
    if kubelet is None or not kubelet.joined:
        if node.docker is None and node.containerd is None:
            return Role(True, "CRI-O is the only container engine of this node")
        return Role(False, "no kubelet uses CRI-O on this node")
    if kubelet.engine == "crio":
        return Role(True, f"the kubelet uses CRI-O ({kubelet.endpoint})")
    return Role(False, f"the kubelet uses {kubelet.engine} ({kubelet.endpoint}), not CRI-O")


def podman_role(node: Node) -> Role:
    """Podman is preinstalled on some distributions: it counts only if no other engine is installed."""
    kubelet = node.kubelet
    if kubelet is not None and kubelet.joined:
        return Role(False, f"the kubelet uses {kubelet.engine} ({kubelet.endpoint}), not podman")
    if node.docker is not None or node.containerd is not None or node.crio is not None:
        return Role(
            False, "podman isn't the container engine of this node: another engine's daemon is installed"
        )
    if node.podman is None:
        return _absent(node, "podman")
    return Role(True, "podman is the only container engine of this node")


ROLES: Mapping[str, Callable[[Node], Role]] = {
    "docker": docker_role,
    "containerd": containerd_role,
    "crio": crio_role,
    "podman": podman_role,
}


def default_handler(node: Node) -> str:
    """The runtime of pods that name none; empty if the engine doesn't report it."""
    try:
        if containerd_role(node).used:
            return node.cri.default_handler
        if crio_role(node).used:
            return node.crio_config.named_default
    except DaemonError:
        pass
    return ""


def _same_socket(left: str, right: str) -> bool:
    return left.replace("/var/run/", "/run/") == right.replace("/var/run/", "/run/")
