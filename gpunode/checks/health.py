"""Checks of the GPUs' health: lost GPUs, memory errors, throttling, NVLinks, and memory in use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from gpunode.checks import fixes
from gpunode.checks.finding import DISRUPTS_NOTHING, RESTARTS_IMEX, Evidence, Fix
from gpunode.checks.fixes import edit_file
from gpunode.checks.model import (
    ANY_ENGINE,
    HOST_OR_CONTAINER,
    Verdict,
    check,
    fail,
    note,
    ok,
    seen,
    skip,
    warn,
)
from gpunode.facts.cuda import HIDING, settings
from gpunode.facts.kernel_log import SOURCE
from gpunode.facts.node import Node
from gpunode.facts.xids import XidLine, fallen_off
from gpunode.gpu.model import GPU_IS_LOST, Gpu
from gpunode.gpu.nvml import NO_PERMISSION, RESET_REQUIRED
from gpunode.gpu.nvml_health import Condition

health_check = partial(check, classes=HOST_OR_CONTAINER)

# Fixes for a GPU's condition. Whatever resets a GPU ends the work on it.

REPORT = fixes.look(
    "nvidia-bug-report.sh",
    "Send nvidia-bug-report.log.gz to the GPU's vendor: no command repairs this",
)
REPLACE_GPU = replace(
    REPORT,
    before="First keep new work away from this GPU; on a Kubernetes node: kubectl cordon NODE",
)
NVLINKS = fixes.look(
    "nvidia-smi nvlink --status",
    "End all work on the GPU and reset it; if a link stays down after that, check board and bridge:\n"
    "nvidia-smi --gpu-reset -i GPU",
    needs_root=False,
)
HOLDERS = fixes.look(
    "fuser -v /dev/nvidia*",
    "End the processes that shouldn't use the GPU. If none is listed, end all work on the GPU and reset "
    "it:\n"
    "nvidia-smi --gpu-reset -i GPU",
)

_AMPERE = "8.0"


# Helpers of all checks here: which GPUs NVML reports, and how evidence names them.

SILENT = "NVML doesn't report the GPUs' condition"


def name_of(gpu: Condition | Gpu) -> str:
    return f"GPU {gpu.index} ({gpu.pci})" if gpu.pci else f"GPU {gpu.index}"


def on_gpu(gpu: Condition | Gpu, value: object) -> Evidence:
    return seen(f"NVML, {name_of(gpu)}", value)


def gpus_where(node: Node, holds: Callable[[Condition], bool]) -> tuple[Condition, ...]:
    return tuple(gpu for gpu in node.conditions if holds(gpu))


def skip_unreported(node: Node, reports: Callable[[Condition], bool]) -> Verdict | None:
    """A skip if no GPU reports this value."""
    if not node.conditions:
        return skip(SILENT)
    return (
        None
        if any(reports(gpu) for gpu in node.conditions)
        else skip("neither the GPUs nor the driver report it")
    )


def which(gpus: tuple[Condition, ...], node: Node) -> str:
    """One GPU by its name, several by their number."""
    return name_of(gpus[0]) if len(gpus) == 1 else f"{len(gpus)} of {len(node.conditions)} GPUs"


def reset_gpus(node: Node, gpus: tuple[Condition, ...]) -> Fix:
    """Reset these GPUs. A Kubernetes node is drained first, which ends their work but that of DaemonSets.

    A100s that are linked to each other (compute capability 8.0) can only be reset together. A guest can't
    reset a virtual GPU and reboots instead.
    """
    if any(gpu.virtualization == "vgpu" for gpu in gpus):
        return fixes.REBOOT
    inventory, fix = node.nvml.inventory, fixes.RESET
    capability = inventory.gpus[0].compute_capability if inventory and inventory.gpus else ""
    if capability == _AMPERE and any(any(gpu.nvlinks or ()) for gpu in gpus):
        fix = replace(fix, effect="resets all GPUs, because NVLink connects them; all must be idle")
    elif all(gpu.pci for gpu in gpus):
        fix = replace(fix, command=" && ".join(f"nvidia-smi --gpu-reset -i {gpu.pci}" for gpu in gpus))
    if node.kubelet is None:
        return replace(fix, note="If some of it doesn't end, reboot: that resets the GPU as well")
    return replace(fix, before="", note=_AFTER_DRAIN)


_AFTER_DRAIN = (
    "The drain leaves the pods of DaemonSets running, such as the device plugin and DCGM, and the reset "
    "fails while fuser -v /dev/nvidia* lists a process. If you can't end them, reboot: that resets the GPU "
    "as well"
)


_NVML = (
    *("module-not-loaded", "libnvidia-ml-missing", "driver-lib-mismatch", "operator-host-driver-conflict"),
    *("dev-nodes-missing", "dev-node-major-stale", "aux-power"),
)


@health_check(
    "gpu-lost",
    title="No GPU has fallen off the bus",
    looks_at="NVML's result for each GPU (15, lost), and XID 79 in the kernel's log for GPUs that don't "
    "answer.",
    fix=fixes.REBOOT,
    blocked_by=_NVML,
    preflight=ANY_ENGINE,
    refs=("https://docs.nvidia.com/deploy/xid-errors/",),
)
def gpu_lost(node: Node) -> Verdict:
    """A GPU that fell off the bus doesn't come back by itself, and its work has ended. Reboot the node; if
    the GPU is still missing, power the node off and on. If it happens again, check power, temperature, the
    riser and the board.
    """
    # NVML's result counts; the log only for GPUs that don't answer NVML (any more).
    probe = node.nvml
    if probe.code == NO_PERMISSION:
        return skip("needs root, or read and write access to /dev/nvidia*, to query NVML")
    gpus = probe.inventory.gpus if probe.inventory is not None else ()
    lost = [on_gpu(gpu, gpu.error) for gpu in gpus if gpu.error_code == GPU_IS_LOST]
    if probe.code == GPU_IS_LOST:
        lost.append(seen("nvmlInit in a child process", probe.message))
    answers = {gpu.pci for gpu in gpus if not gpu.error}
    logged = {line.address: line for line in reversed(_fallen(node)) if line.address not in answers}
    if lost or logged:
        count = max(len(lost), len(logged))
        names = [name_of(gpu) for gpu in gpus if gpu.error_code == GPU_IS_LOST]
        names += [f"GPU {address}" for address in logged] or ["1 GPU"]
        words = f"{names[0]} has" if count == 1 else f"{count} GPUs have"
        evidence = (*lost, *(seen(SOURCE, line.text) for line in logged.values()))
        return fail(f"{words} fallen off the bus", *evidence)
    return ok(f"all {len(gpus)} GPUs are on the bus") if gpus else skip(SILENT)


def _fallen(node: Node) -> tuple[XidLine, ...]:
    """GPUs that fell off the bus and that no other driver has bound to since, such as vfio-pci for a virtual
    machine. Without the kernel's log NVML alone decides."""
    lines = fallen_off(node.readable_log)
    others = {gpu.address for gpu in node.gpus if gpu.driver not in (None, "nvidia")}
    return tuple(line for line in lines if line.address not in others)


