"""The CDI specifications that allocated containers name."""

from __future__ import annotations

from gpunode.gpu.model import Inventory
from gpunode.host import Host
from gpunode.plugin.logfmt import Log
from gpunode.plugin.model import Plan
from gpunode.plugin.settings import Settings


def write_specs(host: Host, settings: Settings, inventory: Inventory, plan: Plan, log: Log) -> None:
    """Write or rewrite them, where a cdi-* strategy is on."""
