"""Which driver this very node should have: the newest that drives its GPUs, under the names that its packages
have."""

from __future__ import annotations

import re

from gpunode.facts import gpu_support
from gpunode.facts.driver_targets import (
    LONG_TERM,
    REPOSITORY,
    has_repository,
    last_branch,
    module_for,
    newer_branch,
    run_installed,
)
from gpunode.facts.gpu_support import Supports
from gpunode.facts.node import Node
from gpunode.facts.packages import Package

__all__ = [
    "LONG_TERM",
    "REPOSITORY",
    "from_ubuntu",
    "has_repository",
    "last_branch",
    "module_for",
    "newer_branch",
    "run_installed",
    "spares",
]
# Ubuntu's names carry branch and kind: nvidia-headless-no-dkms-535-server-open, and modules of a kernel's
# flavour; those of one kernel (linux-modules-nvidia-535-6.8.0-45-generic) come along with them
_UBUNTU = re.compile(
    r"(nvidia-driver|nvidia-headless|nvidia-headless-no-dkms|nvidia-utils|nvidia-fabricmanager|libnvidia-nscq"
    r"|linux-modules-nvidia)-(\d{3})(-server)?(-open)?(-[a-z][a-z0-9.-]*)?"
)
_COME_ALONG = "nvidia-utils"  # nvidia-driver-BRANCH needs it, nvidia-headless-BRANCH doesn't
_WITH_KIND = ("nvidia-driver", "nvidia-headless", "nvidia-headless-no-dkms", "linux-modules-nvidia")


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


def spares(node: Node, wanted: Supports) -> bool:
    """Whether the driver that `wanted` GPUs need also drives those that have one now."""
    branch = gpu_support.branch(node.driver_version)
    branch = max(min(branch, wanted.max or branch), wanted.min)
    opened = {"open": True, "proprietary": False}.get(wanted.module, node.module_open)
    rows = (gpu_support.supports(gpu.device_id) for gpu in node.gpus if gpu.driver == "nvidia")
    return not any(row and gpu_support.refusal(row, branch, opened) for row in rows)
