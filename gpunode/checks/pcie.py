"""Checks of PCI Express: address windows, lanes, errors, and the route of traffic between GPUs."""

from __future__ import annotations

from functools import partial

from gpunode.checks import fixes, hardware
from gpunode.checks.finding import Evidence, Fix
from gpunode.checks.model import Verdict, check, fail, note, ok, prerequisite_check, seen, skip, warn
from gpunode.facts import pci
from gpunode.facts.kernel_log import SOURCE
from gpunode.facts.node import Node
from gpunode.facts.pci import DEVICES
from gpunode.facts.processes import uptime
from gpunode.facts.system import BARE_METAL, VM
from gpunode.output.result import many

bare_metal_check = partial(check, classes=(BARE_METAL,))
_RESEAT = (
    "Stop the GPU work, power the node off and reseat the card and its riser; then try another slot. "
    "If LnkSta stays below LnkCap or errors return, the part must be replaced"
)
_ASPM_POLICY = "/sys/module/pcie_aspm/parameters/policy"
_INVALID = r"PCI I/O region assigned to your NVIDIA device is invalid"
_OFF_THE_BUS = r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\).*?: 79,"
# errors of the link itself, each of which makes it send a packet again
_REPLAYS = ("BadTLP", "BadDLLP", "Rollover", "Timeout")
# DCGM's health watch calls more than this many replays a minute unhealthy (DCGM_LIMIT_MAX_PCIREPLAY_RATE)
_REPLAYS_A_MINUTE = 8
# a single non-fatal error may come from a reset; a link with errors every day is bad
_DAY_SECONDS = 86400
# each enumeration of the bus queries functions that don't exist yet
_HARMLESS = ("TOTAL_ERR_NONFATAL", "TOTAL_ERR_FATAL", "UnsupReq")


@prerequisite_check(
    "bar-too-small",
    title="The firmware assigned address windows to the GPUs",
    looks_at="the memory windows (BARs) in /sys/bus/pci/devices/*/resource: windows without an address, or "
    "fewer than two on a GPU without a driver; and the driver's BAR errors in the kernel's log.",
    fix=hardware.ABOVE_4G,
    refs=("https://github.com/NVIDIA/open-gpu-kernel-modules/issues/862",),
)
def bar_too_small(node: Node) -> Verdict:
    """The driver accesses a GPU's memory through windows of up to its whole size. Without 'Above 4G decoding'
    (for newer GPUs also 'Resizable BAR') in the firmware, or enough address space in a virtual machine, they
    don't fit, and the driver refuses the GPU.
    """
    if not node.gpus:
        return skip("this node has no GPU to check")
    evidence: list[Evidence] = []
    whole = short = 0
    for gpu in node.gpus:
        before = len(evidence)
        bars = pci.memory_bars(node.host, gpu.address)
        evidence += [
            seen(f"{DEVICES}/{gpu.address}/resource", f"BAR{bar.number}: no address for {bar.size >> 20} MiB")
            for bar in bars or ()
            if not bar.assigned
        ]
        if bars is not None and len(bars) < 2 and gpu.driver is None and node.module is not None:
            evidence.append(
                seen(
                    f"{DEVICES}/{gpu.address}/resource",
                    f"{many(len(bars), 'memory window')} instead of two or three",
                )
            )
        whole += gpu.driver == "nvidia" and len(evidence) == before
        short += len(evidence) > before
    if not evidence and node.module is None:
        evidence += [seen(SOURCE, line.text) for line, _ in hardware.log_lines(node, _INVALID)[:3]]
    if not evidence:
        return ok("every GPU has its address windows")
    fix = hardware.ABOVE_4G
    if node.kind == VM:
        fix = hardware.more_address_space(node.host.read_text("/sys/class/dmi/id/sys_vendor") or "")
    # a GPU that works beside it proves that the machine supports such windows
    summary = f"the firmware assigned no address window to {many(short, 'GPU') if short > 1 else 'a GPU'}"
    return (warn if whole else fail)(summary, *evidence, fix=fix)


