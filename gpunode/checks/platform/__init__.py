"""The operating system around the GPUs: SELinux, WSL, Jetson, clocks, disks."""

from __future__ import annotations

from gpunode.checks.model import Check
from gpunode.checks.platform import special, system

CHECKS: tuple[Check, ...] = (*system.CHECKS, *special.CHECKS)
