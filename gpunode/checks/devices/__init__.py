"""Device files, unified memory, persistence."""

from __future__ import annotations

from gpunode.checks.devices import access, containers, nodes, persistence
from gpunode.checks.model import Check

CHECKS: tuple[Check, ...] = (*nodes.CHECKS, *access.CHECKS, *containers.CHECKS, *persistence.CHECKS)
