"""CDI specifications."""

from __future__ import annotations

from gpunode.checks.cdi import contents, reboot, specs, supply
from gpunode.checks.model import Check

CHECKS: tuple[Check, ...] = (*supply.CHECKS, *specs.CHECKS, *contents.CHECKS, *reboot.CHECKS)
