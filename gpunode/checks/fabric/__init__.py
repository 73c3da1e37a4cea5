"""NVSwitch fabrics, MIG layouts, vGPU, confidential computing."""

from __future__ import annotations

from gpunode.checks.fabric import switches
from gpunode.checks.model import Check

CHECKS: tuple[Check, ...] = (*switches.CHECKS,)
