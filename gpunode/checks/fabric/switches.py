"""NVSwitch fabrics: the fabric manager, its version, the topology it found, the GPUs' training."""

from __future__ import annotations

from gpunode.checks import fixes
from gpunode.checks.fabric import remedies
from gpunode.checks.model import (
    ANY_ENGINE,
    HOST,
    HOST_OR_CONTAINER,
    Check,
    Verdict,
    fail,
    ok,
    seen,
    skip,
    warn,
)
from gpunode.facts import fabric_manager as manager
from gpunode.facts.kernel_log import SOURCE, KernelLine, matching
from gpunode.facts.node import Node
from gpunode.facts.processes import boot_time, uptime
from gpunode.facts.xid_log import last_load
from gpunode.gpu.condition import Condition

_TRAINING_SECONDS = 300  # a fabric of eight GPUs is trained within a minute
_RECENT_SECONDS = 24 * 3600  # links also go down and up again with each reset of a GPU
_GUIDE = "https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/"
_SXID = r"SXid \(PCI:([0-9a-fA-F:.]+)\): (\d+), (Fatal|Non-fatal)"


def fabricmanager_version(node: Node) -> Verdict:
    loaded = node.module.version if node.module else ""
    package = manager.package_version(node.packages)
    if not loaded or package is None:
        return _by_log(node, loaded)
    name, version = package
    evidence = (seen(name, version), seen("/sys/module/nvidia/version", loaded))
    if version == loaded:
        return ok(f"the fabric manager is {version}, as the driver", *evidence)
    on_disk = node.module_file.version if node.module_file else ""
    what = f"the fabric manager is {version}, the loaded driver {loaded}"
    if _runs(node):
        if version == on_disk:
            return skip("the fabric manager is that of the driver which waits for a reboot")
        return warn(f"{what}: it won't start again", *evidence, fix=remedies.matching_manager(node, loaded))
    fix = fixes.REBOOT.other if version == on_disk else remedies.matching_manager(node, loaded)
    return fail(f"{what}: it doesn't start", *evidence, fix=fix)


def _by_log(node: Node, loaded: str) -> Verdict:
    """Without a package its own complaint, if it is about the driver that is loaded now."""
    for finding in node.fabric_log:
        versions = manager.versions_in(finding.text) if finding.kind == "version" else None
        if versions and versions[1] == loaded and versions[0] != loaded and not _runs(node):
            return fail(
                f"the fabric manager is {versions[0]}, the loaded driver {loaded}: it doesn't start",
                seen(manager.LOG, finding.text, finding.line),
                fix=remedies.matching_manager(node, loaded),
            )
    return skip("no package tells the fabric manager's version")


def _runs(node: Node) -> bool:
    """As a unit, or in the driver's container, whose processes the node sees."""
    unit = node.units.get(manager.UNIT)
    return (unit is not None and unit.runs) or any(one.name == manager.PROGRAM for one in node.processes)


def fabricmanager_missing(node: Node) -> Verdict:
    if _runs(node):
        return ok("the fabric manager runs")
    states = {one.fabric.state for one in node.conditions if not one.error}
    if states == {"completed"}:
        return ok("every GPU is registered with its fabric", seen("NVML", "fabric state completed"))
    unit = node.units.get(manager.UNIT)
    if unit is None:
        return skip("systemd doesn't tell whether the fabric manager runs")
    switches = f"{len(node.switches)} NVSwitches"
    if not unit.installed:
        fix = remedies.missing_manager(node)
        evidence = (seen(manager.UNIT, "not installed"), seen("NVSwitch", switches))
        return fail("this node has NVSwitches and no fabric manager", *evidence, fix=fix)
    evidence = (seen(manager.UNIT, str(unit)), seen("NVSwitch", switches))
    blackwell = any(switch.driver == "mlx5_core" for switch in node.switches)
    lacking = manager.lacking(node.host) if blackwell else ()
    if lacking:
        parts = (seen(place, what) for place, what, _ in lacking)
        fix = remedies.complete_manager(node, tuple(need for _, _, need in lacking))
        return fail("the fabric manager doesn't run and lacks what it needs", *evidence, *parts, fix=fix)
    return fail("the fabric manager doesn't run", *evidence, fix=remedies.START_MANAGER.other)


def fabric_topology(node: Node) -> Verdict:
    lines = {finding.kind: finding for finding in node.fabric_log if _of_this_boot(node)}
    logged = {kind: seen(manager.LOG, one.text, one.line) for kind, one in lines.items()}
    if "topology" in logged and not _runs(node):
        return fail("the fabric manager misses NVSwitches", logged["topology"])
    reported = _switch_errors(node)
    fatal = [seen(SOURCE, line.text) for line, kind in reported if kind == "Fatal"]
    mild = [seen(SOURCE, line.text) for line, kind in reported if kind != "Fatal" and _recent(node, line)]
    fatal += [logged["fatal"]] if "fatal" in logged and not fatal else []
    # the fabric manager repeats what the kernel's log has, where its age can be told
    mild += [logged["non-fatal"]] if "non-fatal" in logged and not reported else []
    if fatal:
        return fail("an NVSwitch reports a fatal error", *fatal[-4:])
    if mild:
        return warn("an NVSwitch reports errors", *mild[-4:])
    return ok("no NVSwitch reports an error")


def _of_this_boot(node: Node) -> bool:
    """The log's last part is this boot's where the fabric manager runs, or has failed since the boot."""
    unit = node.units.get(manager.UNIT)
    return _runs(node) or (unit is not None and unit.active == "failed")


