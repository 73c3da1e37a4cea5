"""From a GPU to what of it can be given to a container: the whole, or its MIG devices."""

from __future__ import annotations

from gpunode.cdi.nodes import NodeFacts, gpu_node, mig_nodes
from gpunode.dataclass import dataclass, replace
from gpunode.gpu.model import Gpu, MigDevice
from gpunode.plugin.model import LeftOut, Problem, Unit

GPU, MIG = "gpu", "mig"


@dataclass(frozen=True)
class Candidate:
    """A unit that may be advertised. `sound` is false for one whose GPU can't be read now.

    `missing` are device files of it that nobody tells. `cut` is a whole GPU in MIG mode.
    """

    unit: Unit
    kind: str = GPU
    problem: Problem | None = None
    sound: bool = True
    missing: str = ""
    cut: bool = False

    @property
    def likeness(self) -> str:
        """The same for units that can stand in for each other: empty for a whole GPU, else the profile."""
        return self.unit.profile


@dataclass(frozen=True)
class CutGpu:
    """What one GPU gives; `left_out` and `warning` say what it doesn't."""

    candidates: tuple[Candidate, ...] = ()
    left_out: LeftOut | None = None
    warning: str = ""


def cut(gpu: Gpu, strategy: str, facts: NodeFacts) -> CutGpu:
    """The units of a GPU under a MIG strategy. A GPU that can't be read gives what is known of it."""
    if strategy == "none" or not gpu.mig_enabled:
        return _whole(gpu, facts)
    if gpu.mig:
        parts = sorted(gpu.mig, key=lambda mig: mig.index)
        return CutGpu(tuple(_part(gpu, mig, facts) for mig in parts))
    reason = gpu.error or f"MIG mode is on and it holds no MIG device: {_no_devices(gpu)}"
    return CutGpu(left_out=LeftOut(str(gpu.index), gpu.uuid, reason))


def _no_devices(gpu: Gpu) -> str:
    return (
        f"make some (nvidia-smi mig -i {gpu.index} -cgi ... -C) or end it (nvidia-smi -i {gpu.index} -mig 0)"
    )


def _whole(gpu: Gpu, facts: NodeFacts) -> CutGpu:
    node = gpu_node(gpu, facts)
    unit = Unit(
        gpu.uuid,
        gpu.uuid,
        str(gpu.index),
        name=gpu.name,
        pci=gpu.pci,
        numa=gpu.numa,
        minor=gpu.minor,
        memory_bytes=gpu.memory_bytes,
        compute_capability=gpu.compute_capability,
        paths=(node,) if node else (),
    )
    sound = not gpu.error
    missing = "" if node else "the number of its device file (/dev/nvidiaN) can't be told"
    if not gpu.mig_enabled:
        return CutGpu((Candidate(unit, sound=sound, missing=missing),))
    if gpu.mig or gpu.error:
        warning = (
            f"GPU {gpu.index} is in MIG mode and mig-strategy is none: containers get it whole, and CUDA "
            "uses one of its MIG devices only; set mig-strategy to mixed or single"
        )
        return CutGpu((Candidate(unit, sound=sound, missing=missing, cut=True),), warning=warning)
    problem = Problem("mig-mode", f"MIG mode is on and it holds no MIG device: {_no_devices(gpu)}")
    return CutGpu((Candidate(unit, problem=problem, missing=missing, cut=True),))


def _part(gpu: Gpu, mig: MigDevice, facts: NodeFacts) -> Candidate:
    node, caps = gpu_node(gpu, facts), mig_nodes(gpu, mig, facts)
    unit = Unit(
        mig.uuid,
        gpu.uuid,
        f"{gpu.index}:{mig.index}",
        name=gpu.name,
        pci=gpu.pci,
        numa=gpu.numa,
        profile=mig.profile,
        gi=mig.gi,
        ci=mig.ci,
        minor=gpu.minor,
        memory_bytes=mig.memory_bytes,
        compute_capability=gpu.compute_capability,
        paths=(node, *caps) if node and caps else (),
    )
    missing = "" if unit.paths else "/proc/driver/nvidia-caps/mig-minors doesn't have its capabilities"
    return Candidate(unit, MIG, sound=not gpu.error, missing=missing)


def with_problem(candidate: Candidate, problem: Problem) -> Candidate:
    """The first problem counts."""
    return candidate if candidate.problem else replace(candidate, problem=problem)
