"""The NVIDIA Container Toolkit."""

from __future__ import annotations

from gpunode.checks.model import Check
from gpunode.checks.toolkit import calls, installed, releases, settings

CHECKS: tuple[Check, ...] = (*installed.CHECKS, *releases.CHECKS, *settings.CHECKS, *calls.CHECKS)
