"""The kernel module and its userspace libraries."""

from __future__ import annotations

from gpunode.checks.driver import (
    build,
    libraries,
    module,
    next_boot,
    signature,
    support,
    upgrades,
    versions,
)
from gpunode.checks.model import Check

CHECKS: tuple[Check, ...] = (
    *build.CHECKS,
    *signature.CHECKS,
    *support.CHECKS,
    *module.CHECKS,
    *versions.CHECKS,
    *libraries.CHECKS,
    *upgrades.CHECKS,
    *next_boot.CHECKS,
)
