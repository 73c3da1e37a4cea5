"""Which of the toolkit's ways of putting GPUs into containers the engines of this node take."""

from __future__ import annotations

from gpunode.facts.engines import containerd_role, crio_role, docker_role
from gpunode.facts.node import Node
from gpunode.facts.toolkit_settings import MODE, runtime_mode
from gpunode.tables import gate


def cli_user(node: Node) -> str:
    """Who calls nvidia-container-cli as root here, in words; empty if nobody does, or if that can't be told.

    Docker's --gpus does before it takes CDI devices, and the runtime does in mode legacy.
    """
    settings = node.toolkit_settings
    docker = node.docker if docker_role(node).used else None
    if docker is not None and docker.user:
        docker = None
    if docker and docker.version and docker.version < gate("docker", "gpus-by-cdi") and _hook_allowed(node):
        return f"Docker {'.'.join(map(str, docker.version))} takes --gpus by nvidia-container-cli"
    if runtime_mode(settings, node.toolkit.version) != "legacy":
        return ""
    if docker or any(role(node).used for role in (containerd_role, crio_role)):
        return "the nvidia runtime calls nvidia-container-cli (mode legacy)"
    return ""


def _hook_allowed(node: Node) -> bool:
    """The hook refuses to work where the mode is set to cdi."""
    return str(node.toolkit_settings.value(MODE)) != "cdi"
