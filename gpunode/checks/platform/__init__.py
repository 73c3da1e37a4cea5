"""The operating system around the GPUs: SELinux, WSL, Jetson, clocks, disks."""

from __future__ import annotations

from gpunode.checks.model import Check

CHECKS: tuple[Check, ...] = ()
