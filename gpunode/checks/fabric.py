"""Checks of NVSwitch fabrics, the fabric manager, GPUDirect, vGPU licences and confidential computing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from gpunode.checks import driver_packages, fixes, health
from gpunode.checks.finding import DISRUPTS_NOTHING, RESTARTS_FABRIC_MANAGER, RESTARTS_PLUGINS, Fix
from gpunode.checks.model import (
    HOST_OR_CONTAINER,
    Verdict,
    check,
    fail,
    note,
    ok,
    prerequisite_check,
    seen,
    skip,
    warn,
)
from gpunode.checks.units import after_reading_log, runs, seen_unit
from gpunode.facts import fabric
from gpunode.facts.driver import module_loaded, parameters, version_numbers
from gpunode.facts.driver_targets import has_repository
from gpunode.facts.gpudirect import (
    INFINIBAND,
    by_dmabuf,
    infiniband_cards,
    infiniband_ports,
    installed_extras,
    loaded_at_boot,
)
from gpunode.facts.kernel_log import SOURCE, KernelLine, last_load, matching
from gpunode.facts.node import Node
from gpunode.facts.processes import boot_time, uptime
from gpunode.facts.system import VM
from gpunode.facts.traits import TRAITS
from gpunode.gpu.nvml_health import Condition

nvswitch_check = partial(prerequisite_check, needs=("nvswitch",))

# GPUs beside network cards and disks: GPUDirect RDMA, GPUDirect Storage, GDRCopy.

_INVALID = r"nvidia[-_]peermem .*detected invalid context"
_LOADER = "systemd-modules-load.service"


@check(
    "peermem",
    title="Network cards can access GPU memory directly",
    severity="warning",
    looks_at=f"cards in {INFINIBAND} that use the driver mlx5_core, the module nvidia_peermem, "
    "modules-load.d and the kernel's log.",
    fix=Fix("modprobe nvidia-peermem"),
    blocked_by=("module-not-loaded",),
    refs=("https://docs.nvidia.com/cuda/gpudirect-rdma/",),
)
def peermem(node: Node) -> Verdict:
    """GPUDirect RDMA needs nvidia_peermem, or the open modules with kernel 5.12 or newer (DMA-BUF). With
    neither, NCCL copies through host memory, at a fraction of the speed.
    """
    cards = infiniband_cards(node.host)
    if not cards:
        return skip("this node has no NVIDIA InfiniBand or RoCE card")
    invalid = [line for line, _ in matching(node.kernel_log, _INVALID) if _recent(node, line)]
    if invalid:
        lines = (seen(SOURCE, line.text) for line in invalid[-3:])
        again = Fix("modprobe -r nvidia-peermem && modprobe nvidia-peermem", disruptive="drain")
        return warn(f"nvidia_peermem has lost {len(invalid)} of its mappings", *lines, fix=again)
    if module_loaded(node.host, "nvidia_peermem"):
        return ok("nvidia_peermem is loaded")
    listed = loaded_at_boot(node.host, "nvidia-peermem")
    is_open = node.module.open if node.module else None
    shared = by_dmabuf(is_open, node.kernel)
    evidence = [
        seen("/proc/modules", "nvidia_peermem is not loaded"),
        seen(INFINIBAND, ", ".join(cards[:4])),
    ]
    if is_open is not None:
        kind = f"{'open' if is_open else 'proprietary'} modules with kernel {node.kernel}"
        how = "can also use DMA-BUF" if shared else "need nvidia_peermem"
        evidence.append(seen("/proc/driver/nvidia/version", f"{kind} {how}"))
    # a package may list it for kernels that need it; a line in /etc was added by an administrator
    if listed and (not shared or listed[0].startswith("/etc/")):
        path, line = listed
        entry = seen(path, "nvidia-peermem", line)
        summary = "nvidia_peermem is configured to load at boot, but is not loaded"
        loader = node.units.get(_LOADER)
        if loader is None or not loader.has_failed:
            return warn(summary, entry, *evidence)
        fix = after_reading_log(_LOADER, Fix("modprobe nvidia-peermem"))
        return warn(summary, entry, *evidence, *seen_unit(node, _LOADER), fix=fix)
    if shared:
        return ok("the open modules and this kernel share GPU memory through DMA-BUF")
    if not infiniband_ports(node.host, cards):
        return ok("no InfiniBand port is up, so nvidia_peermem isn't needed")
    return note("network cards can't access GPU memory directly: nvidia_peermem isn't loaded", *evidence)


@check(
    "gds-gdrcopy",
    title="The modules of GPUDirect Storage and GDRCopy are loaded",
    severity="info",
    looks_at="whether nvidia_fs and gdrdrv are built for the running kernel, and loaded.",
    fix=Fix("modprobe nvidia_fs; modprobe gdrdrv"),
    blocked_by=("module-not-loaded",),
    refs=("https://docs.nvidia.com/gpudirect-storage/", "https://github.com/NVIDIA/gdrcopy"),
)
def gds_gdrcopy(node: Node) -> Verdict:
    """Without their module, programs that use cuFile or GDRCopy copy through host memory instead."""
    installed = tuple(installed_extras(node.host, node.kernel))
    if not installed:
        return skip("neither GPUDirect Storage nor GDRCopy is installed")
    missing = [extra for extra in installed if not module_loaded(node.host, extra.module)]
    if not missing:
        return ok(f"{' and '.join(extra.name for extra in installed)}: the module is loaded")
    command = " && ".join(f"modprobe {extra.module}" for extra in missing)
    return note(
        f"{' and '.join(extra.name for extra in missing)}: the kernel module is installed but not loaded",
        *(seen(extra.source, f"{extra.module} exists, but is not in /proc/modules") for extra in missing),
        fix=Fix(command),
    )


# Fixes for the fabric, MIG layouts and virtual GPUs.

_ENABLE = Fix(
    "systemctl enable --now nvidia-fabricmanager", disruptive="restart", disturbs=RESTARTS_FABRIC_MANAGER
)
# a running manager loads the new version only when it restarts
_RESTART = "systemctl enable nvidia-fabricmanager && systemctl restart nvidia-fabricmanager"
_HOLDERS = ("nvidia-persistenced", "nvidia-dcgm")
_ONE_NAME = 580  # the first branch of which the package has one name in all of NVIDIA's repositories
_VERSION = "$(cat /sys/module/nvidia/version)"

# apt takes a pattern for the packager's revision
MATCHING_MANAGER = fixes.per_family(
    f'apt install "nvidia-fabricmanager={_VERSION}*" && {_RESTART}',
    f"dnf install nvidia-fabricmanager-{_VERSION} && {_RESTART}",
    f"zypper install nvidia-fabricmanager={_VERSION} && {_RESTART}",
    "follow https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/",
    disruptive="restart",
    disturbs=RESTARTS_FABRIC_MANAGER,
)
_LAYOUT = "/etc/gpunode-mig.yaml"
KEEP_LAYOUT = Fix(
    f"gpunode mig export > {_LAYOUT} && gpunode mig apply --config-file {_LAYOUT} --persist",
    note="This saves the present layout and has it applied at each boot. It changes no MIG device now",
)
MIXED_STRATEGY = replace(fixes.set_plugin_variable("MIG_STRATEGY=mixed"), needs_root=False)
# the operator reverts changes of its own objects
OPERATORS_STRATEGY = Fix(
    "kubectl patch clusterpolicies.nvidia.com/cluster-policy --type merge "
    """--patch '{"spec": {"mig": {"strategy": "mixed"}}}'""",
    needs_root=False,
    disruptive="restart",
    disturbs=RESTARTS_PLUGINS,
)
# guests get their driver from the host's administrator, not from a public repository
GUEST_DRIVER = Fix(
    "follow https://docs.nvidia.com/vgpu/",
    note="Ask the host's administrator or the cloud provider for the guest driver of the host's vGPU "
    "release, install it and reboot, which ends this machine's containers; or have the host's vGPU manager "
    "upgraded to this driver's release",
)
DRIVER_PODS = Fix(
    "kubectl get pods --all-namespaces --output wide --selector app.kubernetes.io/component=nvidia-driver",
    needs_root=False,
)
READ_MANAGER_LOG = fixes.look(
    "journalctl -b -u nvidia-fabricmanager -n 50",
    "The log names the NVSwitch or link. Stop the GPU work and disconnect the node's power for a "
    "minute; if "
    "the fault "
    "returns, the part must be replaced",
)


def matching_manager(node: Node, version: str) -> Fix | None:
    """Install the package with exactly the loaded driver's version, under its name on this distribution; None
    if that is unknown."""
    numbers = version_numbers(version)
    if not numbers:
        return None
    name = _manager_package(node, numbers[0])
    command = {
        "debian": f"apt install '{name}={version}*'",
        "rhel": f"dnf install {name}-{version}",
        "suse": f"zypper install --oldpackage {name}={version}",
    }.get(node.distribution.family)
    if not command:
        return None
    return Fix(f"{command} && {_RESTART}", disruptive="restart", disturbs=RESTARTS_FABRIC_MANAGER)


def _manager_package(node: Node, branch: int) -> str:
    """Name of the installed package, if it is of this branch. Ubuntu's archive has the branch in the name;
    NVIDIA's repositories do so for apt, and write the name differently for rpm, up to 575."""
    installed = fabric.package_version(node.packages)
    if installed is not None and version_numbers(installed[1])[:1] == (branch,):
        return installed[0]
    if node.distribution.family != "debian":
        return "nvidia-fabricmanager" if branch >= _ONE_NAME else "nvidia-fabric-manager"
    archive = node.distribution.id == "ubuntu" and not has_repository(node.host)
    is_versioned = branch < _ONE_NAME or archive or driver_packages.from_ubuntu(node)
    return f"nvidia-fabricmanager-{branch}" if is_versioned else "nvidia-fabricmanager"


