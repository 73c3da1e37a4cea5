"""The kernel's own drivers for NVIDIA GPUs, nouveau and nova: they keep nvidia from getting them."""

from __future__ import annotations

from gpunode.checks import fixes
from gpunode.checks.hardware import remedies
from gpunode.checks.hardware.bus import is_nova, of, owners
from gpunode.checks.model import ANY_ENGINE, Check, Verdict, fail, note, ok, seen, skip, warn
from gpunode.errors import Unreadable
from gpunode.facts import gpu_support
from gpunode.facts.driver import has_module_file, initramfs_of, module_loaded
from gpunode.facts.kernel_log import SOURCE, matching
from gpunode.facts.node import Node
from gpunode.facts.pci import PciGpu, display_cards

_NVIDIA = "nvidia"
_OLDER_SECONDS = 60  # an initramfs that was written this much before the blacklist can't hold it


def nouveau_loaded(node: Node) -> Verdict:
    held = tuple(gpu for gpu in node.gpus if gpu.driver == "nouveau")
    if held:
        return _held(node, held, "nouveau owns")
    if module_loaded(node.host, "nouveau") and node.module is None and _free(node):
        return warn("nouveau is loaded and nvidia is not", seen("/sys/module/nouveau", "loaded"))
    if not node.gpus:
        return skip("there is no GPU that nouveau could take")
    return ok("nouveau owns no GPU")


def nova_core_loaded(node: Node) -> Verdict:
    held = tuple(gpu for gpu in node.gpus if is_nova(gpu))
    if held:
        return _held(node, held, "nova, the kernel's own driver, owns")
    if module_loaded(node.host, "nova_core") and node.module is None and _free(node):
        return warn("nova_core is loaded and nvidia is not", seen("/sys/module/nova_core", "loaded"))
    return ok("nova owns no GPU")


def _free(node: Node) -> bool:
    """Whether there is a GPU that nobody owns; one that is kept for a virtual machine isn't in question."""
    return any(gpu.driver is None for gpu in node.gpus)


def _held(node: Node, held: tuple[PciGpu, ...], who: str) -> Verdict:
    ours = any(gpu.driver == _NVIDIA for gpu in node.gpus)
    summary = f"{who} {of(held, node)}"
    others = len(held) < len(node.gpus)
    if others and all(_not_for_us(node, gpu) for gpu in held):
        return ok(f"{summary}, which this driver wouldn't drive", *owners(held))
    if others and display_cards(held, node.gpus):
        return note(f"{summary}, for a screen", *owners(held))
    return (warn if ours else fail)(summary, *owners(held))


def _not_for_us(node: Node, gpu: PciGpu) -> bool:
    row = gpu_support.supports(gpu.device_id)
    number = gpu_support.branch(node.driver_version)
    return row is not None and bool(gpu_support.refusal(row, number, node.module_open))


def nouveau_not_blacklisted(node: Node) -> Verdict:
    if any(gpu.driver == "nouveau" for gpu in node.gpus):
        return skip("nouveau holds a GPU already")  # nouveau-loaded judges that
    if not has_module_file(node.host, node.kernel, "nouveau"):
        return ok("this kernel has no nouveau")
    refusals = node.module_options.refused("nouveau")
    if refusals:
        shown = seen(refusals[0].source, refusals[0].kind, refusals[0].line)
        if node.module is None and _older_initramfs(node):
            return warn("the initramfs is older than the file that keeps nouveau out", shown)
        return ok("nouveau is kept out", shown)
    fix = remedies.KEEP_NOUVEAU_OUT.for_family(node.distribution.family)
    lies = seen(f"/lib/modules/{node.kernel}/modules.dep", "nouveau.ko, and nothing refuses it")
    if node.module is None:
        return warn("nothing keeps nouveau from taking the GPUs at the next boot", lies, fix=fix)
    before = _was_here(node)
    if before is not None:
        held = seen(SOURCE, before)
        return warn(
            "nouveau had a GPU earlier in this boot and takes it again at the next", held, lies, fix=fix
        )
    return note("nvidia has the GPUs, though nothing keeps nouveau out", lies, fix=fix)


def _was_here(node: Node) -> str | None:
    """What nouveau said in this boot of a GPU that nvidia owns now."""
    ours = {gpu.address for gpu in node.gpus if gpu.driver == _NVIDIA}
    try:
        lines = matching(node.kernel_log, r"^nouveau ([0-9a-f:.]+): (?!unknown chipset)")
    except Unreadable:
        return None
    return next((line.text for line, found in lines if found[1] in ours), None)


def _older_initramfs(node: Node) -> bool:
    """Whether only files refuse nouveau, and the initramfs was written before all of them."""
    refusals = node.module_options.refused("nouveau")
    image = initramfs_of(node.host, node.kernel)
    if image is None or node.module_options.refused_in_initramfs("nouveau"):
        return False
    written = [found.st_mtime for one in refusals if (found := node.host.stat(one.source))]
    return bool(written) and min(written) > image.st_mtime + _OLDER_SECONDS


CHECKS = (
    Check(
        id="nouveau-loaded",
        title="nouveau leaves the GPUs alone",
        layer="hardware",
        severity="error",
        looks_at=(
            "the driver link of every GPU in /sys/bus/pci/devices, and /sys/module/nouveau. A warning if it "
            "only holds some GPUs or is merely loaded; a card that this driver wouldn't drive is left to it, "
            "and a display card beside GPUs without outputs is a note."
        ),
        why=(
            "nouveau, the kernel's own driver, takes the GPUs at boot, and nvidia.ko then finds none. "
            "Driver packages blacklist it; the initramfs must be built again for that to count."
        ),
        remedy=fixes.BLACKLIST_NOUVEAU,
        run=nouveau_loaded,
        blocked_by=("pci-no-gpu", "driver-not-installed"),
        preflight=ANY_ENGINE,
        refs=("https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/",),
    ),
    Check(
        id="nova-core-loaded",
        title="nova leaves the GPUs alone",
        layer="hardware",
        severity="error",
        looks_at="the driver link of every GPU in /sys/bus/pci/devices, and /sys/module/nova_core.",
        why=(
            "nova_core, the kernel's new driver, takes the GPUs at boot, and nvidia.ko then finds none. A "
            "blacklist of nouveau alone doesn't keep it out."
        ),
        remedy=fixes.BLACKLIST_NOVA,
        run=nova_core_loaded,
        blocked_by=("pci-no-gpu", "driver-not-installed"),
        preflight=ANY_ENGINE,
        refs=("https://docs.kernel.org/gpu/nova/index.html",),
    ),
    Check(
        id="nouveau-not-blacklisted",
        title="nouveau stays away at the next boot",
        layer="hardware",
        severity="warning",
        looks_at=(
            "whether modules.dep of the running kernel has nouveau.ko, and what refuses it: modprobe.d, the "
            "kernel's command line, and whether the initramfs is as new as that file. The initramfs isn't "
            "opened."
        ),
        why=(
            "A nouveau that nothing refuses is loaded for the GPUs during the boot, often from the "
            "initramfs, before nvidia gets a chance."
        ),
        remedy=fixes.BLACKLIST_NOUVEAU,
        run=nouveau_not_blacklisted,
        blocked_by=("pci-no-gpu", "driver-not-installed", "nouveau-loaded", "nova-core-loaded"),
        needs=("gpu",),
        unless=("vfio-host", "operator-driver"),
        reboot=True,
        refs=("https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/",),
    ),
)
