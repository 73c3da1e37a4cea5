"""Device files: there, with the numbers that the kernel uses now, and unified memory among them."""

from __future__ import annotations

from gpunode.checks import fixes
from gpunode.checks.model import ANY_ENGINE, HOST, HOST_OR_CONTAINER, Check, Verdict, fail, ok, seen, skip
from gpunode.facts.devices import expected_major, mig_capability_nodes
from gpunode.facts.driver import module_loaded
from gpunode.facts.node import Node
from gpunode.facts.system import CONTAINER
from gpunode.facts.traits import OPERATOR_DRIVER, TRAITS
from gpunode.gpu.library_paths import DRIVER_ROOT
from gpunode.result import Fix

_OPERATOR_DEV = f"{DRIVER_ROOT}/dev"  # a driver container keeps its device files where it is mounted
_GONE = "the GPU operator's driver container, which has the device files, is not running"
_SHOWN = 6
_CONTROL_MINOR = 255  # NV_CONTROL_DEVICE_MINOR in the driver's nv.h: /dev/nvidiactl
_UVM = ("nvidia_uvm", "nvidia_current_uvm")  # the second is Debian's


def dev_nodes_missing(node: Node) -> Verdict:
    there = {device.path for device in node.device_nodes}
    # a GPU that the driver was told to leave alone is listed with a number and needs no file
    minors = [gpu.minor for gpu in node.driver_gpus if gpu.minor is not None and not gpu.excluded]
    wanted = ["/dev/nvidiactl", *(f"/dev/nvidia{minor}" for minor in sorted(minors))]
    missing = [path for path in wanted if path not in there]
    if missing and any(node.host.devices(_OPERATOR_DEV)):
        return skip(f"the device files are the GPU operator's, in {_OPERATOR_DEV}")
    if missing and _container_is_gone(node):
        return skip(_GONE)
    if missing:
        return fail(
            f"{len(missing)} of {len(wanted)} device files are missing",
            *(seen(path, "absent") for path in missing),
            fix=fixes.make_nodes(tuple(_minor(path) for path in missing)),
        )
    return ok(f"/dev/nvidiactl and {len(minors)} GPU device files are there")


def _container_is_gone(node: Node) -> bool:
    return TRAITS["operator-driver"].holds(node) and not node.host.is_dir(OPERATOR_DRIVER)


def mig_caps_missing(node: Node) -> Verdict:
    wanted = mig_capability_nodes(node.host)
    if not wanted:
        return skip("the driver has no MIG instance")
    there = {device.path for device in node.device_nodes}
    operators = node.host.devices(f"{_OPERATOR_DEV}/nvidia-caps")
    there |= {device.path.removeprefix(DRIVER_ROOT) for device in operators}
    missing = [path for path in wanted if path not in there]
    if missing:
        return fail(
            f"{len(missing)} of {len(wanted)} device files of MIG instances are missing",
            *(seen(path, "absent") for path in missing[:_SHOWN]),
        )
    return ok(f"the {len(wanted)} device files of the MIG instances are there")


def _minor(path: str) -> int:
    number = path.removeprefix("/dev/nvidia")
    return int(number) if number.isdigit() else _CONTROL_MINOR


def dev_node_major_stale(node: Node) -> Verdict:
    stale = []
    for device in node.device_nodes:
        expected = expected_major(device.path, node.majors)
        if expected is not None and device.major != expected:
            stale.append((device, expected))
    if not stale:
        return ok("device files have the kernel's major numbers")
    evidence = (seen(device.path, f"major {device.major}, the kernel uses {now}") for device, now in stale)
    paths = " ".join(device.path for device, _ in stale)
    return fail(
        f"{len(stale)} device files have a major number that the kernel doesn't use",
        *evidence,
        fix=Fix(f"rm {paths} && nvidia-modprobe -c0 -u"),
    )


