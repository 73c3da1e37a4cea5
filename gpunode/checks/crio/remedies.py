"""What mends CRI-O."""

from __future__ import annotations

from gpunode.checks.fixes import everywhere
from gpunode.result import Fix

_RESTART = "systemctl restart crio"
RESTART = everywhere(_RESTART, "restart")
CONFIGURE = everywhere("gpunode configure-runtime --runtime crio", "restart")
EDIT = everywhere(f"${{EDITOR:-vi}} /etc/crio/crio.conf.d/99-nvidia.conf && {_RESTART}", "restart")


def restart(unit: str | None) -> Fix:
    """Running containers survive a restart of CRI-O."""
    return Fix(f"systemctl restart {(unit or 'crio').removesuffix('.service')}", disruptive="restart")


def edit(path: str, line: int | None) -> Fix:
    """Correct a file and have CRI-O read it."""
    return Fix(f"${{EDITOR:-vi}} {f'+{line} ' if line else ''}{path} && {_RESTART}", disruptive="restart")


def move(paths: tuple[str, ...], place: str) -> Fix:
    """Bring files to another directory and have CRI-O read anew."""
    return Fix(f"mkdir -p {place} && mv {' '.join(paths)} {place}/ && {_RESTART}", disruptive="restart")


def install_monitor(family: str, path: str) -> Fix:
    """The package that a missing monitor belongs to: CRI-O's own for one below its directory, else conmon."""
    own = path.startswith("/usr/libexec/crio/")
    again = {"debian": "apt install --reinstall", "rhel": "dnf reinstall", "suse": "zypper install --force"}
    first = {"debian": "apt install", "rhel": "dnf install", "suse": "zypper install"}
    command = (again if own else first).get(family)
    if command is None:
        return edit(path, None)
    return Fix(f"{command} {'cri-o' if own else 'conmon'} && {_RESTART}", disruptive="restart")
