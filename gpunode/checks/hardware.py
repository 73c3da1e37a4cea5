"""Checks of the PCI bus: GPUs, the drivers that control them, power cables, and nouveau and nova."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace

from gpunode.checks import fixes
from gpunode.checks.finding import Evidence, Fix
from gpunode.checks.fixes import POWER_OFF, FixByFamily, per_family
from gpunode.checks.kernel_module import failures
from gpunode.checks.model import (
    HOST_OR_CONTAINER,
    Verdict,
    check,
    fail,
    next_boot_check,
    note,
    ok,
    prerequisite_check,
    seen,
    skip,
    warn,
)
from gpunode.errors import Unreadable
from gpunode.facts import driver, pci
from gpunode.facts.driver_targets import refusal, supports
from gpunode.facts.kernel_log import SOURCE, KernelLine, matching
from gpunode.facts.kernel_modules import INITRAMFS, NOUVEAU_FILE, NOUVEAU_TEXT, ModuleOption
from gpunode.facts.kernels import has_module_file, initramfs_of
from gpunode.facts.node import Node
from gpunode.facts.pci import DEVICES, PciGpu, display_cards, lone_audio
from gpunode.facts.system import VM
from gpunode.facts.tables import TABLE, can
from gpunode.facts.traits import TRAITS
from gpunode.output.result import many

_NVIDIA = "nvidia"


@prerequisite_check(
    "pci-no-gpu",
    title="An NVIDIA GPU is on the PCI bus",
    looks_at="vendor (0x10de) and class (0x0300 VGA, 0x0302 3D) of all devices in /sys/bus/pci/devices.",
    fix=fixes.RESCAN_PCI,
    blocked_by=(),
    classes=HOST_OR_CONTAINER,
    refs=("https://docs.nvidia.com/deploy/gpu-debug-guidelines/",),
)
def pci_no_gpu(node: Node) -> Verdict:
    """No driver can access a GPU that isn't on the bus: it is absent, unpowered, not fully seated, disabled
    in the firmware, or not passed through to this virtual machine. For a node without GPUs, use gpunode
    doctor --expect-gpus 0.
    """
    if node.gpus:
        drivers = ", ".join(sorted({gpu.driver or "none" for gpu in node.gpus}))
        return ok(f"{many(len(node.gpus), 'GPU')} on the PCI bus", seen(DEVICES, f"driver: {drivers}"))
    functions = node.host.listdir(DEVICES)
    evidence = [seen(DEVICES, f"no NVIDIA GPU among {many(len(functions), 'PCI device')}")]
    if node.questions.expect_gpus == 0:
        return note("no NVIDIA GPU, as expected", *evidence)
    evidence += [
        seen(f"{DEVICES}/{address}", "the audio function of a GPU") for address in lone_audio(node.host)
    ]
    if node.kind == VM:
        return fail("no NVIDIA GPU on the PCI bus", *evidence, fix=_rescan_vm(node), why=_WHY_VM)
    return fail("no NVIDIA GPU on the PCI bus", *evidence)


_WHY_VM = (
    "No driver can access a GPU that isn't on the bus: this virtual machine's host doesn't pass one through. "
    "For a node without GPUs, use gpunode doctor --expect-gpus 0."
)


def _rescan_vm(node: Node) -> Fix:
    note = "If no GPU appears, check on this virtual machine's host that a GPU is passed through to it"
    if node.host.is_dir("/sys/bus/vmbus"):  # Hyper-V
        note += ". On Hyper-V, Get-VMAssignableDevice lists what is assigned to it"
    return replace(fixes.RESCAN_PCI, note=note)


LIST_GPUS = fixes.look(
    "lspci -nnk -d 10de:",
    "If all of them belong to this node, correct --expect-gpus",
    needs_root=False,
)
POWER_CYCLE = (
    "Stop the GPU work and disconnect the node's power for a minute: a reboot often isn't enough. If the GPU "
    "fails again, "
    "it must be replaced"
)


@check(
    "pci-gpu-count-mismatch",
    title="All GPUs are listed",
    looks_at="the GPUs in /sys/bus/pci/devices against --expect-gpus, and those bound to nvidia against "
    "NVML's list, with the driver's errors for the missing ones in the kernel's log. An error if "
    "NVML lists none.",
    fix=fixes.READ_KERNEL_LOG,
    blocked_by=("pci-no-gpu", "nvml-hang", "vgpu-driver-mismatch", "kmod-flavour"),
    refs=("https://docs.nvidia.com/deploy/gpu-debug-guidelines/",),
)
def pci_gpu_count_mismatch(node: Node) -> Verdict:
    """Containers can't get a GPU that the bus or NVML doesn't list: the node offers fewer GPUs than it has. A
    GPU that failed to start often needs a power cycle; a warm reboot isn't enough.
    """
    expected, there = node.questions.expect_gpus, len(node.gpus)
    if expected is not None and there != expected:
        rescan = _rescan_vm(node) if node.kind == VM else fixes.RESCAN_PCI
        return warn(
            f"{many(there, 'GPU')} on the PCI bus, {expected} expected",
            *owners(node.gpus),
            fix=rescan if there < expected else LIST_GPUS,
        )
    left_out = {gpu.address for gpu in node.driver_gpus if gpu.excluded}
    addresses = {gpu.address for gpu in node.gpus if gpu.driver == _NVIDIA} - left_out
    if node.module is None or node.nvml.inventory is None:
        return (
            ok(f"{many(there, 'GPU')} on the PCI bus")
            if expected is not None
            else skip("NVML doesn't report the number of GPUs")
        )
    listed = {_short(gpu.pci) for gpu in node.nvml.inventory.gpus}
    missing = sorted(address for address in addresses if _short(address) not in listed)
    if missing and len(listed) < len(addresses):
        judge = warn if listed else fail  # without any GPU no container can have one
        return judge(
            f"NVML lists {len(listed)} of the {many(len(addresses), 'GPU')} that the driver controls",
            *(seen(f"{DEVICES}/{address}", "bound to nvidia, but not listed by NVML") for address in missing),
            *failures(node, *missing),
            fix=fixes.look(f"dmesg | grep -i -e {' -e '.join(missing)} -e RmInitAdapter", POWER_CYCLE),
        )
    return ok(f"PCI bus and NVML both list {many(len(addresses), 'GPU')}")


def _short(address: str) -> str:
    """NVML writes PCI domains with eight digits, sysfs with four."""
    domain, _, rest = address.lower().partition(":")
    return f"{domain.lstrip('0') or '0'}:{rest}"


@prerequisite_check(
    "gpu-bound-other-driver",
    title="No other driver controls the GPUs",
    looks_at="the driver link of every GPU in /sys/bus/pci/devices; nouveau and nova have their own checks. "
    "GPUs on vfio-pci for virtual machines beside others on nvidia are fine. A host that reserves "
    "all GPUs for virtual machines and has neither driver nor toolkit gets a note.",
    # the check knows the addresses and how to rebind them; an invented address may be a disk's
    fix=fixes.look("gpunode doctor gpu-bound-other-driver", "It prints the command for this node's GPUs"),
    blocked_by=("pci-no-gpu", "bar-too-small", "nova-core-loaded"),
    classes=HOST_OR_CONTAINER,
    refs=("https://docs.kernel.org/driver-api/vfio.html",),
)
def gpu_bound_other_driver(node: Node) -> Verdict:
    """Only one driver can control a PCI function. While vfio-pci or another driver is bound to the GPU,
    nvidia.ko can't use it and NVML doesn't list it.
    """
    others = tuple(
        gpu for gpu in node.gpus if gpu.driver not in (_NVIDIA, "nouveau", None) and not is_nova(gpu)
    )
    orphans = _orphans(node)
    count = sum(gpu.driver == _NVIDIA for gpu in node.gpus)
    if not others and not orphans:
        return ok("no other driver controls a GPU")
    if count and all(gpu.for_vms for gpu in (*others, *orphans)):
        return ok(f"{of(others, node)} reserved for virtual machines", *owners(others))
    if TRAITS["vm-host"].holds(node):
        return note("all GPUs are reserved for virtual machines", *owners(others))
    names = ", ".join(sorted({gpu.driver or "no driver" for gpu in (*others, *orphans)}))
    if not others:
        summary = f"the driver is loaded, but not bound to {of(orphans, node)}"
        evidence = (*owners(orphans), *failures(node, *(gpu.address for gpu in orphans)))
        windows = [pci.memory_bars(node.host, gpu.address) for gpu in orphans]
        short = any(bars is not None and len(bars) < 2 for bars in windows)
        fix = _AFTER_WINDOWS if short else fixes.READ_KERNEL_LOG
        return (warn if count else fail)(summary, *evidence, fix=fix)
    bound = node.module_options.option("vfio_pci", "ids") if "vfio-pci" in names else None
    details = [*owners((*others, *orphans))]
    details += [seen(bound.source, f"vfio-pci ids={bound.value}", bound.line)] if bound else []
    fix = _rebind(node, others, bound)
    summary = f"{of((*others, *orphans), node)} bound to {names}, not to nvidia"
    return (warn if count else fail)(summary, *details, fix=fix)


_AFTER_WINDOWS = fixes.look(
    "gpunode doctor bar-too-small gpu-bound-other-driver",
    "A missing address window explains this: fix bar-too-small first, then run this",
)


def _rebind(node: Node, gpus: tuple[PciGpu, ...], bound: ModuleOption | None) -> Fix:
    """Bind GPUs to nvidia, at the next boots too if the line that binds them to vfio-pci names no other
    device."""
    fix = fixes.rebind(*(gpu.address for gpu in gpus))
    if any(gpu.driver == "vfio-pci" for gpu in gpus):
        fix = replace(
            fix,
            effect="takes the GPUs away from running virtual machines",
            before="vfio-pci was configured on purpose: if virtual machines use these GPUs, do not run this",
        )
    ids = bound.value.split(",") if bound and bound.line else []
    if bound and ids and all(device_id.startswith("10de:") for device_id in ids):
        commands = [f"sed -i '{bound.line}s/^/# /' {bound.source}"]
        commands += [shlex.join(argv) for argv in INITRAMFS.get(node.distribution.family, ())[:1]]
        return fix.after(" && ".join(commands))
    find = "grep -rn -e vfio -e driver_override /etc/modprobe.d /etc/udev/rules.d /proc/cmdline"
    return replace(fix, note=f"The next boot binds them as before. To find out what does it:\n{find}")


def _orphans(node: Node) -> tuple[PciGpu, ...]:
    """GPUs without a driver, which is normal until the driver is loaded. A GPU that this driver doesn't
    support, or without address windows, is a finding of another check."""
    if node.module is None:
        return ()
    unsuited = {gpu.gpu.address for gpu in node.unsuited_gpus}
    free = (gpu for gpu in node.gpus if gpu.driver is None and gpu.address not in unsuited)
    return tuple(gpu for gpu in free if not pci.without_window(node.host, gpu.address))


def of(gpus: tuple[PciGpu, ...], node: Node) -> str:
    return f"{len(gpus)} of {many(len(node.gpus), 'GPU')}"


def is_nova(gpu: PciGpu) -> bool:
    """The kernel's Rust driver, formerly named NovaCore."""
    return (gpu.driver or "").lower().startswith("nova")