_ACTIONS = {
    **dict.fromkeys(("reboot", "system-reboot", "bus-reset"), fixes.REBOOT),
    "recover-imex": fixes.restart("nvidia-imex", RESTARTS_IMEX),
}
_WORDS = {
    "reboot": "a reboot",
    "system-reboot": "a reboot",
    "bus-reset": "a reset of the bus",
    "drain-and-reset": "a reset once its work is drained",
    "reset": "a reset",
    "drain-p2p": "draining of work that uses peer access",
    "recover-imex": "a recovery of the IMEX domain",
}
_FIRST = tuple(_WORDS)


@health_check(
    "gpu-reset-required",
    title="No GPU needs a reset",
    looks_at="the recovery action that the driver reports for each GPU, and NVML's result 16.",
    fix=fixes.RESET,
    blocked_by=("gpu-lost", *_NVML),
    preflight=ANY_ENGINE,
    refs=("https://docs.nvidia.com/deploy/xid-errors/",),
)
def gpu_reset_required(node: Node) -> Verdict:
    """The driver has found an error that it can't recover from: until the GPU is reset or the node rebooted,
    programs on it fail or are refused. All work on a GPU must end before its reset.
    """
    wanting = gpus_where(node, lambda gpu: gpu.error_code == RESET_REQUIRED or _action(gpu) != "none")
    if not wanting:
        return skip_unreported(node, lambda gpu: not gpu.error) or ok("no GPU needs a reset")
    actions = {_action(gpu) for gpu in wanting}
    most = next((action for action in _FIRST if action in actions), "reset")
    evidence = [on_gpu(gpu, gpu.error or f"recovery action: {_action(gpu)}") for gpu in wanting]
    return fail(
        f"{which(wanting, node)}: the driver requests {_WORDS[most]}",
        *evidence,
        fix=_ACTIONS.get(most) or reset_gpus(node, wanting),
    )


