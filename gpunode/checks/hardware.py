"""What is on the PCI bus, and who owns it."""

from __future__ import annotations

import shlex

from gpunode.checks import fixes
from gpunode.checks.fixes import POWER_OFF, Remedy, everywhere, per_family
from gpunode.checks.kernel_module import failures
from gpunode.checks.model import (
    ANY_ENGINE,
    HOST,
    HOST_OR_CONTAINER,
    Verdict,
    check,
    fail,
    note,
    ok,
    seen,
    skip,
    warn,
)
from gpunode.errors import Unreadable
from gpunode.facts import driver, pci
from gpunode.facts.driver import (
    PARAMETERS,
    has_module_file,
    initramfs_of,
    module_loaded,
    parameters,
    version_numbers,
)
from gpunode.facts.kernel_log import SOURCE, matching
from gpunode.facts.kernel_modules import NOUVEAU_FILE, NOUVEAU_TEXT
from gpunode.facts.node import Node
from gpunode.facts.pci import DEVICES, PciGpu, display_cards, lone_audio
from gpunode.facts.tables import TABLE, can
from gpunode.facts.traits import TRAITS
from gpunode.output.result import Evidence, Fix, Step

_NVIDIA = "nvidia"


@check(
    "pci-no-gpu",
    "hardware",
    title="An NVIDIA GPU is on the PCI bus",
    looks_at="vendor (0x10de) and class (0x0300 VGA, 0x0302 3D) of everything in /sys/bus/pci/devices.",
    remedy=fixes.RESCAN_PCI,
    preflight=ANY_ENGINE,
    classes=HOST_OR_CONTAINER,
    refs=("https://docs.nvidia.com/deploy/gpu-debug-guidelines/",),
)
def pci_no_gpu(node: Node) -> Verdict:
    """A GPU that the bus doesn't show can't be reached by any driver: it is absent, unpowered, badly seated,
    switched off in the firmware, or not passed through to this virtual machine. Of a node that is to have
    none, --expect-gpus 0 says so.
    """
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


@check(
    "pci-gpu-count-mismatch",
    "hardware",
    title="Every GPU is listed",
    looks_at=(
        "the GPUs in /sys/bus/pci/devices against --expect-gpus, and those that nvidia owns against what "
        "NVML lists, with the driver's failures for the others in the kernel's log. An error if NVML lists "
        "none."
    ),
    remedy=fixes.READ_KERNEL_LOG,
    blocked_by=("pci-no-gpu", "nvml-hang", "vgpu-driver-mismatch", "kmod-flavour"),
    refs=("https://docs.nvidia.com/deploy/gpu-debug-guidelines/",),
)
def pci_gpu_count_mismatch(node: Node) -> Verdict:
    """A GPU that the bus or NVML doesn't list is handed to no container: the node offers fewer GPUs than it
    has. A GPU that failed to start often needs the power to be off for a moment, which a warm reboot doesn't
    do.
    """
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


@check(
    "gpu-bound-other-driver",
    "hardware",
    title="No foreign driver owns the GPUs",
    looks_at=(
        "the driver link of every GPU in /sys/bus/pci/devices; nouveau and nova have their own checks. GPUs "
        "that vfio-pci keeps for virtual machines beside others that nvidia owns are fine, and a host that "
        "keeps all of them and has neither driver nor toolkit is a note."
    ),
    # the check knows the addresses and says how to rebind them; a made-up one may be a disk's
    remedy=fixes.everywhere("gpunode doctor gpu-bound-other-driver"),
    blocked_by=("pci-no-gpu", "bar-too-small", "nova-core-loaded"),
    preflight=ANY_ENGINE,
    classes=HOST_OR_CONTAINER,
    refs=("https://docs.kernel.org/driver-api/vfio.html",),
)
def gpu_bound_other_driver(node: Node) -> Verdict:
    """One driver at a time owns a PCI function. While vfio-pci or another driver holds it, nvidia.ko can't
    use it and NVML doesn't list it.
    """
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
    """GPUs without a driver, which is normal until the driver is loaded. One that this driver isn't made for,
    or that has no address window, is a finding of its own."""
    if node.module is None:
        return ()
    unsuited = {one.gpu.address for one in node.unsuited_gpus}
    free = (gpu for gpu in node.gpus if gpu.driver is None and gpu.address not in unsuited)
    return tuple(gpu for gpu in free if not pci.without_window(node.host, gpu.address))


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


