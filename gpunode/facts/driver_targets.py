"""Which driver a node's GPUs want, and where it has one from: what doctor's fixes and the driver's own plan
both go by."""

from __future__ import annotations

from gpunode.errors import GpunodeError
from gpunode.facts import driver
from gpunode.facts.driver import driver_packages
from gpunode.facts.node import Node
from gpunode.facts.pci import PciGpu

LONG_TERM = 580  # what Ubuntu has for all its releases, and the last branch for GPUs before Turing
REPOSITORY = "developer.download.nvidia.com/compute/cuda/repos"
RUN_INSTALLER = "/usr/bin/nvidia-uninstall"
_REPOSITORY_DIRECTORIES = ("/etc/apt/sources.list.d", "/etc/yum.repos.d", "/etc/zypp/repos.d")


def last_branch(node: Node) -> int:
    """The last branch that drives the GPUs here; 0 for no limit."""
    return last_branch_for(node.gpus)


def computing(gpus: tuple[PciGpu, ...]) -> tuple[PciGpu, ...]:
    """Those that a driver is for: a card for a screen doesn't count beside GPUs that compute."""
    mine = tuple(gpu for gpu in gpus if not gpu.for_vms)
    return tuple(gpu for gpu in mine if not gpu.display) or mine


def last_branch_for(gpus: tuple[PciGpu, ...]) -> int:
    """As `last_branch`. An old GPU doesn't count where another needs a driver that doesn't take it."""
    rows = [row for gpu in computing(gpus) if (row := driver.supports(gpu.device_id))]
    limits = [row.max for row in rows if row.max]
    last = min(limits, default=0)
    alone = any(row.module == "open" or row.min > last for row in rows)
    return 0 if alone else last


def newer_branch(node: Node) -> int:
    """The branch to change to: the one that is kept longest, for whoever has that one the newest."""
    here = driver.branch(node.driver_version)
    wanted = LONG_TERM if here < LONG_TERM else max(here, *driver.kept())
    return min(wanted, last_branch(node) or wanted)


def has_repository(node: Node) -> bool:
    """Whether NVIDIA's repository is among this node's."""
    return any(REPOSITORY in line for line in repository_lines(node))


def repository_lines(node: Node) -> tuple[str, ...]:
    """Every line of the package manager's repository files; one that this user may not read is left out."""
    found: list[str] = []
    for directory in _REPOSITORY_DIRECTORIES:
        for path in node.host.glob(directory, "*"):
            try:
                found += (node.host.read_text(path) or "").splitlines()
            except GpunodeError:
                continue
    return tuple(found)


def module_for(node: Node) -> str:
    """The only kernel module that drives the GPUs here: open, proprietary, or empty for either."""
    return module_for_gpus(node.gpus)


def module_for_gpus(gpus: tuple[PciGpu, ...]) -> str:
    """As `module_for`."""
    if last_branch_for(gpus):
        return "proprietary"
    rows = (driver.supports(gpu.device_id) for gpu in gpus if not gpu.for_vms)
    return "open" if any(row is not None and row.module == "open" for row in rows) else ""


def run_installed(node: Node) -> bool:
    """Whether the driver came with NVIDIA's .run installer alone."""
    return node.host.executable(RUN_INSTALLER) and not driver_packages(node.packages)