def missing_manager(node: Node) -> Fix | None:
    """The GPU operator's driver includes its own fabric manager: its pod reports the failure."""
    if TRAITS["operator-driver"].holds(node):
        return DRIVER_PODS
    return matching_manager(node, node.module.version if node.module else "")


def complete_manager(node: Node, needs: tuple[str, ...]) -> Fix | None:
    """Packages that the fabric manager of a Blackwell baseboard needs, and the module ib_umad."""
    names = [need for need in needs if need != fabric.IB_UMAD]
    install = fixes.packages(node.distribution.family, "install", names)
    if names and not install:
        return None
    fix = _ENABLE.after(f"modprobe {fabric.IB_UMAD}") if fabric.IB_UMAD in needs else _ENABLE
    return fix.after(install) if install else fix


def reset(node: Node, gpus: Iterable[Condition]) -> Fix:
    """Reset these once they are idle: services that only monitor GPUs also hold them."""
    running = " ".join(name for name in _HOLDERS if runs(node, f"{name}.service"))
    plain = health.reset_gpus(node, tuple(gpus))
    if not running or plain.disruptive != "drain":
        return plain
    command = f"systemctl stop {running} && {plain.command}; systemctl start {running}"
    return replace(plain, command=command)


_TRAINING_SECONDS = 300  # a fabric of eight GPUs is trained within a minute
_RECENT_SECONDS = 24 * 3600  # links also go down and up again with each reset of a GPU
_GUIDE = "https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/"
_SXID = r"SXid \(PCI:([0-9a-fA-F:.]+)\): (\d+), (Fatal|Non-fatal)"


