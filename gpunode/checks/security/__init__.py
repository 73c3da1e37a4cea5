"""Known holes, and doors left open."""

from __future__ import annotations

from gpunode.checks.model import Check
from gpunode.checks.security import doors, holes

CHECKS: tuple[Check, ...] = (*holes.CHECKS, *doors.CHECKS)
