"""The NVIDIA Container Toolkit."""

from __future__ import annotations

from gpunode.checks.model import Check
from gpunode.checks.toolkit import installed

CHECKS: tuple[Check, ...] = (*installed.CHECKS,)
