"""The driver against the GPUs that it is to drive: its branch, and the kind of its kernel module."""

from __future__ import annotations

from gpunode.checks import fixes
from gpunode.checks.driver import packages, remedies, targets
from gpunode.checks.driver.logged import failures, logged
from gpunode.checks.model import (
    ANY_ENGINE,
    HOST_OR_CONTAINER,
    Check,
    Verdict,
    fail,
    note,
    ok,
    seen,
    skip,
    warn,
)
from gpunode.facts import driver, gpu_support
from gpunode.facts.kernel_log import UNSUPPORTED
from gpunode.facts.node import Node
from gpunode.facts.packages import Package
from gpunode.facts.pci import PciGpu
from gpunode.result import Evidence, Fix

MINIMUM = (384, 81)


def driver_too_old(node: Node) -> Verdict:
    version = node.driver_version
    numbers = driver.version_numbers(version)
    if not numbers:
        return skip("the module doesn't tell its version")
    evidence = _version(node)
    if node.module is not None and numbers < MINIMUM:
        return fail(f"driver {version} is older than 384.81", evidence, fix=packages.install_driver(node))
    found = _judge(node, gpu_support.TOO_NEW, "a driver of branch {0.min} or newer")
    return found or ok(f"driver {version} is new enough", evidence)


def gpu_arch_dropped(node: Node) -> Verdict:
    if not node.driver_version:
        return skip("the module doesn't tell its version")
    found = _judge(node, gpu_support.DROPPED, "a driver of branch {0.max} or older")
    if found is not None:
        return found
    rows = (gpu_support.supports(gpu.device_id) for gpu in node.gpus if _could_have(node, gpu))
    last = next((row for row in rows if row and row.max), None)
    if last is None:
        return ok("no GPU here is left behind by newer drivers")
    followed = node.packages.installed.get("cuda-drivers")
    if followed is None or _stays(node, followed):
        return ok(f"the driver stays within branch {last.max}, which a GPU here ({last.name}) needs")
    return warn(
        f"the next upgrade of cuda-drivers leaves branch {last.max}, the last for a GPU here ({last.name})",
        seen("package database", f"cuda-drivers {followed.version}, which follows the newest branch"),
        fix=remedies.HOLD_BRANCH.for_family(node.distribution.family),
    )


def _could_have(node: Node, gpu: PciGpu) -> bool:
    """Whether this driver has the GPU, or takes it once it is loaded."""
    return gpu.driver in ("nvidia", None) and gpu.address not in _refused(node)


def _stays(node: Node, package: Package) -> bool:
    """Whether something keeps this package, or the driver below it, within its branch."""
    from gpunode.facts.package_locks import locked, module_stream

    if package.held or module_stream(node.host, "nvidia-driver")[:1].isdigit():
        return True
    return locked(node.host, node.distribution.family, package.name, "nvidia-driver")


def kmod_flavour(node: Node) -> Verdict:
    if node.module_open is None:
        return skip("neither the module nor modinfo tells whether it is the open one")
    kind = "open" if node.module_open else "proprietary"
    found = _judge(node, gpu_support.FLAVOUR, "the {0.module} kernel module")
    return found or ok(f"the {kind} kernel module drives these GPUs")


def _judge(node: Node, reason: str, needs: str) -> Verdict | None:
    """The GPUs that are left without a driver for this reason: an error if no other GPU has one, and no fault
    where they are old cards for a screen, or where the others would lose theirs for them."""
    found = [one for one in node.unsuited_gpus if one.reason == reason]
    if not found:
        return None
    first = found[0]
    count = f"{len(found)} of {len(node.gpus)} GPUs" if len(node.gpus) > 1 else "the GPU"
    verb = "need" if len(found) > 1 else "needs"
    what = needs.format(first.supports)
    evidence = [
        seen(f"/sys/bus/pci/devices/{one.gpu.address}/device", f"{one.gpu.device_id} ({one.supports.name})")
        for one in found
    ]
    flavour = {True: ", open", False: ", proprietary", None: ""}[node.module_open]
    lines = (*logged(node, UNSUPPORTED)[:1], *failures(node, *(one.gpu.address for one in found)))
    evidence += [_version(node, flavour), *dict.fromkeys(lines)]
    summary = f"{count} {verb} {what}"
    driven = any(gpu.driver == "nvidia" and gpu.address not in _refused(node) for gpu in node.gpus)
    if driven and all(one.supports.max and one.gpu.display for one in found):
        return note(f"{summary}, which only matters if it is to compute", *evidence)
    if driven and not targets.spares(node, first.supports):
        moved = Fix(f"lspci -nnks {first.gpu.address}", needs_root=False)
        return warn(f"{summary}, which doesn't drive the others: no driver drives all", *evidence, fix=moved)
    return (warn if driven else fail)(summary, *evidence, fix=packages.install_driver(node))


