"""The nouns of MIG: layouts, instances, profiles, places. The GPUs' reader makes them, and has them."""

from __future__ import annotations

from gpunode.gpu.mig_model import (
    ComputeInstance,
    ComputeProfile,
    GpuInstance,
    GpuLayout,
    Layouts,
    Placement,
    Profile,
    device_name,
    inferred_compute,
)

__all__ = [
    "ComputeInstance",
    "ComputeProfile",
    "GpuInstance",
    "GpuLayout",
    "Layouts",
    "Placement",
    "Profile",
    "device_name",
    "inferred_compute",
]
