"""The kernel module and its userspace libraries."""

from __future__ import annotations

from gpunode.checks.driver import libraries, module
from gpunode.checks.model import Check

CHECKS: tuple[Check, ...] = (*module.CHECKS, *libraries.CHECKS)
