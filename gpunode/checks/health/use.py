"""Who uses the GPUs, and what keeps others from it."""

from __future__ import annotations

from gpunode.checks.health import remedies
from gpunode.checks.health.told import how_many, said, those, untold
from gpunode.checks.model import (
    ANY_ENGINE,
    HOST_OR_CONTAINER,
    Check,
    Verdict,
    fail,
    note,
    ok,
    seen,
    skip,
    warn,
)
from gpunode.facts.node import Node
from gpunode.gpu.condition import Condition
from gpunode.result import Fix

_MPS = "nvidia-cuda-mps-control"
_GIB = 1 << 30
_ORPHANED = _GIB  # above it memory isn't what a driver keeps for itself


def compute_mode(node: Node) -> Verdict:
    skipped = untold(node, lambda gpu: gpu.compute_mode is not None)
    if skipped:
        return skipped
    closed = those(node, lambda gpu: gpu.compute_mode == "prohibited")
    if closed:
        judge = fail if len(closed) == len(node.conditions) else warn
        evidence = [said(gpu, "compute mode prohibited") for gpu in closed]
        return judge(f"{how_many(closed, node)} take no CUDA program", *evidence, fix=_shared(closed))
    alone = those(node, lambda gpu: gpu.compute_mode in ("exclusive-process", "exclusive-thread"))
    if alone and any(_MPS in (one.name, *one.argv[1:2]) for one in node.processes):
        return ok("the GPUs are the MPS daemon's, which shares them")
    if alone:
        evidence = [said(gpu, f"compute mode {gpu.compute_mode}") for gpu in alone]
        words = f"{how_many(alone, node)} take one program at a time"
        return warn(words, *evidence, fix=_shared(alone))
    return ok("the GPUs are open to every program")


def _shared(gpus: tuple[Condition, ...]) -> Fix:
    return Fix(" && ".join(f"nvidia-smi -i {gpu.pci or gpu.index} -c DEFAULT" for gpu in gpus))


def gpu_used_by_desktop(node: Node) -> Verdict:
    names = {one.pid: one.name for one in node.processes}
    shown = [
        (gpu, names.get(one.pid, f"process {one.pid}"))
        for gpu in node.conditions
        for one in gpu.processes or ()
        if one.graphics
    ]
    if not shown:
        return untold(node, lambda gpu: gpu.processes is not None) or ok("no desktop uses a GPU")
    served = node.kubelet is not None and node.kubelet.joined
    if len(node.conditions) == 1 and node.conditions[0].display_active and not served:
        return ok("the node's only GPU has a display attached, and draws its desktop")
    evidence = [said(gpu, f"{name} draws on it") for gpu, name in shown]
    gpus = tuple({gpu.index: gpu for gpu, _ in shown}.values())
    return note(f"{how_many(gpus, node)} draw a desktop as well", *evidence)


def zombie_gpu_memory(node: Node) -> Verdict:
    if any(_MPS in (one.name, *one.argv[1:2]) for one in node.processes):
        return skip("MPS is in use, whose clients NVML doesn't list as processes")
    if not node.conditions:
        return skip("NVML doesn't tell how the GPUs are")
    judged = [gpu for gpu in node.conditions if _owned(gpu) is not None]
    if not judged:
        return skip("NVML doesn't tell whose memory is in use")
    orphaned = tuple(gpu for gpu in judged if (_owned(gpu) or 0) > _ORPHANED)
    if not orphaned:
        return ok("no GPU memory is in use without a process")
    evidence = [said(gpu, f"{(_owned(gpu) or 0) / _GIB:.1f} GiB in use, no process") for gpu in orphaned]
    return warn(f"memory of {how_many(orphaned, node)} is in use, and by no process", *evidence)


