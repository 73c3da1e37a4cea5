"""What the GPUs say of their own condition, and the kernel of them."""

from __future__ import annotations

from gpunode.checks.health import logged, lost, memory, speed, use
from gpunode.checks.model import Check

CHECKS: tuple[Check, ...] = (*lost.CHECKS, *memory.CHECKS, *logged.CHECKS, *speed.CHECKS, *use.CHECKS)
