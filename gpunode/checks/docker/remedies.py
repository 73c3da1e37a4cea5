"""What mends Docker itself."""

from __future__ import annotations

from gpunode.checks import fixes
from gpunode.checks.fixes import everywhere, per_family
from gpunode.facts.node import Node
from gpunode.result import Fix

_GUIDE = "https://docs.docker.com/engine/install/"

UPGRADE = per_family(
    "apt update && apt install --only-upgrade docker-ce",
    "dnf upgrade docker-ce",
    "zypper update docker",
    f"follow {_GUIDE}",
    "restart",
)

_PACKAGES = ("docker-ce", "docker.io", "moby-engine", "docker")


def newer(node: Node) -> Fix | None:
    """By the package that this Docker came in; None if that isn't known."""
    names = [name for name in _PACKAGES if name in node.packages.installed]
    return fixes.upgrade(node.distribution.family, names, "restart")


# the snap's containers and images stay in a snapshot of the snap
_CONFIGURE = "gpunode configure-runtime --runtime docker"
REPLACE_SNAP = per_family(
    f"snap remove docker && apt install docker.io && {_CONFIGURE}",
    f"snap remove docker && dnf install docker-ce && {_CONFIGURE}",
    f"snap remove docker && zypper install docker && {_CONFIGURE}",
    f"follow {_GUIDE}",
    "drain",
)
CONFIGURE_DEFAULT = everywhere(f"{_CONFIGURE} --set-as-default", "restart")
INSTALL = per_family(
    f"apt install docker.io && docker context use default && {_CONFIGURE}",
    f"dnf install docker-ce && docker context use default && {_CONFIGURE}",
    f"zypper install docker && docker context use default && {_CONFIGURE}",
    f"follow {_GUIDE}",
)
