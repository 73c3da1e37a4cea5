"""What the command of a fix disturbs on a node, in words."""

from __future__ import annotations

import re

from gpunode.checks.fixes import POWER_OFF
from gpunode.errors import GpunodeError
from gpunode.facts.daemons import Daemon
from gpunode.facts.docker import beyond_reload
from gpunode.facts.node import Node
from gpunode.output.result import Fix

_DISTURBS = {"drain": "stops GPU work", "reboot": "reboots this machine"}
_UNKNOWN = "stops its containers unless live-restore is on"
_RELOADS_DOCKER = "reloads Docker: running containers continue"
_LOADS = "loads Docker's runtimes"  # by a reload or a restart; `_of_docker` says which
_RESTARTS_DOCKER = "restarts Docker"
# what a command with `restart` restarts, the most disruptive first: the layer of a check doesn't show it
_RESTARTS = (
    (r"wsl\.exe --shutdown", "ends everything that runs in WSL"),
    (r"\bpct reboot\b", "reboots this LXC container"),
    (
        r"\bsetup --kubernetes\b",
        "configures the kubelet's container engine, and restarts it if needed: running pods continue",
    ),
    (r"configure-runtime --runtime docker\b(?!.*--cdi)", _LOADS),
    (
        r"--runtime docker\b|(start|stop|update) docker\b|\bdocker-ce\b|\bdocker\.io\b",
        _RESTARTS_DOCKER,
    ),
    (
        r"--runtime (k3s|rke2|k0s|microk8s)\b|restart (k3s|rke2|k0s|microk8s)|k0s stop",
        "restarts this node's Kubernetes: running pods continue",
    ),
    (
        r"--runtime containerd\b|restart containerd\b|\bcontainerd\.io\b",
        "restarts containerd: running containers continue",
    ),
    (r"disable --now cri-?o\b", "stops CRI-O"),
    (r"--runtime crio\b|restart cri-?o\b", "restarts CRI-O: running containers continue"),
    (r"restart kubelet\b", "restarts the kubelet: running pods continue"),
    (r"nvidia-fabricmanager", "restarts the fabric manager"),
    (r"nvidia-imex", "restarts the IMEX daemon"),
    (
        r"\bset env\b|\bpatch (daemonset|clusterpolicies)\b",
        "restarts the device plugin on all nodes of the cluster: running pods continue",
    ),
    (r"device-plugin", "restarts the device plugin: running pods continue"),
    (
        r"\bcrictl (stop|rm)",
        "stops these containers and ends their work: the kubelet starts them again unless restartPolicy is "
        "Never",
    ),
    (r"\bdocker restart\b|\bpodman restart\b", "restarts these containers, which ends their work"),
)
# commands that replace the driver's libraries, which then don't match the loaded module
_REPLACES_DRIVER = re.compile(r"\bdriver install\b|\bakmod-nvidia\b|\bkmod-nvidia\b|NVIDIA-Linux-\S+\.run\b")


def disturbance(fix: Fix, node: Node | None = None) -> str:
    """What a fix disturbs, its own `effect` if it has one; empty for nothing. Without a `node` nothing is
    known of its Docker."""
    if fix.effect or fix.disruptive == "none":
        return fix.effect
    if fix.command == POWER_OFF.other.command:
        return "powers the node off: it has to be switched on at its management controller (BMC)"
    if fix.disruptive == "drain" and replaces_driver(fix.command):
        return "GPU programs that start before the reboot fail"
    effects = (effect for pattern, effect in _RESTARTS if re.search(pattern, fix.command))
    effect = _DISTURBS.get(fix.disruptive) or next(effects, "restarts a daemon")
    return _of_docker(node, fix.command, effect) if effect in (_LOADS, _RESTARTS_DOCKER) else effect


def _of_docker(node: Node | None, command: str, effect: str) -> str:
    """What a command does to the containers of the system's Docker, as checks have read it; a daemon that
    hangs must not be queried again."""
    docker = node.__dict__.get("docker") if node is not None else None
    if node is None or not isinstance(docker, Daemon) or "sudo -Hu" in command or "snap" in command:
        if effect == _LOADS:
            return f"reloads Docker; a restart, if it needs one (see --dry-run), {_UNKNOWN}"
        return f"restarts Docker, which {_UNKNOWN}"
    if docker.process is None:
        return "starts Docker, which isn't running"
    if effect == _LOADS and not _beyond_reload(node, docker):
        return _RELOADS_DOCKER
    return f"restarts Docker, which {_containers(node)}"


def _beyond_reload(node: Node, docker: Daemon) -> bool:
    """As `gpunode configure-runtime` decides it. A fact that can't be read counts as a reason to restart."""
    try:
        return bool(beyond_reload(node.host, docker))
    except (GpunodeError, OSError):
        return True


def replaces_driver(command: str) -> bool:
    """Whether the command replaces the installed driver."""
    return _REPLACES_DRIVER.search(command) is not None


def _containers(node: Node) -> str:
    """What a restart of Docker does to its containers, from the report that a check has read; a check that
    wasn't selected hasn't read it."""
    info = node.__dict__.get("docker_info")
    if not isinstance(info, dict):
        return _UNKNOWN
    live_restore, running = info.get("LiveRestoreEnabled"), info.get("ContainersRunning")
    if live_restore is True:
        return "stops no container: live-restore is on"
    if live_restore is not False or not isinstance(running, int):
        return _UNKNOWN
    if running == 0:
        return "stops no container: none is running"
    return f"stops {running} running containers" if running > 1 else "stops 1 running container"
