"""containerd: its file, its daemon, its handlers and what it imports."""

from __future__ import annotations

from gpunode.checks.containerd import beside, daemon, handlers, imports
from gpunode.checks.model import Check

CHECKS: tuple[Check, ...] = (*daemon.CHECKS, *imports.CHECKS, *handlers.CHECKS, *beside.CHECKS)