def _action(gpu: Condition) -> str:
    return gpu.reading.recovery_action or "none"


@health_check(
    "inforom-corrupt",
    title="The GPUs' infoROMs are valid",
    severity="warning",
    looks_at="NVML's validation of each GPU's infoROM.",
    fix=REPORT,
    blocked_by=("nvml-hang",),
    refs=("https://docs.nvidia.com/deploy/gpu-debug-guidelines/",),
)
def inforom_corrupt(node: Node) -> Verdict:
    """The infoROM stores the GPU's own settings: ECC mode, retired pages, power limits. The GPU can compute
    without it, but loses settings and its record of bad memory. The vendor can rewrite the infoROM.
    """
    skipped = skip_unreported(node, lambda gpu: gpu.inforom_valid is not None)
    if skipped:
        return skipped
    bad = gpus_where(node, lambda gpu: gpu.inforom_valid is False)
    if bad:
        evidence = [on_gpu(gpu, "the infoROM is corrupt (NVML 14)") for gpu in bad]
        return warn(f"the infoROM of {which(bad, node)} is corrupt", *evidence)
    return ok("the infoROMs are valid")


# Memory errors: uncorrectable ones, repairs that wait for a reset, memory that can't be repaired any more.

_MOST_REMAPPED = 512  # rows; NVIDIA's GPU memory error management: the rows that a GPU can remap
_MOST_RETIRED = 63  # pages; NVIDIA's dynamic page retirement: from this count on a GPU must be replaced
_GUIDE = "https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/"


@health_check(
    "ecc-uncorrectable",
    title="No GPU has uncorrectable memory errors",
    looks_at="NVML's count of uncorrectable ECC errors since the last reset, and its threshold for SRAM.",
    fix=fixes.RESET,
    blocked_by=("nvml-hang", "gpu-reset-required", "row-remap-pending"),
    refs=(_GUIDE,),
)
def ecc_uncorrectable(node: Node) -> Verdict:
    """An uncorrectable error has destroyed a program's data. Until the GPU is reset, another program may get
    the bad memory. A GPU with more errors in its SRAM than NVIDIA's threshold must be replaced: a reset
    doesn't repair it.
    """
    worn = gpus_where(node, lambda gpu: bool(gpu.sram_threshold_exceeded))
    if worn:
        evidence = [on_gpu(gpu, "more uncorrectable SRAM errors than NVIDIA's threshold") for gpu in worn]
        why = "A reset doesn't repair the GPU's SRAM: its programs lose data until the GPU is replaced."
        return fail(f"{which(worn, node)} must be replaced", *evidence, fix=REPLACE_GPU, why=why)
    now = gpus_where(node, lambda gpu: bool(gpu.reading.ecc_volatile))
    if now:
        evidence = [on_gpu(gpu, f"{gpu.reading.ecc_volatile} since the last reset") for gpu in now]
        words = f"{which(now, node)} had uncorrectable memory errors since the last reset"
        # a driver that reports its recovery action (from 570 on) has handled these errors and keeps using the
        # GPU
        judge = warn if all(gpu.reading.recovery_action == "none" for gpu in now) else fail
        return judge(words, *evidence, fix=reset_gpus(node, now), why=_LOST_DATA)
    skipped = skip_unreported(node, lambda gpu: gpu.reading.ecc_volatile is not None)
    if skipped:
        return skipped
    before = gpus_where(node, lambda gpu: bool(gpu.reading.ecc_aggregate))
    if before:
        evidence = [on_gpu(gpu, f"{gpu.reading.ecc_aggregate} in total, 0 since the reset") for gpu in before]
        return note(f"{which(before, node)} had uncorrectable memory errors before", *evidence)
    return ok("no uncorrectable memory error")


