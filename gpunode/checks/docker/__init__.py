"""Docker: its file, its daemon, its runtimes."""

from __future__ import annotations

from gpunode.checks.docker import daemon, kinds, probe, settings
from gpunode.checks.model import Check

CHECKS: tuple[Check, ...] = (*kinds.CHECKS, *settings.CHECKS, *daemon.CHECKS, *probe.CHECKS)
