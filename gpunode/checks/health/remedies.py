"""What mends a GPU's condition. Whatever resets a GPU ends the work on it."""

from __future__ import annotations

from gpunode.checks.fixes import everywhere
from gpunode.gpu.condition import Condition
from gpunode.result import Fix

RESET = everywhere("nvidia-smi --gpu-reset", "drain")
REPORT = everywhere("nvidia-bug-report.sh", "none")
CLOCKS = everywhere("nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER")
NVLINKS = everywhere("nvidia-smi nvlink --status")
SHARED_MODE = everywhere("nvidia-smi -c DEFAULT")
DEFAULT_POWER = everywhere("nvidia-smi -q -d POWER")
NO_DESKTOP = everywhere("systemctl set-default multi-user.target && reboot", "reboot")
ENVIRONMENT = everywhere("${EDITOR:-vi} /etc/environment")
HOLDERS = everywhere("fuser -v /dev/nvidia*")

_AMPERE = "8.0"


def reset(gpus: tuple[Condition, ...], capability: str = "") -> Fix:
    """Reset these; A100s that are linked to each other (compute capability 8.0) only reset all together.

    A virtual GPU can't be reset by its guest, which reboots instead.
    """
    if any(gpu.virtualization == "vgpu" for gpu in gpus):
        return Fix("reboot", disruptive="reboot")
    linked = capability == _AMPERE and any(any(gpu.nvlinks or ()) for gpu in gpus)
    if linked or not all(gpu.pci for gpu in gpus):
        return Fix("nvidia-smi --gpu-reset", disruptive="drain")
    return Fix(
        " && ".join(f"nvidia-smi --gpu-reset -i {gpu.pci}" for gpu in gpus),
        disruptive="drain",
    )