@nvswitch_check(
    "fabricmanager-version",
    title="The fabric manager has the driver's version",
    looks_at=f"the fabric manager's package, or its error in {fabric.LOG}, and the loaded driver.",
    fix=MATCHING_MANAGER,
    blocked_by=("module-not-loaded",),
    refs=(_GUIDE,),
    unless=("operator-driver",),
)
def fabricmanager_version(node: Node) -> Verdict:
    """The fabric manager refuses to run with a driver of another version. The NVSwitches are then not
    configured, and CUDA fails with error 802, system not yet initialized.
    """
    loaded = node.module.version if node.module else ""
    package = fabric.package_version(node.packages)
    if not loaded or package is None:
        return _by_log(node, loaded)
    name, version = package
    evidence = (seen(name, version), seen("/sys/module/nvidia/version", loaded))
    if version == loaded:
        return ok(f"fabric manager and driver both have version {version}", *evidence)
    on_disk = node.module_file.version if node.module_file else ""
    what = f"the fabric manager is {version}, but the loaded driver is {loaded}"
    if _runs(node):
        if version == on_disk:
            return skip("the fabric manager matches the driver that becomes active after a reboot")
        return warn(f"{what}: it can't start again", *evidence, fix=matching_manager(node, loaded))
    fix = fixes.REBOOT if version == on_disk else matching_manager(node, loaded)
    return fail(f"{what}: it can't start", *evidence, fix=fix)


def _by_log(node: Node, loaded: str) -> Verdict:
    """The fabric manager's own error, if no package is installed and it concerns the loaded driver."""
    for finding in node.fabric_log:
        versions = fabric.versions_in(finding.text) if finding.kind == "version" else None
        if versions and versions[1] == loaded and versions[0] != loaded and not _runs(node):
            return fail(
                f"the fabric manager is {versions[0]}, but the loaded driver is {loaded}: it can't start",
                seen(fabric.LOG, finding.text, finding.line),
                fix=matching_manager(node, loaded),
            )
    return skip("the fabric manager's version is unknown")