_LOST_DATA = (
    "An uncorrectable error has destroyed a program's data. Until the GPU is reset, another program may get "
    "the bad memory."
)


@health_check(
    "row-remap-pending",
    title="No bad memory is waiting for a reset",
    looks_at="NVML's remapped rows (Ampere and newer) or retired pages (older GPUs), pending and failed.",
    fix=fixes.RESET,
    blocked_by=("nvml-hang", "gpu-reset-required"),
    refs=(_GUIDE,),
)
def row_remap_pending(node: Node) -> Verdict:
    """The GPU has detected bad memory and replaces it at the next reset. Until then a program that uses that
    memory is killed or computes wrong results, while the node looks healthy.
    """
    broken = gpus_where(node, _beyond_repair)
    if broken:
        evidence = [on_gpu(gpu, _state(gpu)) for gpu in broken]
        pronoun = "its" if len(broken) == 1 else "their"
        words = f"{which(broken, node)} can't repair {pronoun} memory any more and must be replaced"
        why = "A program that uses the bad memory is killed or computes wrong results."
        return fail(words, *evidence, fix=REPORT, why=why)
    waiting = gpus_where(node, lambda gpu: bool(gpu.reading.remap_pending or gpu.reading.retired_pending))
    if waiting:
        evidence = [on_gpu(gpu, _state(gpu)) for gpu in waiting]
        words = f"bad memory of {which(waiting, node)} stays in use until a reset"
        return fail(words, *evidence, fix=reset_gpus(node, waiting))
    skipped = skip_unreported(
        node, lambda gpu: gpu.reading.remap_pending is not None or gpu.reading.retired_pending is not None
    )
    return skipped or ok("no memory is waiting to be remapped or retired")


def _beyond_repair(gpu: Condition) -> bool:
    many = (gpu.remapped or 0) >= _MOST_REMAPPED or (gpu.retired_pages or 0) >= _MOST_RETIRED
    return bool(gpu.reading.remap_failed) or many


def _state(gpu: Condition) -> str:
    answer = {
        "remapping has failed": gpu.reading.remap_failed,
        "remapping is pending": gpu.reading.remap_pending,
        "retirement is pending": gpu.reading.retired_pending,
        f"rows remapped for uncorrectable errors: {gpu.remapped}": gpu.remapped,
        f"pages retired: {gpu.retired_pages}": gpu.retired_pages,
    }
    return ", ".join(words for words, holds in answer.items() if holds)


@health_check(
    "channel-repair-pending",
    title="No repair is waiting for a reset",
    looks_at="NVML's repair status (Blackwell and newer).",
    fix=fixes.RESET,
    blocked_by=("nvml-hang", "gpu-reset-required"),
    refs=("https://docs.nvidia.com/deploy/nvml-api/",),
)
def channel_repair_pending(node: Node) -> Verdict:
    """At the next reset the GPU disables a defective part of itself."""
    waiting = gpus_where(node, lambda gpu: bool(gpu.channel_repair_pending or gpu.tpc_repair_pending))
    if waiting:
        evidence = [on_gpu(gpu, _repair(gpu)) for gpu in waiting]
        return fail(
            f"a repair of {which(waiting, node)} is waiting for a reset",
            *evidence,
            fix=reset_gpus(node, waiting),
        )
    skipped = skip_unreported(node, lambda gpu: gpu.channel_repair_pending is not None)
    return skipped or ok("no repair is pending")


def _repair(gpu: Condition) -> str:
    words = {"a memory channel": gpu.channel_repair_pending, "a processing cluster": gpu.tpc_repair_pending}
    return " and ".join(word for word, holds in words.items() if holds) + " will be repaired"