@bare_metal_check(
    "pcie-link-degraded",
    title="The PCIe links use all their lanes",
    severity="warning",
    looks_at="current_link_width of every GPU against max_link_width of the GPU and of the port above it. "
    "The speed isn't compared: an idle GPU lowers it.",
    fix=fixes.look("lspci -vv -d 10de: | grep -e ^[0-9a-f] -e LnkCap: -e LnkSta:", _RESEAT),
    needs=("gpu",),
    refs=("https://docs.nvidia.com/datacenter/dcgm/latest/user-guide/dcgm-diagnostics.html",),
)
def pcie_link_degraded(node: Node) -> Verdict:
    """Missing lanes slow copies between host and GPU in proportion. Usual causes: a card that isn't fully
    seated, a broken riser, or a slot that the firmware splits.
    """
    links = {gpu.address: pci.read_link(node.host, gpu.address) for gpu in node.gpus}
    known = {address: link for address, link in links.items() if link is not None}
    narrow = {address: link for address, link in known.items() if link.width < min(link.most, link.port_most)}
    if not known:
        return skip("the width of the links is unknown")
    if not narrow:
        return ok(f"{len(known)} links use all lanes that card and slot support")
    evidence = (
        seen(
            f"{DEVICES}/{address}/current_link_width",
            f"x{link.width}; the card supports x{link.most}, its port {link.port} x{link.port_most}",
        )
        for address, link in narrow.items()
    )
    return warn(
        f"{len(narrow)} of {many(len(known), 'GPU')} with fewer PCIe lanes than card and slot support",
        *evidence,
        fix=fixes.look(
            " && ".join(f"lspci -vv -s {address} | grep -e LnkCap: -e LnkSta:" for address in narrow), _RESEAT
        ),
    )


@check(
    "pcie-aer-errors",
    title="The PCIe links have no errors",
    severity="warning",
    looks_at="the counters aer_dev_fatal, aer_dev_nonfatal and aer_dev_correctable of every GPU since the "
    "boot; non-fatal errors only above one a day, corrected ones above eight a minute.",
    fix=fixes.look("dmesg | grep -i -e AER -e pcieport | tail -n 20", _RESEAT),
    needs=("gpu",),
    refs=("https://docs.kernel.org/PCI/pcieaer-howto.html",),
)
def pcie_aer_errors(node: Node) -> Verdict:
    """Link errors slow every copy, and eventually the GPU falls off the bus. Slot, riser, retimer and power
    are the usual causes.
    """
    seconds = uptime(node.host)
    evidence, counted = [], False
    for gpu in node.gpus:
        place = f"{DEVICES}/{gpu.address}"
        for kind in ("fatal", "nonfatal"):
            counters = pci.error_counters(node.host, gpu.address, kind)
            counted = counted or bool(counters)
            least = 0 if kind == "fatal" else max(1, seconds / _DAY_SECONDS)
            real = (name for name, number in counters.items() if number > least and name not in _HARMLESS)
            evidence += [seen(f"{place}/aer_dev_{kind}", f"{name} {counters[name]}") for name in real]
        counters = pci.error_counters(node.host, gpu.address, "correctable")
        replays = sum(counters.get(name, 0) for name in _REPLAYS)
        if seconds and replays > _REPLAYS_A_MINUTE * max(seconds / 60, 60):
            rate = f"{replays} link errors in {seconds / 3600:.0f} hours"
            evidence.append(seen(f"{place}/aer_dev_correctable", rate))
    if evidence:
        return warn("the PCIe link of a GPU has errors", *evidence)
    return (
        ok("the links have no significant errors")
        if counted
        else skip("the kernel doesn't count PCIe errors on this machine")
    )


