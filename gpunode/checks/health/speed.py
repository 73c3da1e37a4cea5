"""What makes GPUs slow: heat, power, links that are down."""

from __future__ import annotations

from gpunode.checks.health import remedies
from gpunode.checks.health.told import how_many, said, those, untold
from gpunode.checks.model import HOST_OR_CONTAINER, Check, Verdict, note, ok, skip, warn
from gpunode.facts.node import Node
from gpunode.gpu.condition import Condition

_WORDS = {
    "hw-slowdown": "the hardware halves the clocks",
    "sw-thermal": "the driver lowers the clocks for the temperature",
    "hw-thermal": "the hardware lowers the clocks for the temperature",
    "hw-power-brake": "the power supply asks for lower clocks",
}
_CREDIBLE = range(50, 151)  # °C; newer GPUs tell how far they are from a limit instead, as a small number
_TOLERANCE = 0.99  # a limit is set in watts, the default told in milliwatts


def thermal_power_throttle(node: Node) -> Verdict:
    slowed = those(node, lambda gpu: bool(gpu.slowdowns) or _hot(gpu))
    if slowed:
        evidence = [said(gpu, _held_back(gpu)) for gpu in slowed]
        return warn(f"{how_many(slowed, node)} are slowed down for heat or power", *evidence)
    skipped = untold(node, lambda gpu: gpu.slowdowns is not None or gpu.temperature is not None)
    return skipped or ok("neither heat nor power slows a GPU down")


def _hot(gpu: Condition) -> bool:
    limit = _limit(gpu)
    return limit is not None and gpu.temperature is not None and gpu.temperature >= limit


def _limit(gpu: Condition) -> int | None:
    return gpu.temperature_slowdown if gpu.temperature_slowdown in _CREDIBLE else None


def _held_back(gpu: Condition) -> str:
    told = [_WORDS.get(one, one) for one in gpu.slowdowns or ()]
    if gpu.temperature is not None:
        limit = f", {_limit(gpu)} °C is where it slows down" if _limit(gpu) else ""
        told.append(f"{gpu.temperature} °C{limit}")
    return "; ".join(told)


def power_cap_low(node: Node) -> Verdict:
    capped = those(node, _capped)
    if capped:
        evidence = [
            said(gpu, f"limit {_watts(gpu.power_limit)}, default {_watts(gpu.power_limit_default)}")
            for gpu in capped
        ]
        return note(f"{how_many(capped, node)} have a lower power limit than they came with", *evidence)
    return untold(node, lambda gpu: gpu.power_limit is not None) or ok("the power limits are the defaults")


def _capped(gpu: Condition) -> bool:
    if not gpu.power_limit or not gpu.power_limit_default:
        return False
    return gpu.power_limit < _TOLERANCE * gpu.power_limit_default


def _watts(milliwatts: int | None) -> str:
    return f"{(milliwatts or 0) / 1000:g} W"


def nvlink_down(node: Node) -> Verdict:
    """Only GPUs that are alike are compared. A card without its bridge has no link up, which is no fault
    unless NVSwitches connect all GPUs; with MIG on, a GPU has none either."""
    names = {gpu.uuid: gpu.name for gpu in node.nvml.inventory.gpus} if node.nvml.inventory else {}
    linked = [gpu for gpu in node.conditions if gpu.nvlinks and not gpu.mig_mode]
    if not any(any(gpu.nvlinks or ()) for gpu in linked):
        return skip("no GPU has an NVLink that is up")
    down = []
    for gpu in linked:
        peers = [one for one in linked if _kind(one, names) == _kind(gpu, names)]
        most = max(_up(one) for one in peers)
        if _up(gpu) < most and (_up(gpu) or node.switches):
            down.append((gpu, most))
    if not down:
        return ok("the NVLinks that GPUs have in common are up")
    evidence = [
        said(gpu, f"{_up(gpu)} of {len(gpu.nvlinks or ())} links up, others {most}: {_which(gpu)}")
        for gpu, most in down
    ]
    return warn(f"NVLinks of {len(down)} of {len(linked)} GPUs are down", *evidence)


def _kind(gpu: Condition, names: dict[str, str]) -> tuple[str, int]:
    return names.get(gpu.uuid, ""), len(gpu.nvlinks or ())


def _up(gpu: Condition) -> int:
    return sum(gpu.nvlinks or ())


def _which(gpu: Condition) -> str:
    down = [str(number) for number, state in enumerate(gpu.nvlinks or ()) if not state]
    return f"link {', '.join(down)} is down" if len(down) == 1 else f"links {', '.join(down)} are down"


CHECKS = (
    Check(
        id="thermal-power-throttle",
        title="Nothing slows the GPUs down",
        layer="health",
        severity="warning",
        looks_at=(
            "NVML's reasons for lower clocks, in two looks 0.1 s apart (slowdown by the hardware, heat, "
            "power brake), and each GPU's temperature."
        ),
        why=(
            "A GPU that is too hot, or gets too little power, computes at a fraction of its speed, and what "
            "runs over several GPUs waits for the slowest. Look at fans, air flow and power supplies."
        ),
        remedy=remedies.CLOCKS,
        run=thermal_power_throttle,
        classes=HOST_OR_CONTAINER,
        blocked_by=("nvml-hang", "aux-power"),
        refs=("https://docs.nvidia.com/deploy/nvml-api/",),
    ),
    Check(
        id="power-cap-low",
        title="Power limits are the GPUs' own",
        layer="health",
        severity="info",
        looks_at="NVML's enforced power limit of each GPU against its default.",
        why="Somebody has set a lower limit, which saves power and costs speed under load.",
        remedy=remedies.DEFAULT_POWER,
        run=power_cap_low,
        blocked_by=("nvml-hang",),
        unless=("vgpu-guest",),
        refs=("https://docs.nvidia.com/deploy/nvidia-smi/",),
    ),
    Check(
        id="nvlink-down",
        title="NVLinks are up",
        layer="health",
        severity="warning",
        looks_at="NVML's state of every NVLink, compared among GPUs of one model.",
        why=(
            "A GPU with fewer links than its peers exchanges data slowly, or is left out of the fabric. A "
            "reset trains the links again; one that stays down is a matter for the board or the bridge."
        ),
        remedy=remedies.NVLINKS,
        run=nvlink_down,
        classes=HOST_OR_CONTAINER,
        blocked_by=("nvml-hang", "gpu-reset-required", "fabricmanager-missing", "fabric-training"),
        refs=("https://docs.nvidia.com/datacenter/dcgm/latest/user-guide/dcgm-diagnostics.html",),
    ),
)