def _runs(node: Node) -> bool:
    """Whether it runs as a unit or in the driver's container: the node sees its processes."""
    return runs(node, fabric.UNIT) or any(process.name == fabric.PROGRAM for process in node.processes)


@nvswitch_check(
    "fabricmanager-missing",
    title="The fabric manager is running",
    looks_at="NVSwitches on the PCI bus (or on the management cards of a Blackwell baseboard), "
    f"{fabric.UNIT} and processes {fabric.PROGRAM}.",
    fix=MATCHING_MANAGER,
    blocked_by=("module-not-loaded", "fabricmanager-version", "fabric-topology"),
    refs=(_GUIDE,),
)
def fabricmanager_missing(node: Node) -> Verdict:
    """Only the fabric manager configures the NVSwitches. nvidia-smi works without it, but every CUDA program
    fails with error 802, system not yet initialized.
    """
    if _runs(node):
        return ok("the fabric manager is running")
    states = {condition.fabric.state for condition in node.conditions if not condition.error}
    if states == {"completed"}:
        return ok("every GPU is registered with its fabric", seen("NVML", "fabric state completed"))
    unit = node.units.get(fabric.UNIT)
    if unit is None:
        return skip("systemd doesn't report whether the fabric manager is running")
    switches = f"{len(node.switches)} NVSwitches"
    if not unit.installed:
        fix = missing_manager(node)
        evidence = (seen(fabric.UNIT, "not installed"), seen("NVSwitch", switches))
        return fail("this node has NVSwitches, but no fabric manager is installed", *evidence, fix=fix)
    evidence = (seen(fabric.UNIT, str(unit)), seen("NVSwitch", switches))
    blackwell = any(switch.driver == "mlx5_core" for switch in node.switches)
    missing = fabric.missing_requirements(node.host) if blackwell else ()
    if missing:
        parts = (seen(requirement.path, requirement.state) for requirement in missing)
        fix = complete_manager(node, tuple(requirement.need for requirement in missing))
        return fail(
            "the fabric manager isn't running, and its prerequisites are missing", *evidence, *parts, fix=fix
        )
    return fail("the fabric manager isn't running", *evidence, fix=_ENABLE)


@nvswitch_check(
    "fabric-topology",
    title="All NVSwitches are present and report no errors",
    looks_at=f"SXid lines in the kernel's log (non-fatal ones of the last day only), and {fabric.LOG} "
    "since the fabric manager's last start.",
    fix=READ_MANAGER_LOG,
    blocked_by=("module-not-loaded", "fabricmanager-version"),
    refs=(_GUIDE,),
)
def fabric_topology(node: Node) -> Verdict:
    """With a missing or failed switch the fabric manager exits, and CUDA fails with error 802 on every GPU
    behind that switch. Disconnecting power for a minute clears some of these faults; the others need new
    hardware.
    """
    lines = {finding.kind: finding for finding in node.fabric_log if _of_this_boot(node)}
    logged = {kind: seen(fabric.LOG, entry.text, entry.line) for kind, entry in lines.items()}
    if "topology" in logged and not _runs(node):
        return fail("the fabric manager reports missing NVSwitches", logged["topology"])
    loaded = last_load(node.kernel_log)
    reported = [(line, kind[3]) for line, kind in matching(node.kernel_log, _SXID) if line.seconds >= loaded]
    fatal = [seen(SOURCE, line.text) for line, kind in reported if kind == "Fatal"]
    mild = [seen(SOURCE, line.text) for line, kind in reported if kind != "Fatal" and _recent(node, line)]
    fatal += [logged["fatal"]] if "fatal" in logged and not fatal else []
    # the fabric manager repeats lines of the kernel's log, where their age is known
    mild += [logged["non-fatal"]] if "non-fatal" in logged and not reported else []
    if fatal:
        return fail("an NVSwitch reports a fatal error", *fatal[-4:])
    if mild:
        return warn("an NVSwitch reports errors", *mild[-4:])
    return ok("no NVSwitch reports an error")


def _of_this_boot(node: Node) -> bool:
    """The log's last part is from this boot if the fabric manager runs, or has failed since the boot."""
    unit = node.units.get(fabric.UNIT)
    return _runs(node) or (unit is not None and unit.active == "failed")


def _recent(node: Node, line: KernelLine) -> bool:
    now = uptime(node.host)
    return not now or now - line.seconds < _RECENT_SECONDS