def _refused(node: Node) -> frozenset[str]:
    return frozenset(one.gpu.address for one in node.unsuited_gpus)


def _version(node: Node, flavour: str = "") -> Evidence:
    if node.module is not None:
        return seen(f"/sys/module/{node.module.name}/version", f"{node.driver_version}{flavour}")
    return seen("modinfo -F version nvidia", f"{node.driver_version}{flavour}")


def driver_eol(node: Node) -> Verdict:
    number = gpu_support.branch(node.driver_version)
    if not number:
        return skip("the module doesn't tell its version")
    bulletin = gpu_support.ended(number)
    if bulletin is None:
        return ok(f"branch {number} still gets fixes", _version(node))
    last = targets.last_branch(node)
    if last and last <= number:
        summary = f"driver branch {number} gets no more fixes, and is the last for GPUs like these"
        return note(summary, _version(node))
    kept = ", ".join(str(one) for one in bulletin.branches)
    return warn(
        f"driver branch {number} gets no more security fixes",
        _version(node),
        seen(
            f"NVIDIA's security bulletin {bulletin.number} of {bulletin.published}", f"fixes branches {kept}"
        ),
        fix=packages.install_driver(node),
    )


CHECKS = (
    Check(
        id="driver-too-old",
        title="The driver is new enough",
        layer="driver",
        severity="error",
        looks_at=(
            "/sys/module/nvidia/version; 384.81 is the least, and GPUs that nobody drives may need a newer "
            "branch."
        ),
        why=(
            "CUDA 9, the container toolkit and device plugins need at least driver 384.81, and a driver "
            "knows no GPU that is newer than itself."
        ),
        remedy=fixes.UPGRADE_DRIVER,
        run=driver_too_old,
        blocked_by=("driver-not-installed", "nouveau-loaded"),
        classes=HOST_OR_CONTAINER,
        refs=("https://github.com/NVIDIA/k8s-device-plugin#prerequisites",),
        preflight=ANY_ENGINE,
        table=gpu_support.TABLE,
    ),
    Check(
        id="gpu-arch-dropped",
        title="The driver still knows these GPUs",
        layer="driver",
        severity="error",
        looks_at=(
            "PCI device ids of GPUs that nobody drives against the driver's branch; for GPUs whose last "
            "branch is known, whether the package cuda-drivers would leave it."
        ),
        why=(
            "Branch 580 is the last for Maxwell, Pascal and Volta. A newer driver loads and doesn't take "
            "them: No devices were found."
        ),
        remedy=remedies.HOLD_BRANCH,
        run=gpu_arch_dropped,
        blocked_by=("driver-not-installed", "nouveau-loaded"),
        unless=("operator-driver", "vfio-host"),
        preflight=ANY_ENGINE,
        table=gpu_support.TABLE,
        refs=("https://www.nvidia.com/en-us/drivers/unix/legacy-gpu/",),
    ),
    Check(
        id="kmod-flavour",
        title="Open or proprietary: the module fits the GPUs",
        layer="driver",
        severity="error",
        looks_at=(
            "PCI device ids of GPUs that nobody drives, and whether the module is the open one: "
            "/proc/driver/nvidia/version, or its license where it isn't loaded."
        ),
        why=(
            "GPUs before Turing are driven by the proprietary module alone, Blackwell and Grace Hopper by "
            "the open one alone. The other module doesn't take them: No devices were found, with a card "
            "that lspci shows."
        ),
        remedy=fixes.INSTALL_DRIVER,
        run=kmod_flavour,
        blocked_by=("driver-not-installed", "nouveau-loaded"),
        unless=("operator-driver", "vfio-host"),
        preflight=ANY_ENGINE,
        refs=("https://github.com/NVIDIA/open-gpu-kernel-modules/issues/862",),
        table=gpu_support.TABLE,
    ),
    Check(
        id="driver-eol",
        title="The driver's branch still gets fixes",
        layer="driver",
        severity="warning",
        looks_at="the driver's branch against those that NVIDIA's last security bulletin has a fix for.",
        why=(
            "NVIDIA fixes a few branches and no others. What is found from now on in this one stays: plan "
            "the change to a branch that is kept for the next maintenance window."
        ),
        remedy=fixes.UPGRADE_DRIVER,
        run=driver_eol,
        blocked_by=("module-not-loaded", "driver-too-old"),
        unless=("operator-driver", "vgpu-guest"),
        refs=("https://github.com/NVIDIA/product-security",),
        table="driver_cves",
    ),
)
