"""Docker: its file, its daemon, its runtimes."""

from __future__ import annotations

from gpunode.checks.docker import daemon, file, kinds, probe, settings
from gpunode.checks.model import Check

CHECKS: tuple[Check, ...] = (*kinds.CHECKS, *settings.CHECKS, *file.CHECKS, *daemon.CHECKS, *probe.CHECKS)
