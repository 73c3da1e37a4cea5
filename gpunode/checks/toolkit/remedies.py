"""What mends the toolkit of this very node: whoever brought it brings the next one, and writes its file."""

from __future__ import annotations

from gpunode.checks.fixes import per_family
from gpunode.facts.node import Node
from gpunode.facts.toolkit_config import DEFAULT_PATH
from gpunode.facts.toolkit_settings import RUNTIMES, Settings
from gpunode.result import Fix

OPERATOR_PLACES = ("/usr/local/nvidia/toolkit/", "/run/nvidia/toolkit/")
_OPERATOR_GUIDE = "https://docs.nvidia.com/datacenter/cloud-native/gpu-operator/latest/upgrade.html"
# where packages put a low-level runtime that isn't on PATH
_LOW_LEVEL = ("/usr/libexec/crio/crun", "/usr/libexec/crio/runc")
_INSTALL_RUNC = per_family(
    "apt update && apt install runc",
    "dnf install runc",
    "zypper install runc",
    "follow https://github.com/opencontainers/runc#install",
)
# Docker's own package of containerd holds runc, and the distribution's would replace it
_REINSTALL_RUNC = per_family(
    "apt install --reinstall containerd.io",
    "dnf reinstall containerd.io",
    "zypper install --force containerd.io",
    "follow https://docs.docker.com/engine/install/",
)


def upgrade(node: Node) -> Fix | None:
    """The GPU operator upgrades a toolkit of its own; None: the usual remedy holds."""
    programs = node.toolkit.programs.values()
    if programs and all(path.startswith(OPERATOR_PLACES) for path in programs):
        return Fix(f"follow {_OPERATOR_GUIDE}", needs_root=False)
    return None


def change(settings: Settings, verb: str, *words: str) -> Fix:
    """``gpunode toolkit config set|unset`` on the very file that was judged."""
    where = "" if settings.path == DEFAULT_PATH else f"--config {settings.path} "
    return Fix(f"gpunode toolkit config {verb} {where}{' '.join(words)}")


def low_level(node: Node, settings: Settings) -> Fix:
    """Name a low-level runtime that is here, else bring one."""
    host = node.host
    if host.which("runc") or host.which("crun"):
        return change(settings, "unset", RUNTIMES)
    path = next((path for path in _LOW_LEVEL if host.executable(path)), "")
    if path:
        return change(settings, "set", f"{RUNTIMES}={path}")
    remedy = _REINSTALL_RUNC if node.packages.version("containerd.io") else _INSTALL_RUNC
    return remedy.for_family(node.distribution.family)
