"""What is on the PCI bus, and who owns it."""

from __future__ import annotations

from gpunode.checks import fixes
from gpunode.checks.driver.logged import failures
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
from gpunode.facts import pcie
from gpunode.facts.node import Node
from gpunode.facts.pci import DEVICES, PciGpu, lone_audio
from gpunode.facts.traits import TRAITS
from gpunode.result import Evidence, Fix

_NVIDIA = "nvidia"


def pci_no_gpu(node: Node) -> Verdict:
    if node.gpus:
        drivers = ", ".join(sorted({gpu.driver or "nobody" for gpu in node.gpus}))
        return ok(f"{count(len(node.gpus))} on the PCI bus", seen(DEVICES, f"driver: {drivers}"))
    functions = node.host.listdir(DEVICES)
    evidence = [
        seen(DEVICES, f"{len(functions)} functions, none with vendor 0x10de and class 0x0300 or 0x0302")
    ]
    if node.questions.expect_gpus == 0:
        return note("no NVIDIA GPU, and none is meant to be here", *evidence)
    evidence += [seen(f"{DEVICES}/{address}", "a GPU's audio function") for address in lone_audio(node.host)]
    return fail("no NVIDIA GPU on the PCI bus", *evidence)


def pci_gpu_count_mismatch(node: Node) -> Verdict:
    expected, there = node.questions.expect_gpus, len(node.gpus)
    if expected is not None and there != expected:
        log = fixes.RESCAN_PCI if there < expected else fixes.everywhere("lspci -nnk -d 10de:")
        return warn(
            f"{count(there)} on the PCI bus, {expected} expected",
            *owners(node.gpus),
            fix=log.for_family(node.distribution.family),
        )
    left_out = {gpu.address for gpu in node.driver_gpus if gpu.excluded}
    ours = {gpu.address for gpu in node.gpus if gpu.driver == _NVIDIA} - left_out
    if node.module is None or node.nvml.inventory is None:
        return ok(f"{count(there)} on the PCI bus") if expected is not None else skip("NVML tells no number")
    listed = {_short(gpu.pci) for gpu in node.nvml.inventory.gpus}
    missing = sorted(address for address in ours if _short(address) not in listed)
    if missing and len(listed) < len(ours):
        judge = warn if listed else fail  # without any GPU no container can have one
        return judge(
            f"NVML lists {len(listed)} of the {count(len(ours))} that the driver owns",
            *(seen(f"{DEVICES}/{address}", "owned by nvidia, not listed by NVML") for address in missing),
            *failures(node, *missing),
            fix=Fix(f"dmesg | grep -i -e {' -e '.join(missing)} -e RmInitAdapter"),
        )
    return ok(f"bus and NVML agree on {count(len(ours))}")


def _short(address: str) -> str:
    """NVML writes domains with eight digits, sysfs with four."""
    domain, _, rest = address.lower().partition(":")
    return f"{domain.lstrip('0') or '0'}:{rest}"


def gpu_bound_other_driver(node: Node) -> Verdict:
    others = tuple(
        gpu for gpu in node.gpus if gpu.driver not in (_NVIDIA, "nouveau", None) and not is_nova(gpu)
    )
    orphans = _orphans(node)
    ours = sum(gpu.driver == _NVIDIA for gpu in node.gpus)
    if not others and not orphans:
        return ok("no foreign driver owns a GPU")
    if ours and all(gpu.for_vms for gpu in (*others, *orphans)):
        return ok(f"{of(others, node)} kept for virtual machines", *owners(others))
    if TRAITS["vm-host"].holds(node):
        return note("every GPU is kept for virtual machines", *owners(others))
    names = ", ".join(sorted({gpu.driver or "no driver" for gpu in (*others, *orphans)}))
    if not others:
        summary = f"the driver is loaded, but has not taken {of(orphans, node)}"
        evidence = (*owners(orphans), *failures(node, *(gpu.address for gpu in orphans)))
        return (warn if ours else fail)(summary, *evidence, fix=fixes.READ_KERNEL_LOG.other)
    bound = node.module_options.option("vfio_pci", "ids") if "vfio-pci" in names else None
    held = [*owners((*others, *orphans))]
    held += [seen(bound.source, f"vfio-pci ids={bound.value}", bound.line)] if bound else []
    fix = fixes.rebind(*(gpu.address for gpu in others)).for_family(node.distribution.family)
    summary = f"{of((*others, *orphans), node)} held by {names}, not by nvidia"
    return (warn if ours else fail)(summary, *held, fix=fix)