@check(
    "fabric-training",
    title="All GPUs have joined their NVLink fabric",
    looks_at="each GPU's fabric as NVML reports it: its state, the result of the training, its health.",
    fix=READ_MANAGER_LOG,
    blocked_by=(
        "module-not-loaded",
        "nvml-hang",
        "fabricmanager-version",
        "fabric-topology",
        "fabricmanager-missing",
    ),
    classes=HOST_OR_CONTAINER,
    refs=(_GUIDE,),
)
def fabric_training(node: Node) -> Verdict:
    """A GPU that hasn't joined its fabric can't start CUDA (error 802). A GPU with a degraded link slows all
    multi-GPU work down.
    """
    if parameters(node.host).get("NvLinkDisable") == "1":
        return skip("NVLink is disabled (NVreg_NvLinkDisable=1)")
    # a partitioned GPU computes without its fabric
    known = [
        condition
        for condition in node.conditions
        if condition.fabric.state is not None and not condition.mig_mode
    ]
    if not known:
        return skip("NVML reports no fabric on this node")
    waiting = [gpu for gpu in known if gpu.fabric.state != "completed"]
    if waiting and 0 < node.host.now() - boot_time(node.host) < _TRAINING_SECONDS:
        return skip("the node has just booted and its fabric is still in training")
    wrong = [gpu for gpu in known if gpu.fabric.state == "completed" and gpu.fabric.status not in (None, 0)]
    if waiting or wrong:
        evidence = tuple(health.on_gpu(gpu, _fabric(gpu)) for gpu in (*waiting, *wrong)[:8])
        return fail(f"{len(evidence)} of {len(known)} GPUs haven't joined their NVLink fabric", *evidence)
    degraded = [(gpu, problem) for gpu in known if (problem := _health(gpu.fabric.health))]
    if degraded:
        affected = "one GPU" if len(degraded) == 1 else f"{len(degraded)} GPUs"
        return warn(
            f"the NVLink fabric of {affected} is degraded",
            *(health.on_gpu(gpu, what) for gpu, what in degraded),
        )
    return ok(f"{len(known)} GPUs have joined their NVLink fabric")


def _fabric(condition: Condition) -> str:
    code = "" if condition.fabric.status in (None, 0) else f", NVML code {condition.fabric.status}"
    return f"fabric state {condition.fabric.state}{code}"


def _health(mask: int | None) -> str:
    """nvml.h, NVML_GPU_FABRIC_HEALTH_MASK_*: two bits each, 1 for true; a route recovery ends by itself."""
    words = ((0, "degraded bandwidth"), (4, "unhealthy route"), (6, "access timeout recovery"))
    return ", ".join(word for shift, word in words if ((mask or 0) >> shift) & 3 == 1)


# Virtual GPUs (vGPU) as the guest sees them, and confidential computing.

_TOKENS = "/etc/nvidia/ClientConfigToken"
_TOKEN = "client_configuration_token_*.tok"  # noqa: S105 - as the licence portal names its files
_SETTINGS = "/etc/nvidia/gridd.conf"
_UNIT = "nvidia-gridd.service"
_LICENCE_SECONDS = 300  # nvidia-gridd requests a licence within the first minutes after a boot
# what the guest driver logs if the host refuses it, or is too old for it
_REFUSED = (
    r"SetGuestSystemInfo: The host version \(([\d.]+)\) is too old"
    r"|Incompatible Guest/Host drivers|Guest driver is incompatible with host driver"
    r"|[vV]GPU.{0,80}version mismatch"
)


