"""What mends the fabric, MIG layouts and virtual GPUs."""

from __future__ import annotations

from gpunode.checks import fixes
from gpunode.facts.driver import version_numbers
from gpunode.facts.node import Node
from gpunode.result import Fix

_ENABLE = "systemctl enable --now nvidia-fabricmanager"
_VERSION = "$(cat /sys/module/nvidia/version)"

# apt takes a pattern for the packager's revision
MATCHING_MANAGER = fixes.per_family(
    f'apt install "nvidia-fabricmanager={_VERSION}*" && {_ENABLE}',
    f"dnf install nvidia-fabricmanager-{_VERSION} && {_ENABLE}",
    f"zypper install nvidia-fabricmanager={_VERSION} && {_ENABLE}",
    "follow https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/",
    "restart",
)
START_MANAGER = fixes.everywhere(_ENABLE, "restart")
READ_MANAGER_LOG = fixes.everywhere("journalctl -b -u nvidia-fabricmanager -n 50")


def matching_manager(node: Node, version: str) -> Fix | None:
    """The package of exactly the loaded driver's version. Ubuntu's name carries the branch up to 580."""
    numbers = version_numbers(version)
    if not numbers or node.distribution.family != "debian":
        return None
    branch = f"-{numbers[0]}" if numbers[0] <= 580 else ""
    return Fix(f"apt install 'nvidia-fabricmanager{branch}={version}*' && {_ENABLE}", True, "restart")