def uvm_not_loaded(node: Node) -> Verdict:
    if not any(module_loaded(node.host, name) for name in _UVM):
        return fail("the module nvidia-uvm isn't loaded", seen("/sys/module/nvidia_uvm", "absent"))
    if any(device.path == f"{_OPERATOR_DEV}/nvidia-uvm" for device in node.host.devices(_OPERATOR_DEV)):
        return ok("nvidia-uvm is loaded and has its device file", seen(_OPERATOR_DEV, "nvidia-uvm"))
    if _container_is_gone(node):
        return skip(_GONE)
    if node.kind != CONTAINER and all(device.path != "/dev/nvidia-uvm" for device in node.device_nodes):
        return fail("nvidia-uvm is loaded but /dev/nvidia-uvm is missing", seen("/dev/nvidia-uvm", "absent"))
    return ok("nvidia-uvm is loaded and has its device file")


CHECKS = (
    Check(
        id="dev-nodes-missing",
        title="The device files exist",
        layer="devices",
        severity="error",
        looks_at=(
            "/dev/nvidiactl, and /dev/nvidiaN for each Device Minor in "
            "/proc/driver/nvidia/gpus/*/information."
        ),
        why=(
            "The kernel doesn't make these files: the first root process that uses a GPU does. Containers "
            "that start before it fail, which is why the first GPU pod after a boot may fail and later ones "
            "work."
        ),
        remedy=fixes.MAKE_NODES,
        run=dev_nodes_missing,
        blocked_by=("module-not-loaded",),
        classes=HOST,
        refs=("https://github.com/NVIDIA/nvidia-modprobe",),
    ),
    Check(
        id="mig-caps-missing",
        title="The device files of MIG instances exist",
        layer="devices",
        severity="error",
        looks_at=(
            "/dev/nvidia-caps/nvidia-capN for each DeviceFileMinor below "
            "/proc/driver/nvidia/capabilities/gpu*/mig."
        ),
        why=(
            "A program opens a MIG device through these files. Without them a container with a MIG device "
            "doesn't start, or finds no GPU."
        ),
        remedy=fixes.everywhere("nvidia-smi -L"),
        run=mig_caps_missing,
        blocked_by=("module-not-loaded", "dev-nodes-missing"),
        preflight=ANY_ENGINE,
        refs=("https://docs.nvidia.com/datacenter/tesla/mig-user-guide/device-nodes-and-capabilities.html",),
    ),
    Check(
        id="dev-node-major-stale",
        title="Device files have the right numbers",
        layer="devices",
        severity="error",
        looks_at="the major number of every /dev/nvidia* and /dev/nvidia-caps/* against /proc/devices.",
        why=(
            "Majors of nvidia-uvm and nvidia-caps change from boot to boot. A file left over with the old "
            "number leads to another driver or to none: CUDA fails with error 999 or 100 although the file "
            "is there."
        ),
        remedy=fixes.MAKE_NODES,
        run=dev_node_major_stale,
        blocked_by=("module-not-loaded",),
        classes=HOST_OR_CONTAINER,
        refs=("https://github.com/NVIDIA/nvidia-container-toolkit/issues/1934",),
    ),
    Check(
        id="uvm-not-loaded",
        title="Unified memory is loaded",
        layer="devices",
        severity="error",
        looks_at="/sys/module/nvidia_uvm and /dev/nvidia-uvm.",
        why=(
            "CUDA needs nvidia-uvm, nvidia-smi doesn't: the GPUs look healthy and every CUDA program fails "
            "with error 999. It is loaded on demand by a root process, which a container's process is not."
        ),
        remedy=fixes.LOAD_UVM,
        run=uvm_not_loaded,
        blocked_by=("module-not-loaded", "dev-nodes-missing"),
        classes=HOST_OR_CONTAINER,
        refs=("https://github.com/NVIDIA/open-gpu-kernel-modules/issues/689",),
    ),
)
