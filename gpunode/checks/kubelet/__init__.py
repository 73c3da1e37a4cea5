"""The kubelet, Kubernetes distributions, device plugins, the GPU operator."""

from __future__ import annotations

from gpunode.checks.kubelet import daemon
from gpunode.checks.model import Check

CHECKS: tuple[Check, ...] = (*daemon.CHECKS,)
