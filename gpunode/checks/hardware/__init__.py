"""What is on the PCI bus, and who owns it."""

from __future__ import annotations

from gpunode.checks.hardware import bus, memory, nouveau, pcie
from gpunode.checks.model import Check

CHECKS: tuple[Check, ...] = (*bus.CHECKS, *nouveau.CHECKS, *pcie.CHECKS, *memory.CHECKS)