@health_check(
    "ecc-mode-pending",
    title="No ECC mode change is waiting for a reset",
    severity="warning",
    looks_at="NVML's ECC mode of each GPU, now and after the next reset.",
    fix=fixes.RESET,
    blocked_by=("nvml-hang", "gpu-reset-required"),
    reboot=True,
    refs=("https://docs.nvidia.com/deploy/nvidia-smi/",),
)
def ecc_mode_pending(node: Node) -> Verdict:
    """The ECC mode was changed, but the change takes effect only at the next reset or reboot. It also changes
    the amount of GPU memory.
    """
    changed = gpus_where(
        node, lambda gpu: None not in (gpu.ecc_mode, gpu.ecc_mode_next) and gpu.ecc_mode != gpu.ecc_mode_next
    )
    if changed:
        evidence = [
            on_gpu(gpu, f"ECC is {_mode_text(gpu.ecc_mode)}, {_mode_text(gpu.ecc_mode_next)} after a reset")
            for gpu in changed
        ]
        return warn(
            f"an ECC mode change of {which(changed, node)} is waiting for a reset",
            *evidence,
            fix=reset_gpus(node, changed),
        )
    answer = {gpu.ecc_mode for gpu in node.conditions} - {None}
    if len(answer) > 1:
        off = gpus_where(node, lambda gpu: gpu.ecc_mode is False)
        evidence = [on_gpu(gpu, "ECC is off") for gpu in off]
        return note(f"ECC is off on {which(off, node)} and on for the others", *evidence)
    return skip_unreported(node, lambda gpu: gpu.ecc_mode is not None) or ok("no ECC mode change is pending")


def _mode_text(mode: bool | None) -> str:
    return "on" if mode else "off"


# What throttles GPUs: heat, power, links that are down.

_SPEED_WORDS = {
    "hw-slowdown": "the hardware halves the clocks",
    "sw-thermal": "the driver lowers the clocks because of the temperature",
    "hw-thermal": "the hardware lowers the clocks because of the temperature",
    "hw-power-brake": "the power supply requests lower clocks",
}
_CREDIBLE = range(50, 151)  # °C; newer GPUs report how far they are from a limit instead, as a small number
_TOLERANCE = 0.99  # a limit is set in watts, the default reported in milliwatts


@health_check(
    "thermal-power-throttle",
    title="The GPUs aren't throttled",
    severity="warning",
    looks_at="NVML's reasons for lower clocks, sampled twice 0.1 s apart (hardware slowdown, heat, power "
    "brake), and each GPU's temperature.",
    fix=fixes.look(
        "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER",
        "Clocks Event Reasons says whether it is heat or power: check fans and air flow, or the power "
        "supplies",
        needs_root=False,
    ),
    blocked_by=("nvml-hang", "aux-power"),
    refs=("https://docs.nvidia.com/deploy/nvml-api/",),
)
def thermal_power_throttle(node: Node) -> Verdict:
    """A GPU that is too hot or gets too little power runs at a fraction of its speed, and multi-GPU work
    waits for the slowest GPU. Check fans, air flow and power supplies.
    """
    slowed = gpus_where(node, lambda gpu: bool(gpu.slowdowns) or _hot(gpu))
    if slowed:
        evidence = [on_gpu(gpu, _throttle_reasons(gpu)) for gpu in slowed]
        return warn(f"heat or power throttles {which(slowed, node)}", *evidence)
    skipped = skip_unreported(node, lambda gpu: gpu.slowdowns is not None or gpu.temperature is not None)
    return skipped or ok("neither heat nor power throttles a GPU")


def _hot(gpu: Condition) -> bool:
    limit = _limit(gpu)
    return limit is not None and gpu.temperature is not None and gpu.temperature >= limit


def _limit(gpu: Condition) -> int | None:
    return gpu.temperature_slowdown if gpu.temperature_slowdown in _CREDIBLE else None


def _throttle_reasons(gpu: Condition) -> str:
    answer = [_SPEED_WORDS.get(slowdown, slowdown) for slowdown in gpu.slowdowns or ()]
    if gpu.temperature is not None:
        limit = f", throttled from {_limit(gpu)} °C" if _limit(gpu) else ""
        answer.append(f"{gpu.temperature} °C{limit}")
    return "; ".join(answer)