def _orphans(node: Node) -> tuple[PciGpu, ...]:
    """GPUs that nobody took, which is normal until the driver is loaded. One that this driver isn't made for,
    or that has no address window, is a finding of its own."""
    if node.module is None:
        return ()
    unsuited = {one.gpu.address for one in node.unsuited_gpus}
    free = (gpu for gpu in node.gpus if gpu.driver is None and gpu.address not in unsuited)
    return tuple(gpu for gpu in free if not pcie.without_window(node.host, gpu.address))


def count(number: int) -> str:
    return "1 GPU" if number == 1 else f"{number} GPUs"


def of(gpus: tuple[PciGpu, ...], node: Node) -> str:
    return f"{len(gpus)} of {count(len(node.gpus))}"


def is_nova(gpu: PciGpu) -> bool:
    """The kernel's Rust driver; its name was NovaCore for a while."""
    return (gpu.driver or "").lower().startswith("nova")


def owners(gpus: tuple[PciGpu, ...]) -> tuple[Evidence, ...]:
    return tuple(
        seen(f"{DEVICES}/{gpu.address}/driver", gpu.driver or "no link: nobody owns it") for gpu in gpus
    )


CHECKS = (
    Check(
        id="pci-no-gpu",
        title="An NVIDIA GPU is on the PCI bus",
        layer="hardware",
        severity="error",
        looks_at="vendor (0x10de) and class (0x0300 VGA, 0x0302 3D) of everything in /sys/bus/pci/devices.",
        why=(
            "A GPU that the bus doesn't show can't be reached by any driver: it is absent, unpowered, badly "
            "seated, switched off in the firmware, or not passed through to this virtual machine. Of a node "
            "that is to have none, --expect-gpus 0 says so."
        ),
        remedy=fixes.RESCAN_PCI,
        run=pci_no_gpu,
        preflight=ANY_ENGINE,
        classes=HOST_OR_CONTAINER,
        refs=("https://docs.nvidia.com/deploy/gpu-debug-guidelines/",),
    ),
    Check(
        id="pci-gpu-count-mismatch",
        title="Every GPU is listed",
        layer="hardware",
        severity="error",
        looks_at=(
            "the GPUs in /sys/bus/pci/devices against --expect-gpus, and those that nvidia owns against what "
            "NVML lists, with the driver's failures for the others in the kernel's log. An error if NVML "
            "lists none."
        ),
        why=(
            "A GPU that the bus or NVML doesn't list is handed to no container: the node offers fewer GPUs "
            "than it has. A GPU that failed to start often needs the power to be off for a moment, which a "
            "warm reboot doesn't do."
        ),
        remedy=fixes.READ_KERNEL_LOG,
        run=pci_gpu_count_mismatch,
        blocked_by=("pci-no-gpu", "nvml-hang", "vgpu-driver-mismatch", "kmod-flavour"),
        refs=("https://docs.nvidia.com/deploy/gpu-debug-guidelines/",),
    ),
    Check(
        id="gpu-bound-other-driver",
        title="No foreign driver owns the GPUs",
        layer="hardware",
        severity="error",
        looks_at=(
            "the driver link of every GPU in /sys/bus/pci/devices; nouveau and nova have their own checks. "
            "GPUs that vfio-pci keeps for virtual machines beside others that nvidia owns are fine, and a "
            "host that keeps all of them and has neither driver nor toolkit is a note."
        ),
        why=(
            "One driver at a time owns a PCI function. While vfio-pci or another driver holds it, "
            "nvidia.ko can't use it and NVML doesn't list it."
        ),
        # the check knows the addresses and says how to rebind them; a made-up one may be a disk's
        remedy=fixes.everywhere("gpunode doctor gpu-bound-other-driver"),
        run=gpu_bound_other_driver,
        blocked_by=("pci-no-gpu", "bar-too-small", "nova-core-loaded"),
        preflight=ANY_ENGINE,
        classes=HOST_OR_CONTAINER,
        refs=("https://docs.kernel.org/driver-api/vfio.html",),
    ),
)
