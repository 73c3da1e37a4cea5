"""What the GPUs say of their own condition, and the kernel of them."""

from __future__ import annotations

from gpunode.checks.model import Check

CHECKS: tuple[Check, ...] = ()