BUS_CHECKS = (
    pci_no_gpu,
    pci_gpu_count_mismatch,
    gpu_bound_other_driver,
)


# Fixes for the hardware's findings, beside the shared remedies of fixes.py.

_PARAMETERS = "https://docs.kernel.org/admin-guide/kernel-parameters.html"
_REBUILD = {
    "debian": ("update-initramfs", "-u", "-k", "all"),
    "rhel": ("dracut", "-f", "--regenerate-all"),
    "suse": ("dracut", "-f", "--regenerate-all"),
}


def kernel_argument(words: str) -> Remedy:
    """Words added to the kernel's command line, for good."""
    line = f'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX {words}"'
    name = words.partition(" ")[0].partition("=")[0].replace(".", "-").replace("_", "-")
    place = "/etc/default/grub.d"
    return per_family(
        f"mkdir -p {place} && echo '{line}' > {place}/90-{name}.cfg && update-grub && reboot",
        f'grubby --update-kernel=ALL --args="{words}" && reboot',
        f"echo '{line}' >> /etc/default/grub && grub2-mkconfig -o /boot/grub2/grub.cfg && reboot",
        f"follow {_PARAMETERS} to boot with {words}",
        "reboot",
    )


FIRMWARE_SETUP = everywhere("systemctl reboot --firmware-setup", "reboot")
_VSPHERE = (
    "https://blogs.vmware.com/apps/2018/10/how-to-enable-nvidia-v100-gpu-in-passthrough-mode-on-vsphere-"
    "for-machine-learning-and-other-hpc-workloads.html"
)


def more_address_space(vendor: str) -> Fix:
    """More room for windows in a virtual machine, which only its hypervisor can give: the guest's kernel has
    nothing to allocate again."""
    if vendor.startswith("VMware"):
        what = f"follow {_VSPHERE} to set pciPassthru.use64bitMMIO and pciPassthru.64bitMMIOSizeGB"
    else:
        what = (
            "give this virtual machine more 64-bit PCI address space on its host, with QEMU by "
            "-global q35-pcihost.pci-hole64-size=2048G"
        )
    return Fix(what, needs_root=False, disruptive="reboot")


NO_ASPM = kernel_argument("pcie_aspm=off")
IOMMU_PASSTHROUGH = kernel_argument("iommu=pt")


def show_device(*addresses: str) -> Fix:
    """What a person reads before opening the machine: capability and state of the links."""
    commands = (f"lspci -vv -s {address} | grep -e LnkCap: -e LnkSta:" for address in addresses)
    return Fix(" && ".join(commands))


SHOW_LINK = everywhere("lspci -vv -d 10de: | grep -e ^[0-9a-f] -e LnkCap: -e LnkSta:")
SHOW_ERRORS = everywhere("dmesg | grep -i -e AER -e pcieport | tail -n 20")


def keep_out(family: str, path: str, text: str) -> Fix:
    """A blacklist file, in the initramfs as well; it counts from the next boot on."""
    quoted = text.replace("\n", "\\n")
    command = f"printf '{quoted}' > {path}"
    steps = [Step(path=path, content=text)]
    if family in _REBUILD:
        steps.append(Step(argv=_REBUILD[family]))
        command += f" && {shlex.join(_REBUILD[family])}"
    return Fix(command, safe=True, steps=tuple(steps))


KEEP_NOUVEAU_OUT = Remedy(
    *(keep_out(family, NOUVEAU_FILE, NOUVEAU_TEXT) for family in ("debian", "rhel", "suse", "other"))
)

_CDMM_FILE = "/etc/modprobe.d/nvidia-coherent-memory.conf"
_CDMM = f"echo 'options nvidia NVreg_CoherentGPUMemoryMode=driver' > {_CDMM_FILE}"
COHERENT_BY_DRIVER = per_family(
    f"{_CDMM} && update-initramfs -u -k all && reboot",
    f"{_CDMM} && dracut -f --regenerate-all && reboot",
    f"{_CDMM} && dracut -f --regenerate-all && reboot",
    f"{_CDMM} && reboot",
    "reboot",
)

DISABLE_HMM = everywhere(
    "echo 'options nvidia_uvm uvm_disable_hmm=1' > /etc/modprobe.d/nvidia-uvm-hmm.conf && "
    "rmmod nvidia_uvm && modprobe nvidia_uvm",
    "drain",
)


