"""GPUs beside network cards and disks: GPUDirect RDMA, GPUDirect Storage, GDRCopy."""

from __future__ import annotations

from gpunode.checks import fixes
from gpunode.checks.model import HOST, Check, Verdict, note, ok, seen, skip, warn
from gpunode.facts import gpudirect
from gpunode.facts.kernel_log import SOURCE, matching
from gpunode.facts.node import Node
from gpunode.facts.processes import uptime
from gpunode.result import Fix

_INVALID = r"nvidia[-_]peermem .*detected invalid context"
_RECENT_SECONDS = 24 * 3600  # each is of one program, which has ended
_GUIDE = "https://docs.nvidia.com/cuda/gpudirect-rdma/"


def peermem(node: Node) -> Verdict:
    cards = gpudirect.infiniband_cards(node.host)
    if not cards:
        return skip("there is no InfiniBand or RoCE card of NVIDIA's on this node")
    now = uptime(node.host)
    found = matching(node.kernel_log, _INVALID)
    invalid = [(line, match) for line, match in found if not now or now - line.seconds < _RECENT_SECONDS]
    if invalid:
        shown = (seen(SOURCE, line.text) for line, _ in invalid[-3:])
        again = Fix("modprobe -r nvidia-peermem && modprobe nvidia-peermem", True, "drain")
        return warn(f"nvidia_peermem has lost {len(invalid)} of its mappings", *shown, fix=again)
    if gpudirect.loaded(node.host, "nvidia_peermem"):
        return ok("nvidia_peermem is loaded")
    evidence = (seen("/proc/modules", "no nvidia_peermem"), seen(gpudirect.INFINIBAND, ", ".join(cards[:4])))
    listed = gpudirect.wanted_at_boot(node.host, "nvidia-peermem")
    shared = gpudirect.by_dmabuf(node.module.open if node.module else None, node.kernel)
    # a package may list it for kernels that need it; a line in /etc is somebody's wish
    if listed and (not shared or listed[0].startswith("/etc/")):
        path, line = listed
        wanted = seen(path, "nvidia-peermem", line)
        return warn("nvidia_peermem is to be loaded at boot and isn't there", wanted, *evidence)
    if shared:
        return ok("the open modules and this kernel share GPU memory by DMA-BUF")
    if not gpudirect.infiniband_ports(node.host, cards):
        return ok("no InfiniBand port is up, so nobody needs nvidia_peermem")
    return note("network cards can't reach GPU memory: nvidia_peermem isn't loaded", *evidence)


def gds_gdrcopy(node: Node) -> Verdict:
    wanted = tuple(gpudirect.installed_extras(node.host, node.kernel))
    if not wanted:
        return skip("neither GPUDirect Storage nor GDRCopy is installed")
    missing = [one for one in wanted if not gpudirect.loaded(node.host, one[1])]
    if not missing:
        return ok(f"{' and '.join(name for name, _, _ in wanted)}: the module is loaded")
    command = " && ".join(f"modprobe {module}" for _, module, _ in missing)
    return note(
        f"{' and '.join(name for name, _, _ in missing)}: the kernel module is there and isn't loaded",
        *(seen(path, f"has {module}, /proc/modules hasn't") for _, module, path in missing),
        fix=Fix(command),
    )


CHECKS = (
    Check(
        id="peermem",
        title="Network cards reach GPU memory",
        layer="fabric",
        severity="warning",
        looks_at=(
            f"cards in {gpudirect.INFINIBAND} driven by mlx5_core, the module nvidia_peermem, modules-load.d "
            "and the kernel's log."
        ),
        why=(
            "GPUDirect RDMA takes nvidia_peermem, or open modules and a kernel from 5.12 on (DMA-BUF). "
            "Without it NCCL copies through the processor's memory, at a fraction of the speed."
        ),
        remedy=fixes.everywhere("modprobe nvidia-peermem"),
        run=peermem,
        blocked_by=("module-not-loaded",),
        classes=HOST,
        refs=(_GUIDE,),
    ),
    Check(
        id="gds-gdrcopy",
        title="Modules of GPUDirect Storage and GDRCopy are loaded",
        layer="fabric",
        severity="info",
        looks_at="nvidia_fs and gdrdrv: built for the running kernel, and loaded.",
        why=(
            "Programs that use cuFile or GDRCopy fall back to copies through the processor's memory where "
            "their module isn't loaded."
        ),
        remedy=fixes.everywhere("modprobe nvidia_fs; modprobe gdrdrv"),
        run=gds_gdrcopy,
        blocked_by=("module-not-loaded",),
        classes=HOST,
        refs=("https://docs.nvidia.com/gpudirect-storage/", "https://github.com/NVIDIA/gdrcopy"),
    ),
)
