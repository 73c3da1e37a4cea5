"""CDI specifications."""

from __future__ import annotations

from gpunode.checks.cdi import specs
from gpunode.checks.model import Check

CHECKS: tuple[Check, ...] = (*specs.CHECKS,)