def owners(gpus: tuple[PciGpu, ...]) -> tuple[Evidence, ...]:
    return tuple(seen(f"{DEVICES}/{gpu.address}/driver", gpu.driver or "no driver link") for gpu in gpus)


# Fixes for the hardware's findings, beside the shared ones of fixes.py.

_PARAMETERS = "https://docs.kernel.org/admin-guide/kernel-parameters.html"


def kernel_argument(words: str) -> FixByFamily:
    """Add arguments to the kernel's command line permanently."""
    line = f'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX {words}"'
    name = words.partition(" ")[0].partition("=")[0].replace(".", "-").replace("_", "-")
    place = "/etc/default/grub.d"
    guide = f"follow {_PARAMETERS} to boot with {words}"
    by_family = per_family(
        f"mkdir -p {place} && echo '{line}' > {place}/90-{name}.cfg && update-grub",
        f'grubby --update-kernel=ALL --args="{words}"',
        f"echo '{line}' >> /etc/default/grub && grub2-mkconfig -o /boot/grub2/grub.cfg",
        guide,
    ).then_reboot()
    return by_family._replace(other=Fix(guide, disruptive="reboot"))


FIRMWARE_SETUP = Fix(
    "systemctl reboot --firmware-setup",
    disruptive="reboot",
    note="The firmware's setup opens at the console (or the BMC's): change the setting named above",
)
ABOVE_4G = Fix(
    FIRMWARE_SETUP.command,
    disruptive="reboot",
    note="The firmware's setup opens at the console (or the BMC's): turn on Above 4G Decoding, and "
    "Resizable BAR if it has it",
)
_VSPHERE = (
    "https://blogs.vmware.com/apps/2018/10/how-to-enable-nvidia-v100-gpu-in-passthrough-mode-on-vsphere-"
    "for-machine-learning-and-other-hpc-workloads.html"
)


