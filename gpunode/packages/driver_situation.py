"""What a node says of itself, gathered for the driver's plan. Reading changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gpunode.errors import Unreadable
from gpunode.facts import driver
from gpunode.facts.driver_targets import repository_lines, run_installed
from gpunode.facts.gpu_users import gpu_users
from gpunode.facts.module_options import ModuleOptions
from gpunode.facts.node import Node
from gpunode.facts.package_locks import module_stream
from gpunode.facts.traits import OPERATOR_DRIVER, TRAITS
from gpunode.facts.vgpu import read_vgpus
from gpunode.packages.driver_model import Situation

_ARM_LOADER = "/lib/ld-linux-aarch64.so.1"
_KERNELS_OWN = ("nouveau", "nova_core")
# device ids of Blackwell's baseboards and superchips: their NVLink is managed over InfiniBand (nvswitch.py)
_NVLINK5 = ("0x29", "0x31")
_OPERATOR_PODS = "nvidia-driver-daemonset"

_Value = TypeVar("_Value")


def read_situation(node: Node) -> Situation:
    """Everything that decides on the driver; what this user may not read is named in `unread`."""
    unread: list[str] = []

    def told(what: str, read: Callable[[], _Value], otherwise: _Value) -> _Value:
        try:
            return read()
        except Unreadable as error:
            unread.append(f"{what}: {error.message}")
            return otherwise

    host, key = node.host, driver.signing_key(node.host)
    nvlink5 = any(gpu.device_id.startswith(_NVLINK5) for gpu in node.gpus)
    arm = host.exists(_ARM_LOADER)
    options = told("modprobe.d", lambda: node.module_options, ModuleOptions((), ()))
    secure, nouveau = bool(node.secure_boot), _kernels_own(node)
    users = gpu_users(node)
    if users.closed:
        unread.append(f"who uses the GPUs: {users.closed} processes are closed to this user")
    return Situation(
        distribution=node.distribution,
        kind=node.kind,
        architecture="sbsa" if arm else "x86_64",
        kernel=node.kernel,
        next_kernel=node.next_kernel,
        gpus=node.gpus,
        version=node.driver_version if _here(node) else "",
        opened=node.module_open,
        loaded=node.module is not None,
        packages=node.packages,
        stream=module_stream(host, "nvidia-driver"),
        repositories=repository_lines(node),
        run_installed=run_installed(node),
        operator_driver=told("the operator's pods", lambda: _operator_driver(node), ""),
        vgpu_guest=TRAITS["vgpu-guest"].holds(node) or bool(told("vGPUs", lambda: read_vgpus(host), None)),
        secure_boot=secure,
        key=key,
        key_enrolled=driver.key_enrolled(host, key) if secure and key else None,
        key_waits=bool(secure and driver.waiting_keys(host)),
        nouveau=nouveau,
        nouveau_kept_out=not nouveau and (bool(options.refused("nouveau")) or not _has_nouveau(node)),
        headers=tuple(one for one in _kernels(node) if driver.has_headers(host, one)),
        debian_own=_debians(node),
        switches=told("NVSwitches", lambda: len(node.switches), 0),
        nvlink5=nvlink5,
        rack=nvlink5 and arm,
        users=users,
        unread=tuple(unread),
    )


def _debians(node: Node) -> bool:
    """Debian's own packages call the module nvidia-current."""
    loaded = node.module is not None and node.module.name == "nvidia_current"
    return loaded or any(name.startswith("nvidia-current") for name in node.host.listdir("/var/lib/dkms"))


def _here(node: Node) -> bool:
    """Whether there is a driver at all: modinfo may still answer for a module that no kernel has."""
    return node.module is not None or node.module_built or bool(node.dkms)


def _kernels(node: Node) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, (node.kernel, node.next_kernel))))


def _operator_driver(node: Node) -> str:
    """What the GPU operator's driver container has left here; empty if nothing."""
    from gpunode.facts.gpu_operator import find_operator

    if TRAITS["operator-driver"].holds(node):
        return OPERATOR_DRIVER
    return next((pod for pod in find_operator(node.host).pods if _OPERATOR_PODS in pod), "")


def _kernels_own(node: Node) -> tuple[str, ...]:
    """nouveau and nova: each GPU that they hold, or their being loaded while nvidia isn't."""
    held = tuple(
        f"{gpu.driver} owns {gpu.address}"
        for gpu in node.gpus
        if (gpu.driver or "").lower().startswith(("nouveau", "nova"))
    )
    if held or node.module is not None:
        return held
    return tuple(f"{name} is loaded" for name in _KERNELS_OWN if driver.module_loaded(node.host, name))


def _has_nouveau(node: Node) -> bool:
    return any(driver.has_module_file(node.host, one, "nouveau") for one in _kernels(node))