@check(
    "vgpu-license",
    title="Virtual GPUs have a licence",
    severity="warning",
    looks_at=f"the licences that NVML reports, {_UNIT}, {_SETTINGS} and tokens in {_TOKENS}.",
    fix=fixes.look(
        f"journalctl -b -u {_UNIT} -n 30; timedatectl",
        "Correct the token, the clock or the route to the licence server that the log names",
    ),
    blocked_by=("module-not-loaded", "nvml-hang", "vgpu-driver-mismatch"),
    refs=("https://docs.nvidia.com/license-system/latest/nvidia-license-system-quick-start-guide/",),
    needs=("vgpu-guest",),
)
def vgpu_license(node: Node) -> Verdict:
    """A virtual GPU without a licence works at first and is throttled after some minutes; some profiles lose
    CUDA. Common causes are a missing token, a wrong clock and an unreachable licence server.
    """
    licensable = [condition for condition in node.conditions if condition.licence.supported]
    if not licensable:
        return skip("NVML reports no virtual GPU that needs a licence")
    without = [condition for condition in licensable if condition.licence.licensed is False]
    if not without:
        return ok("the virtual GPUs have a licence")
    if 0 < node.host.now() - boot_time(node.host) < _LICENCE_SECONDS:
        return skip("the node has just booted and nvidia-gridd is still requesting a licence")
    evidence = [
        health.on_gpu(condition, f"no licence{_products(condition.licence.products)}")
        for condition in without[:8]
    ]
    unit = node.units.get(_UNIT)
    if unit is not None and not unit.runs:
        fix = None if unit.has_failed else Fix(f"systemctl enable --now {_UNIT}")
        return warn(
            "the virtual GPUs have no licence: nvidia-gridd isn't running",
            *evidence,
            seen(_UNIT, unit),
            fix=fix,
        )
    if not _configured(node):
        fix = Fix(
            f"install -m 744 {_TOKEN} {_TOKENS}/ && systemctl restart nvidia-gridd",
            before="First download the token from NVIDIA's licensing portal into the current directory",
        )
        nothing = seen(_TOKENS, "no client configuration token")
        return warn(
            "the virtual GPUs have no licence: no token names a licence server", *evidence, nothing, fix=fix
        )
    return warn("the virtual GPUs have no licence", *evidence)


def _products(names: tuple[str, ...] | None) -> str:
    return f" for {', '.join(dict.fromkeys(names))}" if names else ""


def _configured(node: Node) -> bool:
    """A token of the licence service in the directory that gridd.conf sets, or the address of an older
    licence server. `Unreadable` if this user has no permission."""
    lines = (line.partition("=") for line in (node.host.read_text(_SETTINGS) or "").splitlines())
    settings = {key.strip(): value.strip().strip('"') for key, _, value in lines if not key.startswith("#")}
    tokens = settings.get("ClientConfigTokenPath") or _TOKENS
    return bool(settings.get("ServerAddress")) or bool(node.host.glob(tokens, "*.tok"))


@prerequisite_check(
    "vgpu-driver-mismatch",
    title="The guest driver is compatible with the host's vGPU manager",
    looks_at="messages of the guest driver about the host's vGPU manager in the kernel's log.",
    fix=GUEST_DRIVER,
    blocked_by=("module-not-loaded",),
    classes=(VM,),
    refs=("https://docs.nvidia.com/vgpu/",),
)
def vgpu_driver_mismatch(node: Node) -> Verdict:
    """Guest driver and host must have the same vGPU release or compatible ones. Otherwise the virtual GPU is
    disabled: it is on the bus, but no program can use it.
    """
    since = last_load(node.kernel_log)  # guest or host may have been upgraded since
    refusals = [(line, match) for line, match in matching(node.kernel_log, _REFUSED) if line.seconds >= since]
    if not refusals:
        return ok("the driver hasn't rejected the host's vGPU manager")
    line, match = refusals[-1]
    host = f" {match[1]}" if match[1] else ""
    loaded = node.module.version if node.module else ""
    evidence = [seen(SOURCE, line.text)]
    evidence += [seen("/sys/module/nvidia/version", loaded)] if loaded else []
    return fail(f"the host's vGPU manager{host} is incompatible with driver {loaded}".rstrip(), *evidence)


@check(
    "cc-mode",
    title="GPUs with confidential computing accept work",
    severity="warning",
    looks_at="the state of confidential computing in NVML, and whether the GPUs are set to ready.",
    fix=Fix(
        "nvidia-smi conf-compute -srs 1",
        before="First attest the GPUs: with this setting they accept work, whether attested or not",
        disturbs=DISRUPTS_NOTHING,
    ),
    blocked_by=("module-not-loaded", "nvml-hang"),
    refs=("https://docs.nvidia.com/confidential-computing/",),
)
def cc_mode(node: Node) -> Verdict:
    """With confidential computing on, GPUs refuse all work until they are attested and set to ready. Until
    then CUDA fails in every container.
    """
    answer = next((condition for condition in node.conditions if condition.cc_enabled is not None), None)
    if answer is None or not answer.cc_enabled:
        return (
            ok("confidential computing is off") if answer else skip("NVML reports no confidential computing")
        )
    if answer.cc_ready is not False:
        return ok("confidential computing is on and the GPUs accept work")
    return warn(
        "confidential computing is on, but the GPUs are not set to ready",
        seen("NVML, confidential computing", "on, GPUs not ready"),
    )