def more_address_space(vendor: str) -> Fix:
    """More address space in a virtual machine, which only its hypervisor can provide: the guest kernel can't
    allocate more itself."""
    if vendor.startswith("VMware"):
        how = f"follow {_VSPHERE} to set pciPassthru.use64bitMMIO and pciPassthru.64bitMMIOSizeGB"
        note = (
            "In its advanced settings (VMX): pciPassthru.use64bitMMIO = TRUE, and "
            "pciPassthru.64bitMMIOSizeGB = the memory of all its GPUs in GB, rounded up to the next "
            "higher power of two (2 x 16 GB: 64)"
        )
    else:
        how = (
            "give it more 64-bit PCI address space on its host (QEMU: -global "
            "q35-pcihost.pci-hole64-size=2048G)"
        )
        note = ""
    return Fix(
        f"shut this virtual machine down, {how}, and start it again",
        needs_root=False,
        disruptive="reboot",
        note=note,
        effect="ends what runs in it; the host's other virtual machines continue",
    )


NO_ASPM = kernel_argument("pcie_aspm=off")


KEEP_NOUVEAU_OUT = FixByFamily(
    *(fixes.keep_out(NOUVEAU_FILE, NOUVEAU_TEXT, INITRAMFS.get(family, ())[:1]) for family in fixes.FAMILIES)
)

