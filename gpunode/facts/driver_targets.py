"""The driver that a node's GPUs need, and its source: for doctor's fixes and the driver plan."""

from __future__ import annotations

from gpunode.facts import driver
from gpunode.facts.driver import driver_packages
from gpunode.facts.node import Node
from gpunode.facts.pci import PciGpu

LONG_TERM = 580  # what Ubuntu has for all its releases, and the last branch for GPUs before Turing
REPOSITORY = "developer.download.nvidia.com/compute/cuda/repos"
RUN_INSTALLER = "/usr/bin/nvidia-uninstall"
_REPOSITORY_DIRECTORIES = ("/etc/apt/sources.list.d", "/etc/yum.repos.d", "/etc/zypp/repos.d")


def computing(gpus: tuple[PciGpu, ...]) -> tuple[PciGpu, ...]:
    """GPUs that need the driver: a display card doesn't count beside GPUs that compute."""
    compute_gpus = tuple(gpu for gpu in gpus if not gpu.for_vms)
    return tuple(gpu for gpu in compute_gpus if not gpu.display) or compute_gpus


def last_branch(gpus: tuple[PciGpu, ...]) -> int:
    """The last branch that supports the GPUs; 0 for no limit. An old GPU doesn't count if another one needs a
    driver that doesn't support it."""
    rows = [row for gpu in computing(gpus) if (row := driver.supports(gpu.device_id))]
    limits = [row.max for row in rows if row.max]
    last = min(limits, default=0)
    alone = any(row.module == "open" or row.min > last for row in rows)
    return 0 if alone else last


def has_repository(node: Node) -> bool:
    """Whether NVIDIA's repository is among this node's."""
    return any(REPOSITORY in line for line in repository_lines(node))


def repository_lines(node: Node) -> tuple[str, ...]:
    """All lines of the package manager's repository files; files that this user can't read are left out."""
    lines: list[str] = []
    for directory in _REPOSITORY_DIRECTORIES:
        for path in node.host.glob(directory, "*"):
            lines += node.host.text_or_empty(path).splitlines()
    return tuple(lines)


def module_for_gpus(gpus: tuple[PciGpu, ...]) -> str:
    """The only kernel module that supports them: open, proprietary, or empty for either."""
    if last_branch(gpus):
        return "proprietary"
    rows = (driver.supports(gpu.device_id) for gpu in gpus if not gpu.for_vms)
    return "open" if any(row is not None and row.module == "open" for row in rows) else ""


def run_installed(node: Node) -> bool:
    """Whether the driver was installed only by NVIDIA's .run installer."""
    return node.host.executable(RUN_INSTALLER) and not driver_packages(node.packages)