@check(
    "power-cap-low",
    title="The GPUs have their default power limits",
    severity="info",
    looks_at="NVML's enforced power limit of each GPU against its default.",
    fix=fixes.look(
        "nvidia-smi -q -d POWER",
        "To restore the default: nvidia-smi --power-limit with the Default Power Limit shown",
        needs_root=False,
    ),
    blocked_by=("nvml-hang",),
    unless=("vgpu-guest",),
    refs=("https://docs.nvidia.com/deploy/nvidia-smi/",),
)
def power_cap_low(node: Node) -> Verdict:
    """The power limit was lowered, which saves power but costs speed under load."""
    capped = gpus_where(node, _capped)
    if capped:
        evidence = [
            on_gpu(gpu, f"limit {_watts(gpu.power_limit)}, default {_watts(gpu.power_limit_default)}")
            for gpu in capped
        ]
        return note(f"{which(capped, node)}: a lower power limit than the default", *evidence)
    return skip_unreported(node, lambda gpu: gpu.power_limit is not None) or ok(
        "the power limits are the defaults"
    )


def _capped(gpu: Condition) -> bool:
    if not gpu.power_limit or not gpu.power_limit_default:
        return False
    return gpu.power_limit < _TOLERANCE * gpu.power_limit_default


def _watts(milliwatts: int | None) -> str:
    return f"{(milliwatts or 0) / 1000:g} W"


@health_check(
    "nvlink-down",
    title="All NVLinks are up",
    severity="warning",
    looks_at="NVML's state of every NVLink, compared between GPUs of one model.",
    fix=NVLINKS,
    blocked_by=("nvml-hang", "gpu-reset-required", "fabricmanager-missing", "fabric-training"),
    refs=("https://docs.nvidia.com/datacenter/dcgm/latest/user-guide/dcgm-diagnostics.html",),
)
def nvlink_down(node: Node) -> Verdict:
    """A GPU with fewer links than its peers exchanges data slowly or can't join the fabric. A reset retrains
    the links. If a link stays down, check the board or the bridge.
    """
    # Only GPUs of one model are compared. A card without its bridge has no link up, which is no fault unless
    # NVSwitches connect all GPUs; with MIG on, a GPU has none either.
    names = {gpu.uuid: gpu.name for gpu in node.nvml.inventory.gpus} if node.nvml.inventory else {}
    linked = [gpu for gpu in node.conditions if gpu.nvlinks and not gpu.mig_mode]
    if not any(any(gpu.nvlinks or ()) for gpu in linked):
        return skip("no GPU has an active NVLink")
    down = []
    for gpu in linked:
        peers = [peer for peer in linked if _kind(peer, names) == _kind(gpu, names)]
        most = max(_links_up(peer) for peer in peers)
        if _links_up(gpu) < most and (_links_up(gpu) or node.switches):
            down.append((gpu, most))
    if not down:
        return ok("all NVLinks that the GPUs have in common are up")
    evidence = [
        on_gpu(
            gpu, f"{_links_up(gpu)} of {len(gpu.nvlinks or ())} links up, others {most}: {_down_links(gpu)}"
        )
        for gpu, most in down
    ]
    gpus = tuple(gpu for gpu, _ in down)
    fix = _with_reset(node, gpus, NVLINKS)
    return warn(f"NVLinks of {which(gpus, node)} are down", *evidence, fix=fix)


def _with_reset(node: Node, gpus: tuple[Condition, ...], fix: Fix) -> Fix:
    """A command that only shows the cause, with the command that resets these GPUs in its note."""
    text, _, _ = fix.note.partition("\n")
    return replace(fix, note=f"{text}\n{reset_gpus(node, gpus).command}")


def _kind(gpu: Condition, names: dict[str, str]) -> tuple[str, int]:
    return names.get(gpu.uuid, ""), len(gpu.nvlinks or ())


def _links_up(gpu: Condition) -> int:
    return sum(gpu.nvlinks or ())


def _down_links(gpu: Condition) -> str:
    down = [str(number) for number, state in enumerate(gpu.nvlinks or ()) if not state]
    return f"link {', '.join(down)} is down" if len(down) == 1 else f"links {', '.join(down)} are down"


# What uses the GPUs, and what blocks other programs.

