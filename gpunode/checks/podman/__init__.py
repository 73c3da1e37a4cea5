"""podman."""

from __future__ import annotations

from gpunode.checks.model import Check
from gpunode.checks.podman import devices

CHECKS: tuple[Check, ...] = devices.CHECKS
