"""The kubelet, Kubernetes distributions, device plugins, the GPU operator."""

from __future__ import annotations

from gpunode.checks.kubelet import (
    daemon,
    operator,
    others,
    plugin,
    plugin_settings,
    pods,
    rancher,
    resources,
)
from gpunode.checks.model import Check

CHECKS: tuple[Check, ...] = (
    *daemon.CHECKS,
    *rancher.CHECKS,
    *others.CHECKS,
    *operator.CHECKS,
    *plugin_settings.CHECKS,
    *plugin.CHECKS,
    *pods.CHECKS,
    *resources.CHECKS,
)
