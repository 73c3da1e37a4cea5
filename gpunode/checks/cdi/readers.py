"""The engines of this node that read CDI specifications."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gpunode.checks.model import Verdict, fail, warn
from gpunode.dataclass import dataclass
from gpunode.errors import ConfigError, DaemonError
from gpunode.facts.containerd import dig
from gpunode.facts.engines import containerd_role, crio_role, docker_role, podman_role
from gpunode.facts.node import Node
from gpunode.facts.toolkit_settings import MODE

# the toolkit's programs that put GPUs into containers without a specification on disk
HOOKS = ("nvidia-container-runtime-hook", "nvidia-container-runtime")


@dataclass(frozen=True)
class Reader:
    """One engine that is used here and has CDI on. `needs`: it gets GPUs in no other way."""

    name: str
    version: tuple[int, ...]
    needs: bool = False


def readers(node: Node) -> tuple[Reader, ...]:
    """Daemons that don't answer are left out: whether their CDI is on can't be told."""
    return tuple(_readers(node))


def _readers(node: Node) -> Iterator[Reader]:
    programs = node.toolkit.programs
    alone = not any(name in programs for name in HOOKS)
    if node.docker is not None and docker_role(node).used and docker_directories(node):
        yield Reader("docker", node.docker.version, alone)
    if node.containerd is not None and containerd_role(node).used and _containerd_on(node):
        yield Reader("containerd", node.containerd.version, alone)
    if node.crio is not None and crio_role(node).used:
        yield Reader("crio", node.crio.version, alone)
    if node.podman is not None and podman_role(node).used:
        yield Reader("podman", node.podman.version, needs=True)


def judge(node: Node) -> Callable[..., Verdict]:
    """`fail` where an engine or the toolkit's runtime takes specifications, else `warn`: nothing breaks."""
    try:
        mode = node.toolkit_settings.value(MODE)
    except ConfigError:
        mode = ""
    return fail if mode == "cdi" or readers(node) else warn


def docker_directories(node: Node) -> tuple[str, ...]:
    """Where the running Docker looks for specifications, () where its CDI is off or it doesn't say."""
    try:
        found = node.docker_info.get("CDISpecDirs")
    except DaemonError:
        return ()
    return tuple(str(one) for one in found if one) if isinstance(found, list) else ()


def _containerd_on(node: Node) -> bool:
    try:
        return dig(node.cri.config, "enableCDI") is True
    except DaemonError:
        return False
