"""containerd: its file, its running CRI."""

from __future__ import annotations

from gpunode.checks.containerd import daemon
from gpunode.checks.model import Check

CHECKS: tuple[Check, ...] = (*daemon.CHECKS,)