def _owned(gpu: Condition) -> int | None:
    """Bytes in use without a process on this GPU; None where that can't be judged: with MIG and in virtual
    GPUs processes are listed elsewhere, confidential computing hides them, and without the part that the
    driver keeps for itself (before 510) the number says nothing."""
    if gpu.mig_mode or gpu.cc_enabled or gpu.virtualization not in ("none", "passthrough"):
        return None
    if gpu.processes is None or gpu.memory_used is None or gpu.memory_reserved is None:
        return None
    return 0 if gpu.processes else gpu.memory_used - gpu.memory_reserved


def bad_cuda_env(node: Node) -> Verdict:
    from gpunode.facts.cuda_environment import HIDING, settings

    found = settings(node.host, {one.name for one in node.processes})
    if not found:
        return ok("no variable changes CUDA for the whole node")
    names = ", ".join(dict.fromkeys(one.name for one in found))
    what = "hides GPUs" if all(one.name in HIDING for one in found) else "changes every CUDA program"
    evidence = (seen(one.source, f"{one.name}={one.value}", one.line) for one in found)
    places = [one.source for one in found if one.source.startswith("/")]
    units = [one.source for one in found if one.source.endswith(".service")]
    fix = Fix(f"${{EDITOR:-vi}} {places[0]}") if places else None
    if fix is None:
        fix = Fix(f"systemctl edit {units[0]}") if units else Fix(f"unset {names.replace(',', '')}", False)
    return warn(f"{names} {what}", *evidence, fix=fix)


CHECKS = (
    Check(
        id="compute-mode",
        title="The GPUs take CUDA programs",
        layer="health",
        severity="error",
        looks_at="NVML's compute mode of each GPU, and whether the MPS daemon runs, which sets one itself.",
        why=(
            "Prohibited refuses every CUDA program; exclusive lets in one process at a time: a second "
            "container ends with error 46, 'all CUDA-capable devices are busy or unavailable'."
        ),
        remedy=remedies.SHARED_MODE,
        run=compute_mode,
        classes=HOST_OR_CONTAINER,
        blocked_by=("nvml-hang",),
        preflight=ANY_ENGINE,
        refs=("https://docs.nvidia.com/deploy/mps/",),
    ),
    Check(
        id="gpu-used-by-desktop",
        title="No desktop on the GPUs",
        layer="health",
        severity="info",
        looks_at="the graphics processes that NVML lists.",
        why=(
            "A desktop takes memory of the GPU, and the display's watchdog may end kernels that run for "
            "seconds. On a server nobody looks at it."
        ),
        remedy=remedies.NO_DESKTOP,
        run=gpu_used_by_desktop,
        blocked_by=("nvml-hang",),
        refs=("https://docs.nvidia.com/deploy/nvidia-smi/",),
    ),
    Check(
        id="zombie-gpu-memory",
        title="GPU memory in use belongs to a process",
        layer="health",
        severity="warning",
        looks_at="the memory in use of each GPU, less what the driver keeps, where NVML lists no process.",
        why=(
            "A program that has ended, or is stuck in the kernel, still holds the memory, and the next one "
            "doesn't get it. Ending whoever has the device files open frees it, or else a reset."
        ),
        remedy=remedies.HOLDERS,
        run=zombie_gpu_memory,
        blocked_by=("nvml-hang",),
        unless=("coherent-gpu",),
        refs=("https://docs.nvidia.com/deploy/gpu-debug-guidelines/",),
    ),
    Check(
        id="bad-cuda-env",
        title="No variable changes CUDA for all",
        layer="health",
        severity="warning",
        looks_at=(
            "debuggers', profilers' and GPU-hiding variables in /etc/environment, systemd's "
            "DefaultEnvironment, the units of container daemons, and gpunode's own environment."
        ),
        why=(
            "Set for the whole node, such a variable slows every CUDA program down, makes it wait for a "
            "debugger, or hides GPUs from it."
        ),
        remedy=remedies.ENVIRONMENT,
        run=bad_cuda_env,
        blocked_by=("pci-no-gpu",),
        refs=(
            "https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables",
            "https://docs.nvidia.com/datacenter/dcgm/latest/user-guide/dcgm-diagnostics.html",
        ),
    ),
)
