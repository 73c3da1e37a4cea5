"""Docker: its file, its daemon, its runtimes."""

from __future__ import annotations

from gpunode.checks.docker import daemon
from gpunode.checks.model import Check

CHECKS: tuple[Check, ...] = (*daemon.CHECKS,)
