"""Device files, unified memory, persistence."""

from __future__ import annotations

from gpunode.checks.devices import nodes
from gpunode.checks.model import Check

CHECKS: tuple[Check, ...] = (*nodes.CHECKS,)
