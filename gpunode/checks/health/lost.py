"""GPUs that are gone, want a reset, or have lost what they know of themselves."""

from __future__ import annotations

from gpunode.checks import fixes
from gpunode.checks.health import remedies
from gpunode.checks.health.told import SILENT, how_many, reset, said, those, untold
from gpunode.checks.model import ANY_ENGINE, HOST_OR_CONTAINER, Check, Verdict, fail, ok, seen, skip, warn
from gpunode.errors import GpunodeError
from gpunode.facts.kernel_log import SOURCE
from gpunode.facts.node import Node
from gpunode.facts.xid_log import XidLine, fallen_off
from gpunode.gpu.condition import Condition
from gpunode.gpu.nvml_errors import GPU_IS_LOST, NO_PERMISSION, RESET_REQUIRED
from gpunode.result import Fix

_LOST = f"(NVML {GPU_IS_LOST})"  # as NvmlError words it in an inventory


def gpu_lost(node: Node) -> Verdict:
    """What NVML says counts; the log only for GPUs that don't answer it (any more)."""
    probe = node.nvml
    if probe.code == NO_PERMISSION:
        return skip("needs root, or read and write access to /dev/nvidia*, to ask NVML")
    gpus = probe.inventory.gpus if probe.inventory is not None else ()
    lost = [said(gpu, gpu.error) for gpu in gpus if _LOST in gpu.error]
    if probe.code == GPU_IS_LOST:
        lost.append(seen("nvmlInit in a child process", probe.message))
    answers = {gpu.pci for gpu in gpus if not gpu.error}
    logged = {line.address: line for line in reversed(_fallen(node)) if line.address not in answers}
    if lost or logged:
        count = max(len(lost), len(logged))
        words = "1 GPU has" if count == 1 else f"{count} GPUs have"
        evidence = (*lost, *(seen(SOURCE, line.text) for line in logged.values()))
        return fail(f"{words} fallen off the bus", *evidence)
    return ok(f"all {len(gpus)} GPUs are on the bus") if gpus else skip(SILENT)


def _fallen(node: Node) -> tuple[XidLine, ...]:
    """Of GPUs that no other driver has taken since, such as vfio-pci for a virtual machine."""
    try:
        lines = fallen_off(node.kernel_log)
    except GpunodeError:
        return ()  # NVML alone decides then
    others = {gpu.address for gpu in node.gpus if gpu.driver not in (None, "nvidia")}
    return tuple(line for line in lines if line.address not in others)


_ACTIONS = {
    **dict.fromkeys(("reboot", "system-reboot", "bus-reset"), fixes.REBOOT.other),
    "recover-imex": Fix("systemctl restart nvidia-imex", disruptive="restart"),
}
_WORDS = {
    "reboot": "a reboot",
    "system-reboot": "a reboot",
    "bus-reset": "a reset of the bus",
    "drain-and-reset": "a reset once its work is drained",
    "reset": "a reset",
    "drain-p2p": "work that uses peer access to be drained",
    "recover-imex": "a recovery of the IMEX domain",
}
_FIRST = tuple(_WORDS)


def gpu_reset_required(node: Node) -> Verdict:
    wanting = those(node, lambda gpu: gpu.error_code == RESET_REQUIRED or _action(gpu) != "none")
    if not wanting:
        return untold(node, lambda gpu: not gpu.error) or ok("no GPU asks to be reset")
    asked = {_action(gpu) for gpu in wanting}
    most = next((one for one in _FIRST if one in asked), "reset")
    evidence = [said(gpu, gpu.error or f"recovery action: {_action(gpu)}") for gpu in wanting]
    return fail(
        f"the driver asks for {_WORDS[most]} ({how_many(wanting, node)})",
        *evidence,
        fix=_ACTIONS.get(most) or reset(node, wanting),
    )


def _action(gpu: Condition) -> str:
    return gpu.reading.recovery_action or "none"


def inforom_corrupt(node: Node) -> Verdict:
    skipped = untold(node, lambda gpu: gpu.inforom_valid is not None)
    if skipped:
        return skipped
    bad = those(node, lambda gpu: gpu.inforom_valid is False)
    if bad:
        evidence = [said(gpu, "the infoROM is corrupt (NVML 14)") for gpu in bad]
        return warn(f"the infoROM of {how_many(bad, node)} is corrupt", *evidence)
    return ok("the infoROMs are valid")


_NVML = (
    *("module-not-loaded", "libnvidia-ml-missing", "driver-lib-mismatch", "operator-host-driver-conflict"),
    *("dev-nodes-missing", "dev-node-major-stale", "aux-power"),
)
CHECKS = (
    Check(
        id="gpu-lost",
        title="No GPU has fallen off the bus",
        layer="health",
        severity="error",
        looks_at=(
            "NVML's answer of each GPU (15, lost), and XID 79 in the kernel's log of GPUs that don't answer."
        ),
        why=(
            "A GPU that the bus has lost doesn't come back by itself, and what ran on it has ended. A "
            "reboot brings it back, or else a power cycle. If it is lost again, look at power, heat, the "
            "riser and the board."
        ),
        remedy=fixes.REBOOT,
        run=gpu_lost,
        blocked_by=_NVML,
        classes=HOST_OR_CONTAINER,
        preflight=ANY_ENGINE,
        refs=("https://docs.nvidia.com/deploy/xid-errors/",),
    ),
    Check(
        id="gpu-reset-required",
        title="No GPU asks for a reset",
        layer="health",
        severity="error",
        looks_at="the recovery action that the driver reports of each GPU, and NVML's answer 16.",
        why=(
            "The driver has met an error that it can't get over: until the GPU is reset, or the node "
            "rebooted, programs fail on it or are refused. What runs on a GPU has to end before its reset."
        ),
        remedy=remedies.RESET,
        run=gpu_reset_required,
        blocked_by=("gpu-lost", *_NVML),
        classes=HOST_OR_CONTAINER,
        preflight=ANY_ENGINE,
        refs=("https://docs.nvidia.com/deploy/xid-errors/",),
    ),
    Check(
        id="inforom-corrupt",
        title="The GPUs' infoROMs are valid",
        layer="health",
        severity="warning",
        looks_at="NVML's validation of each GPU's infoROM.",
        why=(
            "The infoROM holds what a GPU remembers of itself: ECC mode, retired pages, power limits. The "
            "GPU computes without it, but forgets settings and bad memory; the vendor can write it again."
        ),
        remedy=remedies.REPORT,
        run=inforom_corrupt,
        classes=HOST_OR_CONTAINER,
        blocked_by=("nvml-hang",),
        refs=("https://docs.nvidia.com/deploy/gpu-debug-guidelines/",),
    ),
)