@bare_metal_check(
    "iommu-acs",
    title="GPUs reach each other directly",
    severity="info",
    looks_at="the ACS control registers of the switch ports above the GPUs (root only), if at least two "
    "GPUs share a switch, and iommu= on the kernel's command line.",
    fix=hardware.kernel_argument("iommu=pt"),
    needs=("multi-gpu",),
    refs=("https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",),
)
def iommu_acs(node: Node) -> Verdict:
    """Access Control Services send traffic between GPUs up to the root complex, where the IOMMU checks it:
    NCCL gets slow or hangs. Virtual machines need this for isolation; a node that only runs containers
    doesn't.
    """
    if any(gpu.for_vms for gpu in node.gpus):
        return ok("the GPUs are reserved for virtual machines, which need ACS")
    redirecting = {gpu.address: pci.redirecting_bridges(node.host, gpu.address) for gpu in node.gpus}
    ports = sorted({port for bridges in redirecting.values() for port in bridges})
    shared = [port for port in ports if _between(node, port)]
    if not shared:
        return ok("no switch sends traffic between GPUs to the root complex")
    evidence = [
        seen(f"{DEVICES}/{port}/config", "ACS: requests or completions redirected") for port in shared
    ]
    value = node.module_options.argument("iommu")
    evidence.append(seen("/proc/cmdline", f"iommu={value}" if value else "no iommu=pt"))
    commands = (f"setpci -s {port} ECAP_ACS+0x6.w=0000" for port in shared)
    return note(
        f"{len(shared)} switch ports send traffic between GPUs through the root complex",
        *evidence,
        fix=Fix(" && ".join(commands)),
    )


def _between(node: Node, port: str) -> bool:
    """Whether a port belongs to a switch that two GPUs share: without one, their traffic meets at the root
    anyway."""
    above = {gpu.address: pci.bridges(node.host, gpu.address) for gpu in node.gpus}
    own = next(bridges for bridges in above.values() if port in bridges)
    higher = set(own[own.index(port) + 1 :])
    return bool(higher) and sum(bool(higher & set(bridges)) for bridges in above.values()) > 1


@bare_metal_check(
    "pcie-aspm",
    title="PCIe power saving didn't disconnect a GPU",
    severity="info",
    looks_at="the ASPM policy of the kernel, if XID 79 was logged in this boot.",
    fix=hardware.NO_ASPM,
    needs=("gpu",),
    refs=("https://github.com/NVIDIA/open-gpu-kernel-modules/issues/507",),
)
def pcie_aspm(node: Node) -> Verdict:
    """With active state power management an idle link sleeps. Some boards don't wake it in time, and the GPU
    falls off the bus.
    """
    policy = node.host.read_text(_ASPM_POLICY) or ""
    active = policy.partition("[")[2].partition("]")[0]
    lines = hardware.log_lines(node, _OFF_THE_BUS)
    if not lines:
        return ok("no GPU fell off the bus in this boot")
    if not active or active == "performance" or node.module_options.argument("pcie_aspm") == "off":
        return ok("power saving of the links is off")
    return note(
        "a GPU fell off the bus, and power saving of the links is on",
        seen(SOURCE, lines[0][0].text),
        seen(_ASPM_POLICY, active),
        fix=hardware.NO_ASPM.for_family(node.distribution.family),
    )


@bare_metal_check(
    "numa-affinity-missing",
    title="Every GPU has a NUMA node",
    severity="info",
    looks_at="numa_node of every GPU, on machines with several NUMA nodes that have processors.",
    fix=hardware.FIRMWARE_SETUP,
    needs=("gpu",),
    refs=("https://www.kernel.org/doc/Documentation/ABI/testing/sysfs-bus-pci",),
)
def numa_affinity_missing(node: Node) -> Verdict:
    """The kubelet's Topology Manager and the device plugin place work near a GPU with this number; without it
    they get no topology hints. The firmware's tables don't provide it (NPS and SNC settings).
    """
    nodes = pci.processor_nodes(node.host)
    if len(nodes) < 2:
        return ok("this machine has one NUMA node, or the kernel doesn't report NUMA nodes")
    # -1 means that the firmware doesn't report it; a missing file means nothing
    lost = [
        gpu
        for gpu in node.gpus
        if (node.host.read_text(f"{DEVICES}/{gpu.address}/numa_node") or "").strip() == "-1"
    ]
    if not lost:
        return ok("every GPU has a NUMA node")
    return note(
        f"{len(lost)} of {len(node.gpus)} GPUs have no NUMA node on a machine with {len(nodes)}",
        *(seen(f"{DEVICES}/{gpu.address}/numa_node", "-1") for gpu in lost),
        fix=hardware.FIRMWARE_SETUP,
    )
