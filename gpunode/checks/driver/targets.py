"""Which driver this very node should have: the newest that drives its GPUs, under the names that its packages
have."""

from __future__ import annotations

import re

from gpunode.errors import GpunodeError
from gpunode.facts import gpu_support
from gpunode.facts.driver import driver_packages
from gpunode.facts.gpu_support import Supports
from gpunode.facts.node import Node
from gpunode.facts.packages import Package

LONG_TERM = 580  # what Ubuntu has for all its releases, and the last branch for GPUs before Turing
REPOSITORY = "developer.download.nvidia.com/compute/cuda/repos"
_REPOSITORY_DIRECTORIES = ("/etc/apt/sources.list.d", "/etc/yum.repos.d", "/etc/zypp/repos.d")
_RUN_INSTALLER = "/usr/bin/nvidia-uninstall"
# Ubuntu's names carry branch and kind: nvidia-headless-no-dkms-535-server-open, and modules of a kernel's
# flavour; those of one kernel (linux-modules-nvidia-535-6.8.0-45-generic) come along with them
_UBUNTU = re.compile(
    r"(nvidia-driver|nvidia-headless|nvidia-headless-no-dkms|nvidia-utils|nvidia-fabricmanager|libnvidia-nscq"
    r"|linux-modules-nvidia)-(\d{3})(-server)?(-open)?(-[a-z][a-z0-9.-]*)?"
)
_COME_ALONG = "nvidia-utils"  # nvidia-driver-BRANCH needs it, nvidia-headless-BRANCH doesn't
_WITH_KIND = ("nvidia-driver", "nvidia-headless", "nvidia-headless-no-dkms", "linux-modules-nvidia")


def last_branch(node: Node) -> int:
    """The last branch that drives the GPUs here; 0 for no limit. A card for a screen doesn't count beside
    GPUs that compute, nor an old GPU where another needs a driver that doesn't take the old one."""
    mine = [gpu for gpu in node.gpus if not gpu.for_vms]
    computing = [gpu for gpu in mine if not gpu.display] or mine
    rows = [row for gpu in computing if (row := gpu_support.supports(gpu.device_id))]
    limits = [row.max for row in rows if row.max]
    last = min(limits, default=0)
    alone = any(row.module == "open" or row.min > last for row in rows)
    return 0 if alone else last


def newer_branch(node: Node) -> int:
    """The branch to change to: the one that is kept longest, for whoever has that one the newest."""
    here = gpu_support.branch(node.driver_version)
    wanted = LONG_TERM if here < LONG_TERM else max(here, *gpu_support.kept())
    return min(wanted, last_branch(node) or wanted)


def from_ubuntu(node: Node, branch: int, module: str = "") -> str:
    """Ubuntu's own driver packages that are installed here, in another branch and with this kernel module
    (open, proprietary, empty for the one that they have); empty if none is."""
    if node.distribution.id != "ubuntu":
        return ""
    own = [name for name, one in node.packages.installed.items() if _of_archive(node, one)]
    found = [parts for name in own if (parts := _UBUNTU.fullmatch(name))]
    if not any(parts[1] in _WITH_KIND for parts in found):
        return ""
    whole = any(parts[1] == "nvidia-driver" for parts in found)
    kept = (parts for parts in found if not (whole and parts[1] == _COME_ALONG))
    return " ".join(sorted({_renamed(parts, branch, module) for parts in kept}))


def _of_archive(node: Node, package: Package) -> bool:
    """NVIDIA's repository has packages of the same names, whose releases are written 580.95.05-0ubuntu1."""
    return "-0ubuntu0." in package.version or not has_repository(node)


def _renamed(parts: re.Match[str], branch: int, module: str) -> str:
    name, _, server, kind, kernel = parts.groups("")
    if module and name in _WITH_KIND:
        kind = "" if module == "proprietary" else "-open"
    return f"{name}-{branch}{server}{kind}{kernel}"


def has_repository(node: Node) -> bool:
    """Whether NVIDIA's repository is among this node's."""
    for directory in _REPOSITORY_DIRECTORIES:
        for path in node.host.glob(directory, "*"):
            try:
                if REPOSITORY in (node.host.read_text(path) or ""):
                    return True
            except GpunodeError:
                continue
    return False


def module_for(node: Node) -> str:
    """The only kernel module that drives the GPUs here: open, proprietary, or empty for either."""
    if last_branch(node):
        return "proprietary"
    rows = (gpu_support.supports(gpu.device_id) for gpu in node.gpus if not gpu.for_vms)
    return "open" if any(row is not None and row.module == "open" for row in rows) else ""


def run_installed(node: Node) -> bool:
    """Whether the driver came with NVIDIA's .run installer alone."""
    return node.host.executable(_RUN_INSTALLER) and not driver_packages(node.packages)


def spares(node: Node, wanted: Supports) -> bool:
    """Whether the driver that `wanted` GPUs need also drives those that have one now."""
    branch = gpu_support.branch(node.driver_version)
    branch = max(min(branch, wanted.max or branch), wanted.min)
    opened = {"open": True, "proprietary": False}.get(wanted.module, node.module_open)
    rows = (gpu_support.supports(gpu.device_id) for gpu in node.gpus if gpu.driver == "nvidia")
    return not any(row and gpu_support.refusal(row, branch, opened) for row in rows)