_CDMM_FILE = "/etc/modprobe.d/nvidia-coherent-memory.conf"
_CDMM = f"echo 'options nvidia NVreg_CoherentGPUMemoryMode=driver' > {_CDMM_FILE}"


# Power cables, and GPU memory in the machine's own address space.

_CABLES = r"does not have the necessary power cables|NVRM: Xid \(.*?\): 54,"
_ADDRESS = re.compile(r"\b[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}(\.[0-9])?")
_HMM = r"nvidia-uvm: .*(?:devmem_alloc_pagemap|request_free_mem_region).*-34"
_HMM_OFF = "/sys/module/nvidia_uvm/parameters/uvm_disable_hmm"


def log_lines(node: Node, pattern: str) -> Sequence[tuple[KernelLine, re.Match[str]]]:
    """Lines of the kernel's log that match; () if this user has no permission to read it."""
    try:
        return matching(node.kernel_log, pattern)
    except Unreadable:
        return ()


@prerequisite_check(
    "aux-power",
    title="The GPUs' power cables are connected",
    looks_at="the driver's power errors and XID 54 in the kernel's log.",
    fix=POWER_OFF,
    needs=("gpu",),
    refs=("https://docs.nvidia.com/deploy/xid-errors/",),
)
def aux_power(node: Node) -> Verdict:
    """A card that needs more power than the slot supplies needs its own power cables. Without them the driver
    refuses the card, or the card fails under load.
    """
    lines = log_lines(node, _CABLES)
    evidence = [seen(SOURCE, line.text) for line, _ in lines[:3]]
    if not evidence:
        return ok("no GPU reports missing power cables")
    matches = (_ADDRESS.search(line.text) for line, _ in lines)
    gpus = ", ".join(dict.fromkeys(match[0] for match in matches if match))
    return fail(f"{f'GPU {gpus}' if gpus else 'a GPU'} has no power cable", *evidence)


@check(
    "coherent-memory-mode",
    title="GPU memory isn't part of the node's system memory",
    severity="warning",
    looks_at="CoherentGPUMemoryMode in /proc/driver/nvidia/params, and NUMA nodes with memory but no "
    "processor, on Kubernetes nodes with GPUs that share the processor's memory (GH200, GB200).",
    fix=per_family(
        f"{_CDMM} && update-initramfs -u -k all",
        f"{_CDMM} && dracut -f --regenerate-all",
        f"{_CDMM} && dracut -f --regenerate-all",
        _CDMM,
    ).then_reboot(),
    blocked_by=("module-not-loaded",),
    needs=("kubelet", "coherent-gpu"),
    table=TABLE,
    refs=("https://docs.nvidia.com/datacenter/cloud-native/gpu-operator/latest/release-notes.html",),
)
def coherent_memory_mode(node: Node) -> Verdict:
    """The kernel gives such memory to any process: it counts as memory for pods, pods may be placed on it,
    and CUDA can't use it. With the mode 'driver', only the driver allocates it; MIG and GDS don't work in
    that mode.
    """
    module = node.module
    if module is None or not can("driver", "coherent-memory-mode", driver.version_numbers(module.version)):
        return skip("this driver has no mode that reserves the GPUs' memory for itself")
    nodes = pci.memory_only_nodes(node.host)
    mode = driver.parameters(node.host).get("CoherentGPUMemoryMode")
    if not nodes or mode is None or mode == "driver":
        return ok("only the driver allocates the GPUs' memory")
    return warn(
        f"the GPUs' memory appears as NUMA nodes {', '.join(map(str, nodes))} of a Kubernetes node",
        seen(driver.PARAMETERS, f"CoherentGPUMemoryMode: {mode or '(not set)'}"),
        seen(f"{pci.NODES}/has_memory", f"nodes {', '.join(map(str, nodes))} have memory but no processor"),
    )