_MPS = "nvidia-cuda-mps-control"
_GIB = 1 << 30
_ORPHANED = _GIB  # more memory than a driver reserves for itself


@health_check(
    "compute-mode",
    title="The GPUs accept CUDA programs",
    looks_at="NVML's compute mode of each GPU, and whether the MPS daemon runs, which sets the mode itself.",
    fix=Fix("nvidia-smi -c DEFAULT"),
    blocked_by=("nvml-hang",),
    preflight=ANY_ENGINE,
    refs=("https://docs.nvidia.com/deploy/mps/",),
)
def compute_mode(node: Node) -> Verdict:
    """In mode prohibited a GPU refuses every CUDA program; in an exclusive mode it accepts one process at a
    time: a second container fails with error 46, 'all CUDA-capable devices are busy or unavailable'.
    """
    skipped = skip_unreported(node, lambda gpu: gpu.compute_mode is not None)
    if skipped:
        return skipped
    closed = gpus_where(node, lambda gpu: gpu.compute_mode == "prohibited")
    if closed:
        judge = fail if len(closed) == len(node.conditions) else warn
        evidence = [on_gpu(gpu, "compute mode prohibited") for gpu in closed]
        verb = "accepts" if len(closed) == 1 else "accept"
        what = f"{which(closed, node)} {verb} no CUDA programs"
        why = "In compute mode prohibited a GPU refuses every CUDA program."
        return judge(what, *evidence, fix=_shared(closed), why=why)
    alone = gpus_where(node, lambda gpu: gpu.compute_mode in ("exclusive-process", "exclusive-thread"))
    if alone and _mps(node):
        return ok("the MPS daemon shares the GPUs")
    if alone:
        evidence = [on_gpu(gpu, f"compute mode {gpu.compute_mode}") for gpu in alone]
        verb = "accepts" if len(alone) == 1 else "accept"
        words = f"{which(alone, node)} {verb} only one program at a time"
        return warn(words, *evidence, fix=_shared(alone), why=_EXCLUSIVE)
    return ok("the GPUs accept every program")


_EXCLUSIVE = (
    "In an exclusive mode a GPU accepts one process at a time: a second container fails with error 46, 'all "
    "CUDA-capable devices are busy or unavailable'."
)


def _shared(gpus: tuple[Condition, ...]) -> Fix:
    command = " && ".join(f"nvidia-smi -i {gpu.pci or gpu.index} -c DEFAULT" for gpu in gpus)
    return Fix(command, disturbs=DISRUPTS_NOTHING)


@check(
    "gpu-used-by-desktop",
    title="No desktop uses the GPUs",
    severity="info",
    looks_at="the graphics processes that NVML lists.",
    fix=Fix("systemctl set-default multi-user.target").then_reboot(),
    blocked_by=("nvml-hang",),
    refs=("https://docs.nvidia.com/deploy/nvidia-smi/",),
)
def gpu_used_by_desktop(node: Node) -> Verdict:
    """A desktop uses GPU memory, and the display's watchdog may kill kernels that run for seconds. A server
    usually needs no desktop.
    """
    names = {process.pid: process.name for process in node.processes}
    users = [
        (gpu, names.get(process.pid, f"process {process.pid}"))
        for gpu in node.conditions
        for process in gpu.processes or ()
        if process.graphics
    ]
    if not users:
        return skip_unreported(node, lambda gpu: gpu.processes is not None) or ok("no desktop uses a GPU")
    served = node.kubelet is not None and node.kubelet.joined
    if len(node.conditions) == 1 and node.conditions[0].display_active and not served:
        return ok("the node's only GPU has a display attached and runs its desktop")
    evidence = [on_gpu(gpu, f"{name} uses it for graphics") for gpu, name in users]
    gpus = tuple({gpu.index: gpu for gpu, _ in users}.values())
    return note(f"{which(gpus, node)}: used by a desktop too", *evidence)


