"""Properties of a node by name; checks use them to say where they apply."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from gpunode.errors import Unreadable
from gpunode.facts.access_control import selinux_enforcing
from gpunode.facts.driver import module_loaded
from gpunode.facts.node import Node
from gpunode.facts.system import CONTAINER, VM, in_lxc
from gpunode.gpu.library_paths import DRIVER_ROOT

_VGPU_MANAGER = "nvidia_vgpu_vfio"  # NVIDIA's driver for hosts, which has no CUDA
OPERATOR_DRIVER = f"{DRIVER_ROOT}/usr"  # exists only while the GPU operator's driver container runs


class Trait(NamedTuple):
    """`present` and `absent` are texts for a node with the property, and for one without."""

    holds: Callable[[Node], bool]
    present: str
    absent: str


def _operator_driver(node: Node) -> bool:
    """Whether its container runs, or a pod that installs one is on this node."""
    try:
        return node.host.is_dir(OPERATOR_DRIVER) or bool(node.operator.drivers)
    except Unreadable:
        return False


def _vfio_host(node: Node) -> bool:
    return bool(node.gpus) and all(gpu.for_vms for gpu in node.gpus)


def _vm_host(node: Node) -> bool:
    """Such a host, or one whose driver only creates virtual GPUs, without the software for GPU containers."""
    if node.questions.expect_gpus is not None or not node.gpus:
        return False
    if module_loaded(node.host, _VGPU_MANAGER):
        return not node.toolkit.programs
    return _vfio_host(node) and not (node.module or node.module_built or node.dkms or node.toolkit.programs)


def _vgpu_guest(node: Node) -> bool:
    """A virtual GPU has no video BIOS of its own, and only a virtual machine has one."""
    return node.kind == VM and any(gpu.video_bios == "00.00.00.00.00" for gpu in node.driver_gpus)


def _mig(node: Node) -> bool:
    """From NVML, which is queried only if the driver is loaded."""
    if node.module is None or node.nvml.inventory is None:
        return False
    return any(gpu.mig_enabled for gpu in node.nvml.inventory.gpus)


def _coherent(node: Node) -> bool:
    """Grace with its own GPU: the driver names it GH200, GB200, GB300."""
    return any(re.search(r"\bG[HB]\d00\b", gpu.model) for gpu in node.driver_gpus)


TRAITS = {
    "gpu": Trait(lambda node: bool(node.gpus), "the PCI bus has GPUs", "the PCI bus has no GPU"),
    "multi-gpu": Trait(
        lambda node: len(node.gpus) > 1, "this node has several GPUs", "this node doesn't have several GPUs"
    ),
    "coherent-gpu": Trait(
        _coherent, "GPUs share the processor's memory", "no GPU shares the processor's memory"
    ),
    "selinux-enforcing": Trait(
        lambda node: selinux_enforcing(node.host), "SELinux is enforcing", "SELinux is not enforcing"
    ),
    "lxc": Trait(lambda node: in_lxc(node.host), "this is an LXC container", "this is not an LXC container"),
    # a container without an init system, unlike one of LXC or kind: engines that it sees are the host's
    "application-container": Trait(
        lambda node: node.kind == CONTAINER and not node.host.systemd_runs(),
        "this is a container without an engine of its own",
        "this is not a container",
    ),
    "immutable": Trait(
        lambda node: node.distribution.immutable,
        "this distribution doesn't install packages",
        "this distribution installs packages",
    ),
    "driver": Trait(
        lambda node: node.module is not None, "the driver is loaded", "the NVIDIA driver isn't loaded"
    ),
    "operator-driver": Trait(
        _operator_driver, "the GPU operator's container provides the driver", "the driver is the host's own"
    ),
    "nvswitch": Trait(
        lambda node: bool(node.switches), "this node has NVSwitches", "this node has no NVSwitch"
    ),
    "mig": Trait(_mig, "MIG is on", "no GPU has MIG on"),
    "vgpu-guest": Trait(_vgpu_guest, "the GPUs are virtual (vGPU)", "the GPUs are not virtual"),
    "vfio-host": Trait(
        _vfio_host,
        "all GPUs are reserved for virtual machines",
        "the GPUs are not reserved for virtual machines",
    ),
    "vm-host": Trait(_vm_host, "all GPUs are reserved for virtual machines", "this node runs GPU containers"),
    "kubelet": Trait(
        lambda node: node.kubelet is not None and node.kubelet.joined,
        "this is a Kubernetes node",
        "no kubelet on this node has joined a cluster",
    ),
    "docker": Trait(lambda node: node.docker is not None, "Docker is installed", "Docker isn't installed"),
    "containerd": Trait(
        lambda node: node.containerd is not None, "containerd is installed", "containerd isn't installed"
    ),
}
"""By name, as `Check.needs` and `Check.unless` have them."""