@prerequisite_check(
    "uvm-hmm-kaslr",
    title="The unified memory module has an address range for GPU memory",
    looks_at="messages of nvidia-uvm in the kernel's log, and the module's parameter uvm_disable_hmm.",
    fix=Fix(
        "echo 'options nvidia_uvm uvm_disable_hmm=1' > /etc/modprobe.d/nvidia-uvm-hmm.conf && "
        "rmmod nvidia_uvm && modprobe nvidia_uvm",
        disruptive="drain",
    ),
    blocked_by=("module-not-loaded", "uvm-not-loaded"),
    needs=("gpu",),
    refs=("https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/",),
)
def uvm_hmm_kaslr(node: Node) -> Verdict:
    """With kernel address randomisation (KASLR), the address space above the kernel may be too small for the
    GPUs' memory: nvidia-smi works, but every CUDA program fails to initialise.
    """
    lines = matching(node.kernel_log, _HMM)
    if not lines:
        return ok("nvidia-uvm has an address range for GPU memory")
    off = (node.host.read_text(_HMM_OFF) or "").strip()
    if off == "Y":
        return ok("nvidia-uvm runs without HMM", seen(_HMM_OFF, off))
    set_ = node.module_options.option("nvidia_uvm", "uvm_disable_hmm")
    evidence = [seen(SOURCE, lines[-1][0].text)]
    evidence += [seen(_HMM_OFF, off)] if off else []
    evidence += (
        [seen(set_.source, f"uvm_disable_hmm={set_.value}, not active yet", set_.line)] if set_ else []
    )
    return fail("nvidia-uvm found no address range for the GPUs' memory, so CUDA can't start", *evidence)


# The kernel's own drivers for NVIDIA GPUs, nouveau and nova, which keep nvidia from binding to them.

_OLDER_SECONDS = 60  # an initramfs that was written this long before the blacklist can't contain it


@prerequisite_check(
    "nouveau-loaded",
    title="nouveau doesn't control the GPUs",
    looks_at="the driver link of every GPU in /sys/bus/pci/devices, and /sys/module/nouveau. A warning if "
    "nouveau controls only some GPUs or is only loaded. A card that this driver doesn't support "
    "isn't a finding; a display card beside GPUs without outputs is a note.",
    fix=fixes.BLACKLIST_NOUVEAU,
    blocked_by=("pci-no-gpu", "driver-not-installed"),
    refs=("https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/",),
)
def nouveau_loaded(node: Node) -> Verdict:
    """nouveau, the kernel's own driver, binds to the GPUs at boot, and nvidia.ko then finds none. Driver
    packages blacklist nouveau, but this takes effect only after the initramfs is rebuilt.
    """
    gpus = tuple(gpu for gpu in node.gpus if gpu.driver == "nouveau")
    if gpus:
        return _other_driver(node, gpus, "nouveau controls")
    if driver.module_loaded(node.host, "nouveau") and node.module is None and _free(node):
        return warn("nouveau is loaded and nvidia is not", seen("/sys/module/nouveau", "loaded"))
    if not node.gpus:
        return skip("this node has no GPU that nouveau could control")
    return ok("nouveau controls no GPU")


@prerequisite_check(
    "nova-core-loaded",
    title="nova doesn't control the GPUs",
    looks_at="the driver link of every GPU in /sys/bus/pci/devices, and /sys/module/nova_core.",
    fix=fixes.BLACKLIST_NOVA,
    blocked_by=("pci-no-gpu", "driver-not-installed"),
    refs=("https://docs.kernel.org/gpu/nova/index.html",),
)
def nova_core_loaded(node: Node) -> Verdict:
    """nova_core, the kernel's new driver, binds to the GPUs at boot, and nvidia.ko then finds none.
    Blacklisting only nouveau doesn't stop it.
    """
    gpus = tuple(gpu for gpu in node.gpus if is_nova(gpu))
    if gpus:
        return _other_driver(node, gpus, "nova, the kernel's own driver, controls")
    if driver.module_loaded(node.host, "nova_core") and node.module is None and _free(node):
        return warn("nova_core is loaded and nvidia is not", seen("/sys/module/nova_core", "loaded"))
    return ok("nova controls no GPU")


