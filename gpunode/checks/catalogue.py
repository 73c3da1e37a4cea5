"""All checks, in the order of the report: from the PCI bus to the device plugin."""

from __future__ import annotations

from difflib import get_close_matches

from gpunode.checks import (
    cdi,
    containerd,
    containerd_imports,
    crio,
    cuda,
    device_plugin,
    devices,
    docker,
    docker_variants,
    driver_libraries,
    driver_packages,
    fabric,
    gpu_operator,
    hardware,
    health,
    kernel_module,
    kubelet,
    kubernetes_distributions,
    mig,
    pcie,
    platform,
    podman,
    security,
    toolkit,
    toolkit_config,
    xids,
)
from gpunode.checks.model import LAYERS, Check
from gpunode.errors import UsageError

_IN_ORDER = (
    # The PCI bus and the drivers that control its devices.
    *hardware.BUS_CHECKS,
    *hardware.NOUVEAU_CHECKS,
    *pcie.CHECKS,
    *hardware.MEMORY_CHECKS,
    # The kernel module and its userspace libraries.
    *kernel_module.BUILD_CHECKS,
    *kernel_module.SIGNATURE_CHECKS,
    *driver_libraries.SUPPORT_CHECKS,
    *kernel_module.MODULE_CHECKS,
    *driver_libraries.VERSIONS_CHECKS,
    *driver_libraries.LIBRARIES_CHECKS,
    *driver_packages.CHECKS,
    *kernel_module.NEXT_BOOT_CHECKS,
    # Device files, unified memory, persistence.
    *devices.NODES_CHECKS,
    *devices.ACCESS_CHECKS,
    *devices.CONTAINERS_CHECKS,
    *devices.PERSISTENCE_CHECKS,
    # Condition of the GPUs as they and the kernel report it.
    *health.LOST_CHECKS,
    *health.MEMORY_CHECKS,
    *xids.CHECKS,
    *health.SPEED_CHECKS,
    *health.USE_CHECKS,
    # NVSwitch fabrics, MIG layouts, vGPU, confidential computing, GPUDirect.
    *fabric.SWITCHES_CHECKS,
    *mig.CHECKS,
    *mig.MIG_PLUGINS_CHECKS,
    *fabric.VIRTUAL_CHECKS,
    *fabric.RDMA_CHECKS,
    # The NVIDIA Container Toolkit.
    *toolkit.INSTALLED_CHECKS,
    *toolkit.RELEASES_CHECKS,
    *toolkit_config.CHECKS,
    *toolkit.CALLS_CHECKS,
    # CDI specifications.
    *cdi.SUPPLY_CHECKS,
    *cdi.SPECS_CHECKS,
    *cdi.CONTENTS_CHECKS,
    *cdi.REBOOT_CHECKS,
    # Docker: its file, its daemon, its runtimes.
    *docker_variants.CHECKS,
    *docker.SETTINGS_CHECKS,
    *docker.FILE_CHECKS,
    *docker.DAEMON_CHECKS,
    *docker.PROBE_CHECKS,
    # containerd: its file, its daemon, its handlers and what it imports.
    *containerd.DAEMON_CHECKS,
    *containerd_imports.CHECKS,
    *containerd.HANDLERS_CHECKS,
    *containerd.BESIDE_CHECKS,
    # CRI-O: its handlers and their programs, its files, its hooks.
    *crio.HANDLERS_CHECKS,
    *crio.FILES_CHECKS,
    # podman.
    *podman.CHECKS,
    # The kubelet, Kubernetes distributions, device plugins, the GPU operator.
    *kubelet.DAEMON_CHECKS,
    *kubernetes_distributions.RANCHER_CHECKS,
    *kubernetes_distributions.OTHERS_CHECKS,
    *gpu_operator.CHECKS,
    *device_plugin.PLUGIN_SETTINGS_CHECKS,
    *device_plugin.PLUGIN_CHECKS,
    *kubelet.PODS_CHECKS,
    *kubelet.RESOURCES_CHECKS,
    # CUDA releases and images against the driver and its GPUs.
    *cuda.RELEASES_CHECKS,
    *cuda.IMAGES_CHECKS,
    *cuda.RUNNING_CHECKS,
    # The operating system around the GPUs: SELinux, WSL, Jetson, clocks, disks.
    *platform.SYSTEM_CHECKS,
    *platform.SPECIAL_CHECKS,
    # Known vulnerabilities and unprotected access.
    *security.HOLES_CHECKS,
    *security.DOORS_CHECKS,
)
# a module may contain checks of a neighbouring layer
ALL_CHECKS: tuple[Check, ...] = tuple(sorted(_IN_ORDER, key=lambda check: LAYERS.index(check.layer)))
BY_ID = {check.id: check for check in ALL_CHECKS}


def find_check(identifier: str) -> Check:
    """Return the check with this id; `UsageError` suggests similar ids."""
    check = BY_ID.get(identifier)
    if check is None:
        longer = [known for known in BY_ID if identifier and known.startswith(identifier)]
        near = (longer or get_close_matches(identifier, BY_ID, n=3, cutoff=0.4))[:3]
        hint = f"did you mean {' or '.join(near)}?" if near else "run gpunode explain to list all checks"
        raise UsageError(f"unknown check {identifier!r}", hint=hint)
    return check