def _switch_errors(node: Node) -> list[tuple[KernelLine, str]]:
    """Lines of the kernel's log and how grave they are, since the driver was last loaded."""
    loaded = last_load(node.kernel_log)
    return [(line, match[3]) for line, match in matching(node.kernel_log, _SXID) if line.seconds >= loaded]


def _recent(node: Node, line: KernelLine) -> bool:
    now = uptime(node.host)
    return not now or now - line.seconds < _RECENT_SECONDS


def fabric_training(node: Node) -> Verdict:
    if "NvLinkDisable: 1" in (node.host.read_text("/proc/driver/nvidia/params") or ""):
        return skip("NVLink is switched off (NVreg_NvLinkDisable=1)")
    # a GPU that is partitioned computes without its fabric
    known = [one for one in node.conditions if one.fabric.state is not None and not one.mig_mode]
    if not known:
        return skip("NVML tells of no fabric on this node")
    waiting = [one for one in known if one.fabric.state != "completed"]
    if waiting and 0 < node.host.now() - boot_time(node.host) < _TRAINING_SECONDS:
        return skip("the node has just booted, its fabric is being trained")
    wrong = [one for one in known if one.fabric.state == "completed" and one.fabric.status not in (None, 0)]
    if waiting or wrong:
        evidence = tuple(seen(_gpu(one), _fabric(one)) for one in (*waiting, *wrong)[:8])
        return fail(f"{len(evidence)} of {len(known)} GPUs aren't part of their NVLink fabric", *evidence)
    ill = [(one, problem) for one in known if (problem := _health(one.fabric.health))]
    if ill:
        whose = "one GPU" if len(ill) == 1 else f"{len(ill)} GPUs"
        return warn(
            f"the NVLink fabric of {whose} is impaired", *(seen(_gpu(one), what) for one, what in ill)
        )
    return ok(f"{len(known)} GPUs are part of their NVLink fabric")


def _gpu(one: Condition) -> str:
    return f"NVML, GPU {one.index} ({one.pci})"


def _fabric(one: Condition) -> str:
    code = "" if one.fabric.status in (None, 0) else f", NVML code {one.fabric.status}"
    return f"fabric state {one.fabric.state}{code}"


def _health(mask: int | None) -> str:
    """nvml.h, NVML_GPU_FABRIC_HEALTH_MASK_*: two bits each, 1 for true; a route recovery passes by itself."""
    words = ((0, "degraded bandwidth"), (4, "unhealthy route"), (6, "access timeout recovery"))
    return ", ".join(word for shift, word in words if ((mask or 0) >> shift) & 3 == 1)


CHECKS = (
    Check(
        id="fabricmanager-version",
        title="The fabric manager is the driver's own version",
        layer="fabric",
        severity="error",
        looks_at=f"the fabric manager's package, or its complaint in {manager.LOG}, and the loaded driver.",
        why=(
            "The fabric manager refuses a driver of another version. The NVSwitches then stay as they are "
            "and CUDA fails with error 802, system not yet initialized."
        ),
        remedy=remedies.MATCHING_MANAGER,
        run=fabricmanager_version,
        blocked_by=("module-not-loaded",),
        classes=HOST,
        refs=(_GUIDE,),
        needs=("nvswitch",),
        unless=("operator-driver",),  # whose container has its own, whatever the node's package is
        preflight=ANY_ENGINE,
    ),
    Check(
        id="fabric-topology",
        title="The NVSwitches are all there and free of errors",
        layer="fabric",
        severity="error",
        looks_at=(
            "SXid lines of the kernel's log (the last day of those that aren't fatal), and "
            f"{manager.LOG} since the fabric manager's last start."
        ),
        why=(
            "With a switch missing or in a fatal state the fabric manager gives up, and CUDA fails with "
            "error 802 on every GPU behind it. Some of these go away when the node is without power for a "
            "minute; the others are hardware."
        ),
        remedy=remedies.READ_MANAGER_LOG,
        run=fabric_topology,
        blocked_by=("module-not-loaded", "fabricmanager-version"),
        classes=HOST,
        refs=(_GUIDE,),
        needs=("nvswitch",),
        preflight=ANY_ENGINE,
    ),
    Check(
        id="fabricmanager-missing",
        title="The fabric manager runs",
        layer="fabric",
        severity="error",
        looks_at=(
            "NVSwitches on the PCI bus (or on the management cards of a Blackwell baseboard), "
            f"{manager.UNIT} and processes {manager.PROGRAM}."
        ),
        why=(
            "Nobody else sets the NVSwitches up. nvidia-smi looks fine without it, and every CUDA program "
            "fails with error 802, system not yet initialized."
        ),
        remedy=remedies.MATCHING_MANAGER,
        run=fabricmanager_missing,
        blocked_by=("module-not-loaded", "fabricmanager-version", "fabric-topology"),
        classes=HOST,
        refs=(_GUIDE,),
        needs=("nvswitch",),
        preflight=ANY_ENGINE,
    ),
    Check(
        id="fabric-training",
        title="The GPUs are part of their NVLink fabric",
        layer="fabric",
        severity="error",
        looks_at="what NVML says of each GPU's fabric: its state, the outcome of the training, its health.",
        why=(
            "A GPU that its fabric hasn't taken in can't start CUDA (error 802); one with a degraded link is "
            "slow in everything that several GPUs do together."
        ),
        remedy=remedies.READ_MANAGER_LOG,
        run=fabric_training,
        blocked_by=(
            *("module-not-loaded", "nvml-hang", "fabricmanager-version", "fabric-topology"),
            "fabricmanager-missing",
        ),
        classes=HOST_OR_CONTAINER,
        refs=(_GUIDE,),
    ),
)
