"""CRI-O: its handlers and their programs, its files, its hooks."""

from __future__ import annotations

from gpunode.checks.crio import files, handlers
from gpunode.checks.model import Check

CHECKS: tuple[Check, ...] = (*handlers.CHECKS, *files.CHECKS)