@check(
    "zombie-gpu-memory",
    title="All GPU memory in use belongs to a process",
    severity="warning",
    looks_at="the memory in use of each GPU, minus what the driver reserves, if NVML lists no process.",
    fix=HOLDERS,
    blocked_by=("nvml-hang",),
    unless=("coherent-gpu",),
    refs=("https://docs.nvidia.com/deploy/gpu-debug-guidelines/",),
)
def zombie_gpu_memory(node: Node) -> Verdict:
    """A program that has exited or is stuck in the kernel still holds the memory, and other programs can't
    get it. Kill the processes that have the device files open, or reset the GPU.
    """
    if _mps(node):
        return skip("MPS is in use, and NVML doesn't list its clients as processes")
    if not node.conditions:
        return skip(SILENT)
    reporting = [gpu for gpu in node.conditions if _owned(gpu) is not None]
    if not reporting:
        return skip("NVML doesn't report which processes use GPU memory")
    orphaned = tuple(gpu for gpu in reporting if (_owned(gpu) or 0) > _ORPHANED)
    if not orphaned:
        return ok("all GPU memory in use belongs to a process")
    evidence = [on_gpu(gpu, f"{(_owned(gpu) or 0) / _GIB:.1f} GiB in use, no process") for gpu in orphaned]
    fix = _with_reset(node, orphaned, HOLDERS)
    return warn(f"memory of {which(orphaned, node)} is in use, but by no process", *evidence, fix=fix)


def _mps(node: Node) -> bool:
    return any(_MPS in (process.name, *process.argv[1:2]) for process in node.processes)


def _owned(gpu: Condition) -> int | None:
    """Bytes in use without a process on this GPU. None if unknown: with MIG and on virtual GPUs processes are
    listed elsewhere, confidential computing hides them, and drivers before 510 include their own memory."""
    if gpu.mig_mode or gpu.cc_enabled or gpu.virtualization not in ("none", "passthrough"):
        return None
    if gpu.processes is None or gpu.memory_used is None or gpu.memory_reserved is None:
        return None
    return 0 if gpu.processes else gpu.memory_used - gpu.memory_reserved


_KEPT = (
    "Programs that already run keep the variable: log in again, and for services run systemctl "
    "daemon-reexec and restart the container engine"
)


@check(
    "bad-cuda-env",
    title="No environment variable affects CUDA on the whole node",
    severity="warning",
    looks_at="variables of debuggers and profilers, and variables that hide GPUs, in /etc/environment, "
    "systemd's DefaultEnvironment, the units of container daemons, and gpunode's own environment.",
    fix=Fix("${EDITOR:-vi} /etc/environment"),
    refs=(
        "https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables",
        "https://docs.nvidia.com/datacenter/dcgm/latest/user-guide/dcgm-diagnostics.html",
    ),
)
def bad_cuda_env(node: Node) -> Verdict:
    """If it is set for the whole node, such a variable slows every CUDA program down, makes it wait for a
    debugger, or hides GPUs from it.
    """
    variables = settings(node.host, {process.name for process in node.processes})
    if not variables:
        return ok("no environment variable affects CUDA on the whole node")
    names = ", ".join(dict.fromkeys(variable.name for variable in variables))
    hides = all(variable.name in HIDING for variable in variables)
    what = "hides GPUs from" if hides else "affects"
    evidence = (
        seen(variable.source, f"{variable.name}={variable.value}", variable.line) for variable in variables
    )
    places = [variable.source for variable in variables if variable.source.startswith("/")]
    units = [variable.source for variable in variables if variable.source.endswith(".service")]
    if places:
        here = [variable for variable in variables if variable.source == places[0]]
        line = here[0].line if len(here) == 1 else None
        edit = edit_file(places[0], line, f"delete {', '.join(variable.name for variable in here)}")
        others = [f"{variable.name} in {variable.source}" for variable in variables if variable not in here]
        other = f"Delete {' and '.join(others)} too. " if others else ""
        fix = replace(edit, note=f"{other}{_KEPT}")
    elif units:
        fix = Fix(f"systemctl edit {units[0]}")
    else:
        fix = Fix(f"unset {names.replace(',', '')}", needs_root=False)
    why = (
        "Every CUDA program of this node gets the variable and finds only the GPUs that it lists."
        if hides
        else ""
    )
    summary = f"a setting of the whole node {what} every CUDA program: {names}"
    return warn(summary, *evidence, fix=fix, why=why)
