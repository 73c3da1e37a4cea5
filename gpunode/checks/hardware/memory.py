"""Power cables, and where the memory of GPUs appears in the machine's own address space."""

from __future__ import annotations

from gpunode.checks.hardware import remedies
from gpunode.checks.model import ANY_ENGINE, HOST, Check, Verdict, fail, ok, seen, skip, warn
from gpunode.errors import Unreadable
from gpunode.facts import pcie
from gpunode.facts.driver import PARAMETERS, parameters, version_numbers
from gpunode.facts.gates import TABLE, can
from gpunode.facts.kernel_log import SOURCE, matching
from gpunode.facts.node import Node

_CABLES = r"does not have the necessary power cables|NVRM: Xid \(.*?\): 54,"
_HMM = r"nvidia-uvm: .*(?:devmem_alloc_pagemap|request_free_mem_region).*-34"
_HMM_OFF = "/sys/module/nvidia_uvm/parameters/uvm_disable_hmm"


def aux_power(node: Node) -> Verdict:
    try:
        lines = matching(node.kernel_log, _CABLES)
    except Unreadable:
        lines = ()
    evidence = [seen(SOURCE, line.text) for line, _ in lines[:3]]
    if not evidence:
        return ok("no GPU asks for power cables")
    return fail("a GPU lacks external power", *evidence)


def coherent_memory_mode(node: Node) -> Verdict:
    module = node.module
    if module is None or not can("driver", "coherent-memory-mode", version_numbers(module.version)):
        return skip("this driver knows no mode in which it keeps the GPUs' memory to itself")
    nodes = pcie.memory_only_nodes(node.host)
    mode = parameters(node.host).get("CoherentGPUMemoryMode")
    if not nodes or mode is None or mode == "driver":
        return ok("the GPUs' memory is the driver's alone")
    return warn(
        f"the GPUs' memory appears as NUMA nodes {', '.join(map(str, nodes))} of a Kubernetes node",
        seen(PARAMETERS, f"CoherentGPUMemoryMode: {mode or '(not set)'}"),
        seen(f"{pcie.NODES}/has_memory", f"nodes {', '.join(map(str, nodes))} have memory and no processor"),
    )


def uvm_hmm_kaslr(node: Node) -> Verdict:
    lines = matching(node.kernel_log, _HMM)
    if not lines:
        return ok("nvidia-uvm found room for its memory")
    off = (node.host.read_text(_HMM_OFF) or "").strip()
    if off == "Y":
        return ok("nvidia-uvm runs without HMM", seen(_HMM_OFF, off))
    set_ = node.module_options.option("nvidia_uvm", "uvm_disable_hmm")
    evidence = [seen(SOURCE, lines[-1][0].text)]
    evidence += [seen(_HMM_OFF, off)] if off else []
    evidence += (
        [seen(set_.source, f"uvm_disable_hmm={set_.value}, not in force yet", set_.line)] if set_ else []
    )
    return fail("nvidia-uvm found no room for the GPUs' memory, and CUDA can't start", *evidence)


CHECKS = (
    Check(
        id="aux-power",
        title="The GPUs have their power cables",
        layer="hardware",
        severity="error",
        looks_at="the driver's words and XID 54 in the kernel's log.",
        why=(
            "A card that draws more than the slot gives needs its own cables. Without them the driver "
            "refuses it, or it stops under load."
        ),
        remedy=remedies.POWER_OFF,
        run=aux_power,
        blocked_by=("pci-no-gpu",),
        classes=HOST,
        needs=("gpu",),
        preflight=ANY_ENGINE,
        refs=("https://docs.nvidia.com/deploy/xid-errors/",),
    ),
    Check(
        id="coherent-memory-mode",
        title="The GPUs' memory is no memory of the machine",
        layer="hardware",
        severity="warning",
        looks_at=(
            "CoherentGPUMemoryMode in /proc/driver/nvidia/params, and NUMA nodes that have memory and no "
            "processor, on Kubernetes nodes whose GPUs share their processor's memory (GH200, GB200)."
        ),
        why=(
            "The kernel hands such memory to anybody: pods are counted and placed on GPU memory, and it is "
            "lost to CUDA. With the mode 'driver' the driver alone gives it out; MIG and GDS don't work then."
        ),
        remedy=remedies.COHERENT_BY_DRIVER,
        run=coherent_memory_mode,
        blocked_by=("module-not-loaded",),
        needs=("kubelet", "coherent-gpu"),
        table=TABLE,
        refs=("https://docs.nvidia.com/datacenter/cloud-native/gpu-operator/latest/release-notes.html",),
    ),
    Check(
        id="uvm-hmm-kaslr",
        title="Unified memory found its place",
        layer="hardware",
        severity="error",
        looks_at="the words of nvidia-uvm in the kernel's log, and the module's parameter uvm_disable_hmm.",
        why=(
            "Where the kernel lies at a random address, there may be no room left above it for the GPUs' "
            "memory: nvidia-smi works and every CUDA program fails to initialise."
        ),
        remedy=remedies.DISABLE_HMM,
        run=uvm_hmm_kaslr,
        blocked_by=("module-not-loaded", "uvm-not-loaded"),
        needs=("gpu",),
        preflight=ANY_ENGINE,
        refs=("https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/",),
    ),
)
