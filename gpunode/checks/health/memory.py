"""Memory errors: what can't be corrected, what waits for a reset, what can't be mended any more."""

from __future__ import annotations

from gpunode.checks.health import remedies
from gpunode.checks.health.told import how_many, reset, said, those, untold
from gpunode.checks.model import HOST_OR_CONTAINER, Check, Verdict, fail, note, ok, warn
from gpunode.facts.node import Node
from gpunode.gpu.condition import Condition

_MOST_REMAPPED = 512  # rows; NVIDIA's GPU memory error management: the rows that a GPU can remap
_MOST_RETIRED = 63  # pages; NVIDIA's dynamic page retirement: from here on a GPU is to be replaced
_GUIDE = "https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/"


def ecc_uncorrectable(node: Node) -> Verdict:
    worn = those(node, lambda gpu: bool(gpu.sram_threshold_exceeded))
    if worn:
        evidence = [said(gpu, "more uncorrectable SRAM errors than NVIDIA's threshold") for gpu in worn]
        return fail(f"{how_many(worn, node)} must be replaced", *evidence, fix=remedies.REPORT.other)
    now = those(node, lambda gpu: bool(gpu.reading.ecc_volatile))
    if now:
        evidence = [said(gpu, f"{gpu.reading.ecc_volatile} since the last reset") for gpu in now]
        words = f"{how_many(now, node)} had uncorrectable memory errors and weren't reset since"
        # a driver that tells its recovery action (from 570 on) has seen these errors and lets the GPU go on
        judge = warn if all(gpu.reading.recovery_action == "none" for gpu in now) else fail
        return judge(words, *evidence, fix=reset(node, now))
    skipped = untold(node, lambda gpu: gpu.reading.ecc_volatile is not None)
    if skipped:
        return skipped
    before = those(node, lambda gpu: bool(gpu.reading.ecc_aggregate))
    if before:
        evidence = [
            said(gpu, f"{gpu.reading.ecc_aggregate} in its life, 0 since the reset") for gpu in before
        ]
        return note(f"{how_many(before, node)} had uncorrectable memory errors before", *evidence)
    return ok("no uncorrectable memory error")


def row_remap_pending(node: Node) -> Verdict:
    broken = those(node, _beyond_repair)
    if broken:
        evidence = [said(gpu, _state(gpu)) for gpu in broken]
        whose = "its" if len(broken) == 1 else "their"
        words = f"{how_many(broken, node)} can't repair {whose} memory any more and must be replaced"
        return fail(words, *evidence, fix=remedies.REPORT.other)
    waiting = those(node, lambda gpu: bool(gpu.reading.remap_pending or gpu.reading.retired_pending))
    if waiting:
        evidence = [said(gpu, _state(gpu)) for gpu in waiting]
        words = f"bad memory of {how_many(waiting, node)} is in use until a reset takes it out"
        return fail(words, *evidence, fix=reset(node, waiting))
    skipped = untold(
        node, lambda gpu: gpu.reading.remap_pending is not None or gpu.reading.retired_pending is not None
    )
    return skipped or ok("no memory waits to be remapped or retired")


def _beyond_repair(gpu: Condition) -> bool:
    many = (gpu.remapped or 0) >= _MOST_REMAPPED or (gpu.retired_pages or 0) >= _MOST_RETIRED
    return bool(gpu.reading.remap_failed) or many


def _state(gpu: Condition) -> str:
    told = {
        "remapping has failed": gpu.reading.remap_failed,
        "remapping is pending": gpu.reading.remap_pending,
        "retirement is pending": gpu.reading.retired_pending,
        f"rows remapped for uncorrectable errors: {gpu.remapped}": gpu.remapped,
        f"pages retired: {gpu.retired_pages}": gpu.retired_pages,
    }
    return ", ".join(words for words, holds in told.items() if holds)