# Power cables, and where the memory of GPUs appears in the machine's own address space.

_CABLES = r"does not have the necessary power cables|NVRM: Xid \(.*?\): 54,"
_HMM = r"nvidia-uvm: .*(?:devmem_alloc_pagemap|request_free_mem_region).*-34"
_HMM_OFF = "/sys/module/nvidia_uvm/parameters/uvm_disable_hmm"


@check(
    "aux-power",
    "hardware",
    title="The GPUs have their power cables",
    looks_at="the driver's words and XID 54 in the kernel's log.",
    remedy=POWER_OFF,
    blocked_by=("pci-no-gpu",),
    classes=HOST,
    needs=("gpu",),
    preflight=ANY_ENGINE,
    refs=("https://docs.nvidia.com/deploy/xid-errors/",),
)
def aux_power(node: Node) -> Verdict:
    """A card that draws more than the slot gives needs its own cables. Without them the driver refuses it, or
    it stops under load.
    """
    try:
        lines = matching(node.kernel_log, _CABLES)
    except Unreadable:
        lines = ()
    evidence = [seen(SOURCE, line.text) for line, _ in lines[:3]]
    if not evidence:
        return ok("no GPU asks for power cables")
    return fail("a GPU lacks external power", *evidence)


@check(
    "coherent-memory-mode",
    "hardware",
    title="The GPUs' memory is no memory of the machine",
    severity="warning",
    looks_at=(
        "CoherentGPUMemoryMode in /proc/driver/nvidia/params, and NUMA nodes that have memory and no "
        "processor, on Kubernetes nodes whose GPUs share their processor's memory (GH200, GB200)."
    ),
    remedy=COHERENT_BY_DRIVER,
    blocked_by=("module-not-loaded",),
    needs=("kubelet", "coherent-gpu"),
    table=TABLE,
    refs=("https://docs.nvidia.com/datacenter/cloud-native/gpu-operator/latest/release-notes.html",),
)
def coherent_memory_mode(node: Node) -> Verdict:
    """The kernel hands such memory to anybody: pods are counted and placed on GPU memory, and it is lost to
    CUDA. With the mode 'driver' the driver alone gives it out; MIG and GDS don't work then.
    """
    module = node.module
    if module is None or not can("driver", "coherent-memory-mode", version_numbers(module.version)):
        return skip("this driver knows no mode in which it keeps the GPUs' memory to itself")
    nodes = pci.memory_only_nodes(node.host)
    mode = parameters(node.host).get("CoherentGPUMemoryMode")
    if not nodes or mode is None or mode == "driver":
        return ok("the GPUs' memory is the driver's alone")
    return warn(
        f"the GPUs' memory appears as NUMA nodes {', '.join(map(str, nodes))} of a Kubernetes node",
        seen(PARAMETERS, f"CoherentGPUMemoryMode: {mode or '(not set)'}"),
        seen(f"{pci.NODES}/has_memory", f"nodes {', '.join(map(str, nodes))} have memory and no processor"),
    )


@check(
    "uvm-hmm-kaslr",
    "hardware",
    title="Unified memory found its place",
    looks_at="the words of nvidia-uvm in the kernel's log, and the module's parameter uvm_disable_hmm.",
    remedy=DISABLE_HMM,
    blocked_by=("module-not-loaded", "uvm-not-loaded"),
    needs=("gpu",),
    preflight=ANY_ENGINE,
    refs=("https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/",),
)
def uvm_hmm_kaslr(node: Node) -> Verdict:
    """Where the kernel lies at a random address, there may be no room left above it for the GPUs' memory:
    nvidia-smi works and every CUDA program fails to initialise.
    """
    lines = matching(node.kernel_log, _HMM)
    if not lines:
        return ok("nvidia-uvm found room for its memory")
    off = (node.host.read_text(_HMM_OFF) or "").strip()
    if off == "Y":
        return ok("nvidia-uvm runs without HMM", seen(_HMM_OFF, off))
    set_ = node.module_options.option("nvidia_uvm", "uvm_disable_hmm")
    evidence = [seen(SOURCE, lines[-1][0].text)]
    evidence += [seen(_HMM_OFF, off)] if off else []
    evidence += (
        [seen(set_.source, f"uvm_disable_hmm={set_.value}, not in force yet", set_.line)] if set_ else []
    )
    return fail("nvidia-uvm found no room for the GPUs' memory, and CUDA can't start", *evidence)


