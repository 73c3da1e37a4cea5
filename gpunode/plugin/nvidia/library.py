"""Path of NVML below the driver root, as this process sees it."""

from __future__ import annotations

from gpunode.facts.libraries import NVML, library_in
from gpunode.host import Host
from gpunode.plugin.nvidia.site import find_roots
from gpunode.plugin.settings import Settings


def nvml_library(host: Host, settings: Settings) -> str:
    """The library's path under the driver root; "" to have NVML found as everywhere else."""
    root = find_roots(host, settings).driver_here
    return library_in(host, root, NVML) if root else ""
