"""What is on the PCI bus, and who owns it."""

from __future__ import annotations

from gpunode.checks import fixes
from gpunode.checks.model import HOST, HOST_OR_CONTAINER, Check, Verdict, fail, ok, seen, skip, warn
from gpunode.facts.driver import module_loaded
from gpunode.facts.node import Node
from gpunode.facts.pci import DEVICES, PciGpu
from gpunode.result import Evidence

_NVIDIA = "nvidia"
_FOR_VMS = "vfio-pci"


def pci_no_gpu(node: Node) -> Verdict:
    if node.gpus:
        owners = sorted({gpu.driver or "nobody" for gpu in node.gpus})
        return ok(f"{_count(len(node.gpus))} on the PCI bus", seen(DEVICES, f"driver: {', '.join(owners)}"))
    functions = node.host.listdir(DEVICES)
    return fail(
        "no NVIDIA GPU on the PCI bus",
        seen(DEVICES, f"{len(functions)} functions, none with vendor 0x10de and class 0x0300 or 0x0302"),
    )


def gpu_bound_other_driver(node: Node) -> Verdict:
    others = tuple(gpu for gpu in node.gpus if gpu.driver not in (_NVIDIA, "nouveau", None))
    # a display function without an owner is normal until the driver is loaded
    orphans = tuple(gpu for gpu in node.gpus if gpu.driver is None) if node.module else ()
    ours = sum(gpu.driver == _NVIDIA for gpu in node.gpus)
    if not others and not orphans:
        return ok("no foreign driver owns a GPU")
    if ours and all(gpu.driver == _FOR_VMS for gpu in (*others, *orphans)):
        return ok(f"{_of(others, node)} kept for virtual machines", *_owners(others))
    names = ", ".join(sorted({gpu.driver or "no driver" for gpu in (*others, *orphans)}))
    summary = f"{_of((*others, *orphans), node)} held by {names}, not by nvidia"
    if not others:
        log = fixes.READ_KERNEL_LOG.other
        summary = f"the driver is loaded, but has not taken {_of(orphans, node)}"
        return (warn if ours else fail)(summary, *_owners(orphans), fix=log)
    nova = any((gpu.driver or "").lower().startswith("nova") for gpu in others)
    remedy = fixes.BLACKLIST_NOVA if nova else fixes.rebind(*(gpu.address for gpu in others))
    fix = remedy.for_family(node.distribution.family)
    return (warn if ours else fail)(summary, *_owners((*others, *orphans)), fix=fix)


def nouveau_loaded(node: Node) -> Verdict:
    held = tuple(gpu for gpu in node.gpus if gpu.driver == "nouveau")
    ours = any(gpu.driver == _NVIDIA for gpu in node.gpus)
    if held:
        summary = f"nouveau owns {_of(held, node)}"
        return (warn if ours else fail)(summary, *_owners(held))
    if module_loaded(node.host, "nouveau") and node.module is None:
        return warn("nouveau is loaded and nvidia is not", seen("/sys/module/nouveau", "loaded"))
    if not node.gpus:
        return skip("there is no GPU that nouveau could take")
    return ok("nouveau owns no GPU")


def _count(number: int) -> str:
    return "1 GPU" if number == 1 else f"{number} GPUs"


def _of(gpus: tuple[PciGpu, ...], node: Node) -> str:
    return f"{len(gpus)} of {_count(len(node.gpus))}"


def _owners(gpus: tuple[PciGpu, ...]) -> tuple[Evidence, ...]:
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
            "seated, switched off in the firmware, or not passed through to this virtual machine."
        ),
        remedy=fixes.RESCAN_PCI,
        run=pci_no_gpu,
        classes=HOST_OR_CONTAINER,
    ),
    Check(
        id="gpu-bound-other-driver",
        title="No foreign driver owns the GPUs",
        layer="hardware",
        severity="error",
        looks_at=(
            "the driver link of every GPU in /sys/bus/pci/devices; nouveau has its own check. GPUs that "
            "vfio-pci keeps for virtual machines beside others that nvidia owns are fine."
        ),
        why=(
            "One driver at a time owns a PCI function. While vfio-pci, nova or another driver holds it, "
            "nvidia.ko can't use it and NVML doesn't list it."
        ),
        remedy=fixes.rebind("0000:3b:00.0"),
        run=gpu_bound_other_driver,
        blocked_by=("pci-no-gpu",),
        classes=HOST_OR_CONTAINER,
    ),
    Check(
        id="nouveau-loaded",
        title="nouveau leaves the GPUs alone",
        layer="hardware",
        severity="error",
        looks_at=(
            "the driver link of every GPU in /sys/bus/pci/devices, and /sys/module/nouveau. A warning if it "
            "only holds some GPUs (an old display card, say) or is merely loaded."
        ),
        why=(
            "nouveau, the kernel's own driver, takes the GPUs at boot, and nvidia.ko then finds none. "
            "Driver packages blacklist it; the initramfs must be built again for that to count."
        ),
        remedy=fixes.BLACKLIST_NOUVEAU,
        run=nouveau_loaded,
        blocked_by=("pci-no-gpu", "driver-not-installed"),
        classes=HOST,
        refs=("https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/",),
    ),
)
