"""Where NVML is loaded from: the driver root, as this process sees it, or wherever the loader looks.

The order of the directories is NVIDIA's plugin's (reference: its container driver root).
"""

from __future__ import annotations

from gpunode.errors import GpunodeError
from gpunode.host import Host
from gpunode.plugin.nvidia.site import find_roots
from gpunode.plugin.settings import Settings

NAME = "libnvidia-ml.so.1"
_DIRECTORIES = (
    *("usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu"),
    *("lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu"),
)


def nvml_library(host: Host, settings: Settings) -> str:
    """The library's path under the driver root; "" for the dynamic loader's own choice."""
    root = find_roots(host, settings).driver_here
    if not root:
        return ""
    for directory in _DIRECTORIES:
        path = f"{root}/{directory}/{NAME}"
        try:
            if host.is_file(path):
                return path
        except GpunodeError:
            continue
    return ""
