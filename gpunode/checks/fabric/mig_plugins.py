"""MIG layouts against what the device plugin was told to make of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpunode.checks import fixes
from gpunode.checks.fabric import remedies
from gpunode.checks.model import HOST, Check, Verdict, fail, ok, seen, skip, warn
from gpunode.facts.node import Node
from gpunode.facts.plugin_configuration import configuration, mig_strategy, shares_by_mps
from gpunode.result import Evidence, Fix

if TYPE_CHECKING:
    from gpunode.gpu.model import MigDevice

_NONE = "no device plugin for NVIDIA GPUs runs here"
_README = "https://github.com/NVIDIA/k8s-device-plugin#as-a-configuration-file"
# NVIDIA's plugin, when it gives up over a layout that its strategy can't name
_REFUSALS = ("must be configured with the same migEnabled value", "more than one MIG device type present")
_MPS_REFUSAL = "sharing using MPS is not supported for MIG devices"
_MPS_DAEMON = "mps-control-daemon"  # of NVIDIA's plugin; CUDA's own knows MIG


def mig_strategy_mismatch(node: Node) -> Verdict:
    gpus = node.nvml.inventory.gpus if node.nvml.inventory else ()
    known = [gpu for gpu in gpus if not gpu.error]
    profiles = sorted({one.profile for gpu in known for one in gpu.mig})
    whole = [gpu for gpu in known if not gpu.mig_enabled]
    if len(profiles) < 2 and not whole:
        return ok("every GPU is partitioned alike")
    if any(not one.environment for one in node.plugin_processes):
        return skip("needs root to see the device plugin's settings", "unreadable")
    told = tuple(_single(node))
    if not told:
        return ok("no device plugin with the strategy single runs here")
    what = (
        f"MIG is on for {len(known) - len(whole)} of {len(known)} GPUs"
        if whole
        else f"there are MIG devices {', '.join(profiles)}"
    )
    layout = tuple(
        seen(f"NVML, GPU {gpu.index} ({gpu.pci})", _cut(gpu.mig) if gpu.mig_enabled else "MIG is off")
        for gpu in known[:8]
    )
    summary = f"{what}, and the device plugin's MIG strategy is single"
    if all(one.source.startswith("gpunode") for one in told):
        edit = Fix("systemctl edit gpunode-device-plugin.service", True, "restart")
        return warn(f"{summary}: it offers one kind only", *told, *layout, fix=edit)
    return fail(summary, *told, *layout, fix=remedies.OPERATORS_STRATEGY if node.operator.pods else None)


def _cut(devices: tuple[MigDevice, ...]) -> str:
    """``5 x 1g.10gb, 2 x 2g.20gb``."""
    profiles = [one.profile for one in devices]
    return ", ".join(f"{profiles.count(one)} x {one}" for one in sorted(set(profiles))) or "no MIG device"


def _single(node: Node) -> Iterator[Evidence]:
    """Who says that all MIG devices are alike: a running plugin's settings, or one's log as it gave up.
    gpunode's plugin leaves out what isn't alike, unless its file names devices itself."""
    for plugin in node.plugin_processes:
        named = plugin.name == "gpunode" and "resources:" in configuration(node.host, plugin)
        if mig_strategy(node.host, plugin) == "single" and not named:
            yield seen(f"{plugin.name}, process {plugin.process.pid}", "MIG strategy single")
    for log in node.plugin_logs if not node.plugin_processes else ():
        for number, line in enumerate(log.lines, 1):
            if any(words in line for words in _REFUSALS):
                yield seen(log.path, line[-300:], number)
                break


def mps_mig_mixed(node: Node) -> Verdict:
    for plugin in node.plugin_processes:
        if shares_by_mps(node.host, plugin):
            return _mixed(node, seen(f"{plugin.name}, process {plugin.process.pid}", "shares GPUs by MPS"))
    for process in node.processes:
        if process.name == _MPS_DAEMON:
            return _mixed(node, seen(f"/proc/{process.pid}", _MPS_DAEMON))
    for log in node.plugin_logs if not node.plugin_processes else ():
        for number, line in enumerate(log.lines, 1):
            if _MPS_REFUSAL in line:
                return _mixed(node, seen(log.path, line[-300:], number))
    return ok("no device plugin shares GPUs by MPS here")


def _mixed(node: Node, told: Evidence) -> Verdict:
    gpus = node.nvml.inventory.gpus if node.nvml.inventory else ()
    on = [seen(f"NVML, GPU {gpu.index} ({gpu.pci})", "MIG is on") for gpu in gpus if gpu.mig_enabled]
    return warn("the device plugin shares GPUs by MPS, which it can't where MIG is on", told, *on[:8])


CHECKS = (
    Check(
        id="mig-strategy-mismatch",
        title="The device plugin can name this MIG layout",
        layer="fabric",
        severity="error",
        looks_at=(
            "MIG devices and whole GPUs as NVML lists them, and the MIG strategy of the device plugin: its "
            "flags, environment and file, or what its log says."
        ),
        why=(
            "With the strategy single every MIG device is called nvidia.com/gpu, so all GPUs must be cut "
            "alike. Else NVIDIA's device plugin gives up and the node offers no GPU; mixed has a name for "
            "each profile."
        ),
        remedy=remedies.MIXED_STRATEGY,
        run=mig_strategy_mismatch,
        blocked_by=("module-not-loaded", "nvml-hang", "mig-mode-pending", "mig-enabled-no-instances"),
        classes=HOST,
        refs=(_README,),
        needs=("mig", "kubelet"),
    ),
    Check(
        id="mps-mig-mixed",
        title="GPUs are shared by MIG or by MPS",
        layer="fabric",
        severity="warning",
        looks_at="the device plugin's sharing by MPS (its file, daemon and log) on a node with MIG on.",
        why=(
            "The device plugin's MPS serves whole GPUs. It refuses MIG devices, and pods then wait for GPUs "
            "that nobody offers."
        ),
        remedy=fixes.everywhere("kubectl get configmap --all-namespaces | grep -i device-plugin"),
        run=mps_mig_mixed,
        blocked_by=("module-not-loaded", "nvml-hang"),
        classes=HOST,
        refs=(_README,),
        needs=("mig", "kubelet"),
    ),
)
