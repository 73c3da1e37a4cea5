"""What a running device plugin was told: its file, its MIG strategy, whether it shares GPUs by MPS.

The names are those of NVIDIA's device plugin (its README, "Configuring the NVIDIA device plugin binary");
gpunode's own knows them, too.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gpunode.host import Host

if TYPE_CHECKING:
    from gpunode.facts.device_plugins import PluginProcess

_STRATEGY = ("MIG_STRATEGY", "GPUNODE_PLUGIN_SERVE_MIG_STRATEGY")
_MPS = r"^sharing:[ \t]*\n(?:[ \t#].*\n|\n)*?[ \t]+mps:"


def configuration(host: Host, plugin: PluginProcess) -> str:
    """The text of its configuration file, as the plugin sees it; empty if it has none."""
    path = plugin.setting("--config-file", "CONFIG_FILE")
    pid = plugin.process.pid
    inside = f"/proc/{pid}/root" if plugin.container or not host.is_own(pid) else ""
    return (host.read_text(f"{inside}{path}") or "") if path.startswith("/") else ""


def mig_strategy(host: Host, plugin: PluginProcess) -> str:
    """Flag or variable, else the file's; empty for the default, none."""
    given = next(filter(None, (plugin.setting("--mig-strategy", name) for name in _STRATEGY)), "")
    found = re.search(r"migStrategy:\s*[\"']?(\w+)", configuration(host, plugin)) if not given else None
    return given or (found[1] if found else "")


def shares_by_mps(host: Host, plugin: PluginProcess) -> bool:
    """Whether its file has ``sharing.mps``; there is no flag for it."""
    return re.search(_MPS, configuration(host, plugin), re.MULTILINE) is not None
