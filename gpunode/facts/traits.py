"""What a node may or may not have, by name: checks say with it where they apply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpunode.facts.node import Node

OPERATOR_DRIVER = "/run/nvidia/driver/usr"  # where the GPU operator mounts its driver container


@dataclass(frozen=True)
class Trait:
    """`present` and `absent` say in words that a node has it, or hasn't."""

    holds: Callable[[Node], bool]
    present: str
    absent: str


def _operator_driver(node: Node) -> bool:
    return node.host.is_dir(OPERATOR_DRIVER)


def _vfio_host(node: Node) -> bool:
    return bool(node.gpus) and all(gpu.driver == "vfio-pci" for gpu in node.gpus)


def _kubelet(node: Node) -> bool:
    return node.kubelet is not None and node.kubelet.joined


TRAITS = {
    "gpu": Trait(lambda node: bool(node.gpus), "there are GPUs on the bus", "no GPU is on the bus"),
    "driver": Trait(
        lambda node: node.module is not None, "the driver is loaded", "the NVIDIA driver isn't loaded"
    ),
    "operator-driver": Trait(
        _operator_driver, "the GPU operator's container brings the driver", "the driver is the host's own"
    ),
    "vfio-host": Trait(
        _vfio_host, "every GPU is kept for virtual machines", "the GPUs aren't kept for virtual machines"
    ),
    "kubelet": Trait(_kubelet, "this is a Kubernetes node", "no kubelet that has joined a cluster is here"),
    "docker": Trait(lambda node: node.docker is not None, "Docker is installed", "Docker isn't installed"),
    "containerd": Trait(
        lambda node: node.containerd is not None, "containerd is installed", "containerd isn't installed"
    ),
}
"""By name, as `Check.needs` and `Check.unless` have them."""
