"""Known holes, and doors left open."""

from __future__ import annotations

from gpunode.checks.model import Check

CHECKS: tuple[Check, ...] = ()
