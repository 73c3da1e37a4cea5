"""CUDA releases and images against the driver and its GPUs."""

from __future__ import annotations

from gpunode.checks.cuda import images, releases, running
from gpunode.checks.model import Check

CHECKS: tuple[Check, ...] = (*releases.CHECKS, *images.CHECKS, *running.CHECKS)