def _free(node: Node) -> bool:
    """Whether a GPU has no driver; one that is reserved for a virtual machine doesn't count."""
    return any(gpu.driver is None for gpu in node.gpus)


def _other_driver(node: Node, gpus: tuple[PciGpu, ...], prefix: str) -> Verdict:
    has_own = any(gpu.driver == _NVIDIA for gpu in node.gpus)
    summary = f"{prefix} {of(gpus, node)}"
    others = len(gpus) < len(node.gpus)
    if others and all(_not_for_us(node, gpu) for gpu in gpus):
        return ok(f"{summary}, which this driver doesn't support", *owners(gpus))
    if others and display_cards(gpus, node.gpus):
        return note(f"{summary}, which drives a display", *owners(gpus))
    return (warn if has_own else fail)(summary, *owners(gpus))


def _not_for_us(node: Node, gpu: PciGpu) -> bool:
    row = supports(gpu.device_id)
    number = driver.branch(node.driver_version)
    return row is not None and bool(refusal(row, number, node.module_open))


@next_boot_check(
    "nouveau-not-blacklisted",
    title="nouveau won't load at the next boot",
    looks_at="whether modules.dep of the running kernel has nouveau.ko, and what blocks it: modprobe.d, the "
    "kernel's command line, and whether the initramfs is newer than that file. The initramfs isn't "
    "opened.",
    fix=fixes.BLACKLIST_NOUVEAU,
    blocked_by=("pci-no-gpu", "driver-not-installed", "nouveau-loaded", "nova-core-loaded"),
    needs=("gpu",),
    unless=("vfio-host", "operator-driver"),
    refs=("https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/",),
)
def nouveau_not_blacklisted(node: Node) -> Verdict:
    """If nothing blocks nouveau, it binds to the GPUs during the boot, often from the initramfs, before
    nvidia is loaded.
    """
    if any(gpu.driver == "nouveau" for gpu in node.gpus):
        return skip("nouveau already controls a GPU")  # nouveau-loaded reports that
    if not has_module_file(node.host, node.kernel, "nouveau"):
        return ok("this kernel has no nouveau module")
    refusals = node.module_options.refused("nouveau")
    if refusals:
        refusal = seen(refusals[0].source, refusals[0].kind, refusals[0].line)
        if node.module is None and _older_initramfs(node):
            return warn("the initramfs is older than the file that blacklists nouveau", refusal)
        return ok("nouveau is blacklisted", refusal)
    fix = KEEP_NOUVEAU_OUT.for_family(node.distribution.family)
    lies = seen(f"/lib/modules/{node.kernel}/modules.dep", "nouveau.ko exists and is not blacklisted")
    if node.module is None:
        return warn("nothing keeps nouveau from binding to the GPUs at the next boot", lies, fix=fix)
    before = _was_here(node)
    if before is not None:
        earlier = seen(SOURCE, before)
        return warn(
            "nouveau controlled a GPU earlier in this boot and will bind to it again at the next",
            earlier,
            lies,
            fix=fix,
        )
    return note("nvidia controls the GPUs, but nouveau is not blacklisted", lies, fix=fix)


def _was_here(node: Node) -> str | None:
    """What nouveau logged in this boot about a GPU that nvidia controls now."""
    addresses = {gpu.address for gpu in node.gpus if gpu.driver == _NVIDIA}
    lines = log_lines(node, r"^nouveau ([0-9a-f:.]+): (?!unknown chipset)")
    return next((line.text for line, match in lines if match[1] in addresses), None)


def _older_initramfs(node: Node) -> bool:
    """Whether only files block nouveau, and the initramfs is older than all of them."""
    refusals = node.module_options.refused("nouveau")
    image = initramfs_of(node.host, node.kernel)
    if image is None or node.module_options.refused_in_initramfs("nouveau"):
        return False
    written = [status.st_mtime for refusal in refusals if (status := node.host.stat(refusal.source))]
    return bool(written) and min(written) > image.st_mtime + _OLDER_SECONDS
