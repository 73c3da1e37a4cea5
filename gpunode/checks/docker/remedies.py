"""What mends Docker itself."""

from __future__ import annotations

from gpunode.checks import fixes
from gpunode.checks.fixes import everywhere, per_family
from gpunode.facts.daemons import Daemon
from gpunode.facts.docker_rootless import sudo_name
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


def restart(daemon: Daemon | None, verb: str = "restart") -> str:
    """The command that restarts, or reloads, this Docker: the system's, the snap's or a user's own."""
    if daemon is not None and daemon.manager == "snap":
        return "snap restart docker"
    return f"systemctl {'--user ' if daemon is not None and daemon.user else ''}{verb} docker"


def edit(daemon: Daemon, line: int | None) -> Fix:
    """Open its file at a line, and have it take the file."""
    where = f"+{line} " if line else ""
    return Fix(
        f"${{EDITOR:-vi}} {where}{daemon.config_path} && {restart(daemon)}", not daemon.user, "restart"
    )


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
    f"apt install docker.io && {_CONFIGURE}",
    f"dnf install docker-ce && {_CONFIGURE}",
    f"zypper install docker && {_CONFIGURE}",
    f"follow {_GUIDE}",
)

_FOR_DESKTOP = {"debian": "apt install docker-ce", "rhel": "dnf install docker-ce"}


def beside_desktop(node: Node, user: str) -> Fix:
    """A Docker of the node's for a user of Docker Desktop. That needs Docker's own docker-ce-cli, which a
    distribution's docker.io would remove."""
    context = f"sudo -Hu {sudo_name(user)} docker context use default"
    if node.docker is not None:
        return Fix(context)
    install = _FOR_DESKTOP.get(node.distribution.family)
    if install is None:
        return Fix(f"follow {_GUIDE}", needs_root=False)
    return Fix(f"{install} && {context} && {_CONFIGURE}")
