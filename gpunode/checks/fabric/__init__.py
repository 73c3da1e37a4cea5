"""NVSwitch fabrics, MIG layouts, vGPU, confidential computing, GPUDirect."""

from __future__ import annotations

from gpunode.checks.fabric import mig, mig_plugins, rdma, switches, virtual
from gpunode.checks.model import Check

CHECKS: tuple[Check, ...] = (
    *(*switches.CHECKS, *mig.CHECKS, *mig_plugins.CHECKS),
    *(*virtual.CHECKS, *rdma.CHECKS),
)