MEMORY_CHECKS = (
    aux_power,
    coherent_memory_mode,
    uvm_hmm_kaslr,
)


# The kernel's own drivers for NVIDIA GPUs, nouveau and nova: they keep nvidia from getting them.

_OLDER_SECONDS = 60  # an initramfs that was written this much before the blacklist can't hold it


@check(
    "nouveau-loaded",
    "hardware",
    title="nouveau leaves the GPUs alone",
    looks_at=(
        "the driver link of every GPU in /sys/bus/pci/devices, and /sys/module/nouveau. A warning if it only "
        "holds some GPUs or is merely loaded; a card that this driver wouldn't drive is left to it, and a "
        "display card beside GPUs without outputs is a note."
    ),
    remedy=fixes.BLACKLIST_NOUVEAU,
    blocked_by=("pci-no-gpu", "driver-not-installed"),
    preflight=ANY_ENGINE,
    refs=("https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/",),
)
def nouveau_loaded(node: Node) -> Verdict:
    """nouveau, the kernel's own driver, takes the GPUs at boot, and nvidia.ko then finds none. Driver
    packages blacklist it; the initramfs must be built again for that to count.
    """
    held = tuple(gpu for gpu in node.gpus if gpu.driver == "nouveau")
    if held:
        return _held(node, held, "nouveau owns")
    if module_loaded(node.host, "nouveau") and node.module is None and _free(node):
        return warn("nouveau is loaded and nvidia is not", seen("/sys/module/nouveau", "loaded"))
    if not node.gpus:
        return skip("there is no GPU that nouveau could take")
    return ok("nouveau owns no GPU")


@check(
    "nova-core-loaded",
    "hardware",
    title="nova leaves the GPUs alone",
    looks_at="the driver link of every GPU in /sys/bus/pci/devices, and /sys/module/nova_core.",
    remedy=fixes.BLACKLIST_NOVA,
    blocked_by=("pci-no-gpu", "driver-not-installed"),
    preflight=ANY_ENGINE,
    refs=("https://docs.kernel.org/gpu/nova/index.html",),
)
def nova_core_loaded(node: Node) -> Verdict:
    """nova_core, the kernel's new driver, takes the GPUs at boot, and nvidia.ko then finds none. A blacklist
    of nouveau alone doesn't keep it out.
    """
    held = tuple(gpu for gpu in node.gpus if is_nova(gpu))
    if held:
        return _held(node, held, "nova, the kernel's own driver, owns")
    if module_loaded(node.host, "nova_core") and node.module is None and _free(node):
        return warn("nova_core is loaded and nvidia is not", seen("/sys/module/nova_core", "loaded"))
    return ok("nova owns no GPU")


def _free(node: Node) -> bool:
    """Whether there is a GPU without an owner; one that is kept for a virtual machine isn't in question."""
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
    row = driver.supports(gpu.device_id)
    number = driver.branch(node.driver_version)
    return row is not None and bool(driver.refusal(row, number, node.module_open))


@check(
    "nouveau-not-blacklisted",
    "hardware",
    title="nouveau stays away at the next boot",
    severity="warning",
    looks_at=(
        "whether modules.dep of the running kernel has nouveau.ko, and what refuses it: modprobe.d, the "
        "kernel's command line, and whether the initramfs is as new as that file. The initramfs isn't "
        "opened."
    ),
    remedy=fixes.BLACKLIST_NOUVEAU,
    blocked_by=("pci-no-gpu", "driver-not-installed", "nouveau-loaded", "nova-core-loaded"),
    needs=("gpu",),
    unless=("vfio-host", "operator-driver"),
    reboot=True,
    refs=("https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/",),
)
def nouveau_not_blacklisted(node: Node) -> Verdict:
    """A nouveau that nothing refuses is loaded for the GPUs during the boot, often from the initramfs, before
    nvidia gets a chance.
    """
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
    fix = KEEP_NOUVEAU_OUT.for_family(node.distribution.family)
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


NOUVEAU_CHECKS = (
    nouveau_loaded,
    nova_core_loaded,
    nouveau_not_blacklisted,
)
