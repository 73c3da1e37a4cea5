"""XIDs of this boot: what the driver wrote into the kernel's log, compared with NVML's current state."""

from __future__ import annotations

from gpunode.checks import fixes
from gpunode.checks.finding import Evidence, FindingStatus, Fix
from gpunode.checks.health import reset_gpus
from gpunode.checks.model import Verdict, ago, check, fail, note, ok, seen, skip, warn
from gpunode.checks.pcie import pcie_aer_errors
from gpunode.errors import GpunodeError
from gpunode.facts import xids
from gpunode.facts.kernel_log import SOURCE, last_load
from gpunode.facts.node import Node
from gpunode.facts.processes import uptime
from gpunode.facts.xids import XidLine
from gpunode.output.result import many

_RECENT_SECONDS = 24 * 3600
_SHOWN = 8
_OFF_THE_BUS = 79
_RECOVERS_ALONE = (xids.APPLICATION, xids.IGNORE, xids.RESTART_APP)


@check(
    "xid-recent",
    title="The driver reports no XID errors",
    looks_at="the NVRM: Xid lines in the kernel's log of this boot, within the last day and since the "
    "driver was last loaded: their class (docs/health.md) and the recovery action that the driver "
    "reports now.",
    fix=fixes.look(
        "dmesg | grep -i -e nvrm -e xid | tail -n 20",
        "Restart the program that used the GPU. If the XID comes again, end all work on the node and "
        "reboot it; a GPU that reports it again after that must be replaced. For each number see "
        "https://docs.nvidia.com/deploy/xid-errors/",
    ),
    blocked_by=(
        "nvml-hang",
        "gpu-reset-required",
        "row-remap-pending",
        "ecc-uncorrectable",
        "channel-repair-pending",
        "aux-power",
    ),
    table="xids",
    refs=("https://docs.nvidia.com/deploy/xid-errors/",),
)
def xid_recent(node: Node) -> Verdict:
    """An XID is an error that the driver reports. Some are caused by a program; others mean that the GPU must
    be reset or replaced, and until then its containers fail or compute wrong results.
    """
    now = uptime(node.host)
    if not node.xids:
        return ok("the driver has reported no XID since the boot")
    if not now:
        return skip("the age of the driver's XIDs is unknown: /proc/uptime can't be read")
    loaded = last_load(node.kernel_log)  # a driver that is loaded again initialises its GPUs again
    grave, programs = _grave_and_programs(tuple(line for line in node.xids if line.seconds >= loaded))
    recent = tuple(line for line in grave if now - line.seconds < _RECENT_SECONDS)
    lasting = tuple(line for line in recent if _needs_recovery(node, line))
    if lasting:
        return fail(
            f"{_kinds_text(lasting)}: the GPU must be reset",
            *_line_evidence(lasting, now),
            fix=_fix(node, lasting),
            why="The driver doesn't recover from this error: until the GPU is reset, its containers fail or "
            "compute wrong results.",
        )
    if recent and all(line.number == _OFF_THE_BUS for line in recent) and _link_is_bad(node):
        return ok(f"{_kinds_text(recent)} and is back: see pcie-aer-errors for its link")
    if recent:
        if any(gpu.reading.recovery_action == "none" for gpu in node.conditions):
            words, fix = "and the driver requests no reset", _watch(recent[-1].address)
        else:
            words, fix = "within the last day", None
        why = (
            "An XID is an error that the driver reports. A GPU that reports this one again may be defective."
        )
        return warn(f"{_kinds_text(recent)}, {words}", *_line_evidence(recent, now), fix=fix, why=why)
    late = tuple(line for line in programs if now - line.seconds < _RECENT_SECONDS)
    if late:
        return note(
            f"{_kinds_text(late)}: errors of programs, or contained errors", *_line_evidence(late, now)
        )
    return ok("the driver has reported no XID that is still relevant")


def _watch(address: str) -> Fix:
    return fixes.look(
        f"nvidia-smi -q -i {address} | grep -i recovery",
        "If this prints None, restart the job that used the GPU. Otherwise, or if the XID comes again, drain "
        "the node and reboot; a GPU that reports the XID again after that must be replaced",
        needs_root=False,
    )


def _grave_and_programs(lines: tuple[XidLine, ...]) -> tuple[tuple[XidLine, ...], tuple[XidLine, ...]]:
    """XIDs of the GPU, and those of programs: of each GPU and number the last one."""
    last = {(line.address, line.number): line for line in lines}
    known = {line: xids.xid(line.number) for line in last.values()}
    grave = tuple(line for line, code in known.items() if code.counts and code.kind not in _RECOVERS_ALONE)
    programs = tuple(line for line, code in known.items() if line not in grave and code.kind != xids.IGNORE)
    return grave, programs


def _needs_recovery(node: Node, line: XidLine) -> bool:
    """Whether the GPU still needs the XID's recovery action, as far as known: a driver that reports its
    recovery action (570 on) knows better, and a GPU that answers is back on the bus."""
    if xids.xid(line.number).kind not in (xids.RESET, xids.REBOOT) or line.number == _OFF_THE_BUS:
        return False
    gpu = next((condition for condition in node.conditions if condition.pci == line.address), None)
    return gpu is not None and not gpu.error and gpu.reading.recovery_action is None


def _link_is_bad(node: Node) -> bool:
    """Whether link errors are already reported that end with a GPU falling off the bus."""
    try:
        return pcie_aer_errors.run(node).status is FindingStatus.WARN
    except GpunodeError:
        return False


def _kinds_text(lines: tuple[XidLine, ...]) -> str:
    numbers = sorted({line.number for line in lines})
    gpus = {line.address for line in lines}
    where = many(len(gpus), "GPU") if len(gpus) > 1 else f"GPU {lines[0].address}"
    words = xids.xid(numbers[0]).text if len(numbers) == 1 else f"XIDs {', '.join(map(str, numbers))}"
    return f"{words} ({where})"


def _line_evidence(lines: tuple[XidLine, ...], now: float) -> tuple[Evidence, ...]:
    return tuple(
        seen(f"{SOURCE}, {ago(now - line.seconds)}, GPU {line.address}", line.text)
        for line in lines[-_SHOWN:]
    )


def _fix(node: Node, lines: tuple[XidLine, ...]) -> Fix:
    if any(xids.xid(line.number).kind == xids.REBOOT for line in lines):
        return fixes.REBOOT
    addresses = {line.address for line in lines}
    return reset_gpus(node, tuple(gpu for gpu in node.conditions if gpu.pci in addresses))