def channel_repair_pending(node: Node) -> Verdict:
    waiting = those(node, lambda gpu: bool(gpu.channel_repair_pending or gpu.tpc_repair_pending))
    if waiting:
        evidence = [said(gpu, _repair(gpu)) for gpu in waiting]
        return fail(
            f"a repair of {how_many(waiting, node)} waits for a reset", *evidence, fix=reset(node, waiting)
        )
    skipped = untold(node, lambda gpu: gpu.channel_repair_pending is not None)
    return skipped or ok("no repair is pending")


def _repair(gpu: Condition) -> str:
    words = {"a memory channel": gpu.channel_repair_pending, "a processing cluster": gpu.tpc_repair_pending}
    return " and ".join(word for word, holds in words.items() if holds) + " is to be repaired"


def ecc_mode_pending(node: Node) -> Verdict:
    changed = those(
        node, lambda gpu: None not in (gpu.ecc_mode, gpu.ecc_mode_next) and gpu.ecc_mode != gpu.ecc_mode_next
    )
    if changed:
        evidence = [
            said(gpu, f"ECC is {_on(gpu.ecc_mode)}, {_on(gpu.ecc_mode_next)} after a reset")
            for gpu in changed
        ]
        return warn(
            f"a change of ECC waits for a reset of {how_many(changed, node)}",
            *evidence,
            fix=reset(node, changed),
        )
    told = {gpu.ecc_mode for gpu in node.conditions} - {None}
    if len(told) > 1:
        off = those(node, lambda gpu: gpu.ecc_mode is False)
        evidence = [said(gpu, "ECC is off") for gpu in off]
        return note(f"ECC is off on {how_many(off, node)} and on on the others", *evidence)
    return untold(node, lambda gpu: gpu.ecc_mode is not None) or ok("no change of ECC is pending")


def _on(mode: bool | None) -> str:
    return "on" if mode else "off"


CHECKS = (
    Check(
        id="ecc-uncorrectable",
        title="No uncorrectable memory errors",
        layer="health",
        severity="error",
        looks_at="NVML's count of uncorrectable ECC errors since the last reset, and its threshold for SRAM.",
        why=(
            "An uncorrectable error has destroyed data of a program. Until the GPU is reset, the bad memory "
            "can be handed to the next one."
        ),
        remedy=remedies.RESET,
        run=ecc_uncorrectable,
        classes=HOST_OR_CONTAINER,
        blocked_by=("nvml-hang", "gpu-reset-required", "row-remap-pending"),
        refs=(_GUIDE,),
    ),
    Check(
        id="row-remap-pending",
        title="No bad memory waits for a reset",
        layer="health",
        severity="error",
        looks_at="NVML's remapped rows (Ampere and newer) or retired pages (before it), pending and failed.",
        why=(
            "The GPU has found bad memory and replaces it at the next reset; until then a program that is "
            "given that memory is killed or computes wrongly, while the node looks healthy."
        ),
        remedy=remedies.RESET,
        run=row_remap_pending,
        classes=HOST_OR_CONTAINER,
        blocked_by=("nvml-hang", "gpu-reset-required"),
        refs=(_GUIDE,),
    ),
    Check(
        id="channel-repair-pending",
        title="No repair waits for a reset",
        layer="health",
        severity="error",
        looks_at="NVML's repair status (Blackwell and newer).",
        why="The GPU can take a broken part of itself out of use, which it does at the next reset.",
        remedy=remedies.RESET,
        run=channel_repair_pending,
        classes=HOST_OR_CONTAINER,
        blocked_by=("nvml-hang", "gpu-reset-required"),
        refs=("https://docs.nvidia.com/deploy/nvml-api/",),
    ),
    Check(
        id="ecc-mode-pending",
        title="No change of ECC waits for a reset",
        layer="health",
        severity="warning",
        looks_at="NVML's ECC mode of each GPU, now and after the next reset.",
        why=(
            "Somebody has switched ECC and the GPU still runs without the change. It comes with the next "
            "reset or reboot, and changes how much memory there is."
        ),
        remedy=remedies.RESET,
        run=ecc_mode_pending,
        classes=HOST_OR_CONTAINER,
        blocked_by=("nvml-hang", "gpu-reset-required"),
        reboot=True,
        refs=("https://docs.nvidia.com/deploy/nvidia-smi/",),
    ),
)
