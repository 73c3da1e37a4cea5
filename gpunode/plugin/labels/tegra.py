"""The GPUs of a Tegra (Jetson and the like), as CUDA's driver tells them: NVML knows little of them, or is
not there at all."""

from __future__ import annotations

import json

from gpunode.dataclass import replace
from gpunode.gpu.child import module_argv, signal_name
from gpunode.gpu.model import Inventory, inventory_from_json
from gpunode.host import Host
from gpunode.plugin.labels.model import UNKNOWN_DRIVER
from gpunode.plugin.settings import Settings


def is_tegra(host: Host, settings: Settings, inventory: Inventory | None) -> bool:
    """Whether CUDA is to be asked; `inventory` is NVML's, None without an answer."""
    from gpunode.plugin.nvidia.platform import TEGRA, platform_of

    if settings.vendor != "nvidia" or settings.simulate or (inventory is not None and inventory.simulated):
        return False
    return platform_of(host, settings, inventory or Inventory("")) == TEGRA


def tegra_inventory(host: Host, seconds: float) -> tuple[Inventory | None, str]:
    """What CUDA's driver says within `seconds`, else None and why. A child asks: CUDA may hang or crash."""
    if not host.live:
        return None, "nothing was recorded of this machine's CUDA"
    done = host.run(module_argv("gpunode.gpu.cuda_devices"), timeout=seconds)
    if done.timed_out:
        return None, f"CUDA did not answer within {seconds:g} s"
    if done.code < 0:
        return None, f"CUDA crashed the process that asked it ({signal_name(done.code)})"
    try:
        answer = json.loads(done.stdout)
        if "error" in answer:
            return None, str(answer["error"]["message"])
        return replace(inventory_from_json(answer["inventory"]), driver_version=UNKNOWN_DRIVER), ""
    except (ValueError, KeyError, TypeError):
        last = (done.stderr.strip().splitlines() or [f"exit code {done.code}"])[-1]
        return None, f"the process that asked CUDA gave no usable answer: {last}"
