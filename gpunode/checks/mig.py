"""Checks of MIG: modes that wait for a reset, GPUs without instances, layouts that a reboot deletes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from gpunode.checks import driver_packages, fabric, fixes
from gpunode.checks.cdi import NO_SPEC
from gpunode.checks.device_plugin import source
from gpunode.checks.finding import RESTARTS_PLUGIN, RESTARTS_PLUGINS, Evidence, Fix
from gpunode.checks.health import on_gpu, which
from gpunode.checks.model import Verdict, check, fail, next_boot_check, ok, seen, skip, warn
from gpunode.checks.security import driver_upgrade
from gpunode.facts import mig
from gpunode.facts.device_plugins import configuration, mig_strategy, shares_by_mps
from gpunode.facts.node import Node
from gpunode.facts.systemd import read_unit
from gpunode.gpu.model import Gpu, MigDevice
from gpunode.output.result import many

mig_check = partial(check, needs=("mig",))
mig_pod_check = partial(check, needs=("mig", "kubelet"))
_GUIDE = "https://docs.nvidia.com/datacenter/tesla/mig-user-guide/"
_PARTED = "https://github.com/NVIDIA/mig-parted"
_UNTOLD = "NVML doesn't report the MIG mode of these GPUs"
_CREATE = (
    "When MIG is on, create MIG devices, with FILE in the format of gpunode mig export:\n"
    "gpunode mig apply --config-file FILE --persist"
)
_ASKED = ("module-not-loaded", "driver-lib-mismatch", "nvml-hang")


@next_boot_check(
    "mig-mode-pending",
    title="No MIG mode change is waiting for a reset",
    looks_at="each GPU's MIG mode as NVML reports it: now, and after the next reset.",
    fix=fixes.RESET,
    blocked_by=_ASKED,
    refs=(_GUIDE,),
)
def mig_mode_pending(node: Node) -> Verdict:
    """A GPU in use keeps its old mode until it is reset: MIG devices can't be created before that, and a
    reboot changes the devices of the node.
    """
    known = [
        condition
        for condition in node.conditions
        if None not in (condition.mig_mode, condition.mig_mode_next)
    ]
    if not known:
        return skip(_UNTOLD)
    waiting = [gpu for gpu in known if gpu.mig_mode != gpu.mig_mode_next]
    if not waiting:
        return ok("no MIG mode change is pending")
    words = {True: "on", False: "off"}
    keep = " && ".join(f"nvidia-smi -i {gpu.pci} -mig {int(bool(gpu.mig_mode))}" for gpu in waiting)
    decide = (
        "To keep the present MIG mode, run only this, which disrupts nothing. To change it, as a reset or a "
        "reboot would, begin with the next step"
    )
    reset = fabric.reset(node, waiting)
    create = _CREATE if any(gpu.mig_mode_next for gpu in waiting) else ""
    return warn(
        f"the MIG mode of {which(tuple(waiting), node)} changes at the next reset",
        *(
            on_gpu(gpu, f"MIG is {words[bool(gpu.mig_mode)]}, will be {words[bool(gpu.mig_mode_next)]}")
            for gpu in waiting[:8]
        ),
        fix=replace(
            reset,
            before=f"{'. '.join(filter(None, (decide, reset.before)))}\n{keep}",
            note=". ".join(filter(None, (reset.note, create))),
        ),
    )


@mig_check(
    "mig-enabled-no-instances",
    title="GPUs with MIG enabled have MIG devices",
    looks_at="the MIG devices that NVML lists for each GPU with MIG enabled.",
    fix=Fix("nvidia-smi mig -cgi 19,19,19,19,19,19,19 -C"),
    blocked_by=(*_ASKED, "mig-mode-pending"),
    refs=(_GUIDE, _PARTED),
)
def mig_enabled_no_instances(node: Node) -> Verdict:
    """Programs can use such a GPU only through its MIG devices. Without any, CUDA finds no device, and
    NVIDIA's device plugin exits with 'has no MIG devices configured'. A reboot deletes the instances.
    """
    gpus = mig.partitioned(node)
    empty = [gpu for gpu in gpus if not gpu.mig]
    if not empty:
        return ok(f"{many(len(gpus), 'GPU')} have {sum(len(gpu.mig) for gpu in gpus)} MIG devices")
    evidence = [on_gpu(gpu, "MIG is on, no MIG device") for gpu in empty[:8]]
    unit = node.units.get(mig.UNIT)
    if unit is not None and unit.installed:
        evidence.append(seen(mig.UNIT, unit))
    fix = _instances(node, empty)
    every = node.nvml.inventory.gpus if node.nvml.inventory else ()
    count = f"{len(empty)} of {many(len(every), 'GPU')} {'is' if len(empty) == 1 else 'are'} unusable"
    what = f"{count}: MIG is enabled, but no MIG device exists"
    # NVIDIA's device plugin exits because of a single such GPU
    if len(empty) == len(every) or any(process.name != "gpunode" for process in node.plugin_processes):
        return fail(what, *evidence, fix=fix)
    return warn(what, *evidence, fix=fix)


_OWN_PLUGIN = "gpunode-device-plugin"
_ANOTHER_LAYOUT = (
    "For another layout, write it to FILE in the format of gpunode mig export, and: gpunode mig apply "
    "--config-file FILE --persist, which also applies it at each boot"
)


def _instances(node: Node, empty: list[Gpu]) -> Fix:
    """Create the configured instances again; without any, the smallest instances that each GPU supports."""
    unit = node.units.get(mig.UNIT)
    if unit is not None and unit.at_boot:
        note = f"This applies the layout that {mig.UNIT} is configured to apply at each boot"
        return Fix(f"systemctl restart {mig.UNIT}", disruptive="drain", note=note)
    cuts: dict[str, list[str]] = {}
    for gpu in empty:
        cuts.setdefault(_finest(gpu.name), []).append(str(gpu.index))
    if "" in cuts:
        return fixes.look(
            "nvidia-smi mig -lgip",
            "Choose profiles and create them: nvidia-smi mig -cgi PROFILES -C; or turn MIG off: nvidia-smi "
            "-mig 0",
        )
    commands = (f"nvidia-smi mig -i {','.join(indices)} -cgi {cut} -C" for cut, indices in cuts.items())
    layout = " and ".join(
        f"{len(cut.split(','))} MIG devices of the smallest profile on "
        f"{'each of ' if len(indices) > 1 else ''}GPU {', '.join(indices)}"
        for cut, indices in cuts.items()
    )
    return Fix(" && ".join(commands), note=f"This creates {layout}. {_ANOTHER_LAYOUT}")


def _finest(name: str) -> str:
    """The profiles of the smallest partitions (NVIDIA's MIG user guide): seven on most GPUs, four on some;
    empty if unknown."""
    if "A30" in name.split() or "RTX PRO 6000" in name:
        return "14,14,14,14"
    return "" if "RTX" in name else "19,19,19,19,19,19,19"


@mig_check(
    "mig-config-lost",
    title="The MIG layout is restored after a reboot",
    severity="warning",
    looks_at=f"{mig.UNIT}, a running MIG manager of the GPU operator, and the node's own units and start "
    "scripts that create MIG devices.",
    fix=fabric.KEEP_LAYOUT,
    blocked_by=(*_ASKED, "mig-enabled-no-instances"),
    refs=(_PARTED,),
    reboot=True,
)
def mig_config_lost(node: Node) -> Verdict:
    """The driver loses the instances at every reboot, on newer GPUs the MIG mode too: the node boots with
    other devices or none, and the next layout has other UUIDs.
    """
    gpus = [gpu for gpu in mig.partitioned(node) if gpu.mig]
    if not gpus:
        return skip("this node has no MIG devices")
    keeper = mig.keeper(node)
    if keeper:
        return ok("the MIG layout is restored after a reboot", seen(keeper, "creates MIG devices"))
    if mig.UNIT not in node.units:
        return skip(f"systemd doesn't report the state of {mig.UNIT}")
    count = sum(len(gpu.mig) for gpu in gpus)
    return warn(
        f"nothing restores the {count} MIG devices of this node after a reboot",
        *(on_gpu(gpu, _counted(gpu.mig, "×")) for gpu in gpus[:8]),
        seen(mig.UNIT, node.units[mig.UNIT]),
    )


def _counted(devices: tuple[MigDevice, ...], times: str) -> str:
    """The profiles of a GPU's MIG devices, each with its number: ``5 x 1g.10gb, 2 x 2g.20gb``."""
    profiles = Counter(device.profile for device in devices)
    return ", ".join(f"{number} {times} {profile}" for profile, number in sorted(profiles.items()))


@mig_check(
    "mig-cdi-stale",
    title="CDI specifications match the current MIG devices",
    looks_at="the names of devices in CDI specifications against the MIG devices that NVML lists.",
    fix=fixes.REFRESH_CDI,
    blocked_by=(*_ASKED, "mig-enabled-no-instances", "cdi-spec-stale"),
    refs=("https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/cdi-support.html",),
)
def mig_cdi_stale(node: Node) -> Verdict:
    """The MIG devices changed after this file was written, which gave them new UUIDs. Engines then report
    'unresolvable CDI devices', or give a container a MIG device that no longer exists.
    """
    specs = node.gpu_specs
    gpus = [gpu for gpu in mig.partitioned(node) if gpu.mig]
    if not specs or not gpus:
        return skip(NO_SPEC if not specs else "this node has no MIG devices")
    names = {name for spec in specs for name in spec.names}
    if any(name.startswith("MIG-") for name in names):
        expected = {device.uuid: gpu for gpu in gpus for device in gpu.mig}
    else:
        expected = {f"{gpu.index}:{device.index}": gpu for gpu in gpus for device in gpu.mig}
    missing = [name for name in expected if name not in names]
    if not missing:
        return ok(f"{specs[0].path} includes every MIG device")
    known = {str(gpu.uuid) for gpu in gpus}
    surplus = [name for name in names if name.startswith("MIG-") and name not in expected]
    surplus += [name for name in names if name in known]
    evidence = [seen(specs[0].path, f"MIG device {name} is missing") for name in missing[:3]]
    if len(missing) > 3:
        evidence.append(seen(specs[0].path, f"and {len(missing) - 3} more are missing"))
    evidence += [seen(specs[0].path, f"lists {name}, which doesn't exist") for name in sorted(surplus)[:3]]
    return fail(
        f"{specs[0].path} is for another MIG layout: "
        f"{len(missing)} of {len(expected)} MIG devices are missing",
        *evidence,
        fix=fixes.rewrite_cdi(specs[0].path, specs[0].kind),
    )


@mig_pod_check(
    "mig-nvml-regression",
    title="The driver counts MIG and whole GPUs correctly",
    severity="warning",
    looks_at="the driver's version on a Kubernetes node with MIG enabled on only some GPUs.",
    fix=driver_packages.UPGRADE_DRIVER,
    blocked_by=_ASKED,
    refs=("https://github.com/NVIDIA/gpu-operator/issues/1361",),
    table=mig.FAULTS,
)
def mig_nvml_regression(node: Node) -> Verdict:
    """Some releases of driver branch 570 report too few GPUs to the device plugin if MIG is enabled on only
    some of them: pods that request a whole GPU stay pending beside a free one.
    """
    inventory = node.nvml.inventory
    gpus = [gpu for gpu in inventory.gpus if not gpu.error] if inventory else []
    whole = [gpu for gpu in gpus if not gpu.mig_enabled]
    if not whole:
        return ok("all GPUs have MIG enabled")
    driver = node.module.version if node.module else ""
    fault = mig.known_fault(driver)
    if fault is None:
        return ok(f"driver {driver} has no known fault with MIG on only some GPUs")
    return warn(
        f"driver {driver} miscounts GPUs if only some of them have MIG enabled",
        seen("the loaded driver", driver),
        *(on_gpu(gpu, "MIG on" if gpu.mig_enabled else "MIG off") for gpu in gpus[:8]),
        seen(f"table {mig.FAULTS}", f"fixed in {fault}"),
        fix=driver_upgrade(node, fault),
    )


# MIG layouts against the device plugin's strategy for them.

_README = "https://github.com/NVIDIA/k8s-device-plugin#as-a-configuration-file"
# NVIDIA's plugin, when it exits because of a layout that its strategy doesn't support
_REFUSALS = ("must be configured with the same migEnabled value", "more than one MIG device type present")
_MPS_REFUSAL = "sharing using MPS is not supported for MIG devices"
_MPS_DAEMON = "mps-control-daemon"  # of NVIDIA's plugin; CUDA's own MPS supports MIG


_DRAIN = (
    "Drain before either change: under new names the kubelet counts devices in use as free, and a new layout "
    "ends what runs on them"
)
_MIXED = (
    "mixed, as below: pods that request nvidia.com/gpu stay pending until they request a profile. Or keep "
    "the name, with one layout for all GPUs in FILE: gpunode mig apply --config-file FILE"
)
_NEW_NAMES = f"First decide. Either {_MIXED}. {_DRAIN}"
# gpunode's plugin, unlike NVIDIA's, offers devices also with this layout
_OWN_NAMES = f"First decide. Leave it, if the devices of one profile are enough. Or {_MIXED}. {_DRAIN}"
_EVERY_NODE = f"{fixes.EVERY_NODE}, so drain each one that has MIG devices"


def _drained(fix: Fix, before: str = f"{_EVERY_NODE}. {_NEW_NAMES}") -> Fix:
    """A change of the strategy, after a drain: the kubelet counts devices by their resource's name."""
    return replace(fix, before=before, disruptive="drain", disturbs=fix.disturbs.partition(":")[0])


@mig_pod_check(
    "mig-strategy-mismatch",
    title="The device plugin supports this MIG layout",
    looks_at="MIG devices and whole GPUs as NVML lists them, and the MIG strategy of the device plugin: its "
    "flags, environment and file, or its log.",
    fix=_drained(fabric.MIXED_STRATEGY),
    blocked_by=("module-not-loaded", "nvml-hang", "mig-mode-pending", "mig-enabled-no-instances"),
    refs=(_README,),
)
def mig_strategy_mismatch(node: Node) -> Verdict:
    """With the strategy single every MIG device is called nvidia.com/gpu, so all GPUs must be partitioned
    alike; otherwise NVIDIA's device plugin offers no GPUs at all. With mixed, each profile has its own name:
    pods must request nvidia.com/mig-1g.10gb, for example.
    """
    gpus = node.nvml.inventory.gpus if node.nvml.inventory else ()
    known = [gpu for gpu in gpus if not gpu.error]
    profiles = sorted({device.profile for gpu in known for device in gpu.mig})
    whole = [gpu for gpu in known if not gpu.mig_enabled]
    if len(profiles) < 2 and not whole:
        return ok("all GPUs are partitioned alike")
    if any(not process.environment for process in node.plugin_processes):
        return skip("needs root to read the device plugin's settings", "unreadable")
    single = tuple(_single(node))
    if not single:
        return ok("no device plugin with the strategy single runs on this node")
    what = (
        f"MIG is on for {len(known) - len(whole)} of {len(known)} GPUs"
        if whole
        else f"MIG devices have different profiles ({', '.join(profiles)})"
    )
    layouts = (
        (_counted(gpu.mig, "x") or "no MIG device") if gpu.mig_enabled else "MIG is off" for gpu in known[:8]
    )
    layout = tuple(map(on_gpu, known, layouts))
    summary = f"{what}, but the device plugin's MIG strategy is single"
    if all(entry.source.startswith("gpunode") for entry in single):
        return warn(
            f"{summary}: it offers only the MIG devices of one profile",
            *single,
            *layout,
            fix=_own_strategy(node),
            why="With the strategy single every MIG device is called nvidia.com/gpu, so gpunode's plugin "
            "offers devices of one size only. With mixed, each profile has its own name: pods must request "
            "nvidia.com/mig-1g.10gb, for example.",
        )
    fix = _drained(fabric.OPERATORS_STRATEGY) if node.operator.pods else None
    return fail(summary, *single, *layout, fix=fix)


def _own_strategy(node: Node) -> Fix:
    """Set the strategy of gpunode's plugin, which runs as a service, in a pod, or by hand. A flag takes
    precedence over a variable."""
    setting, by_flag = "GPUNODE_PLUGIN_SERVE_MIG_STRATEGY=mixed", "change --mig-strategy to mixed"
    unit = read_unit(node.host, f"{_OWN_PLUGIN}.service")
    flag = any(
        word.startswith("--mig-strategy")
        for process in node.plugin_processes
        for word in process.process.argv
    )
    restart = _drained(fixes.restart(_OWN_PLUGIN, RESTARTS_PLUGIN), _OWN_NAMES)
    if unit is not None and flag:
        edit = restart.after(f"systemctl edit --full {_OWN_PLUGIN}")
        note = (
            f"In the editor that opens, {by_flag}. This copies the unit, and hides updates of the original "
            f"until systemctl revert {_OWN_PLUGIN}"
        )
        return replace(edit, note=note)
    if unit is not None:
        return restart.after(f"mkdir -p /etc/gpunode && echo {setting} >> /etc/gpunode/env")
    if not flag and any(process.container for process in node.plugin_processes):
        command = f"kubectl set env --namespace kube-system daemonset/{_OWN_PLUGIN} {setting}"
        everywhere = replace(restart, command=command, needs_root=False, disturbs=RESTARTS_PLUGINS)
        return _drained(everywhere, f"{_EVERY_NODE}. {_OWN_NAMES}")
    then = f"Drain this node. Then, where this plugin is started, {by_flag}, and restart it"
    return replace(fixes.look("gpunode plugin status", then), before=_OWN_NAMES)


def _single(node: Node) -> Iterator[Evidence]:
    """Sources that set the strategy single: a running plugin's settings, or the log of one that exited.
    gpunode's plugin skips other devices, unless its file names devices itself."""
    for plugin in node.plugin_processes:
        has_resources = plugin.name == "gpunode" and "resources:" in configuration(node.host, plugin)
        if mig_strategy(node.host, plugin) == "single" and not has_resources:
            yield seen(source(plugin), "MIG strategy single")
    yield from _logged(node, *_REFUSALS)


def _logged(node: Node, *marks: str) -> Iterator[Evidence]:
    """The first line with one of these marks in each log of a plugin that doesn't run any more."""
    for log in node.plugin_logs if not node.plugin_processes else ():
        for number, line in enumerate(log.lines, 1):
            if any(mark in line for mark in marks):
                yield seen(log.path, line[-300:], number)
                break


@mig_pod_check(
    "mps-mig-mixed",
    title="GPUs are shared with MIG or MPS, not both",
    severity="warning",
    looks_at="the device plugin's MPS sharing (its file, daemon and log) on a node with MIG enabled.",
    fix=fixes.look(
        "kubectl get configmap --all-namespaces | grep -i device-plugin",
        "Remove sharing.mps from the plugin's configuration (kubectl edit configmap), or turn MIG off",
        needs_root=False,
    ),
    blocked_by=("module-not-loaded", "nvml-hang"),
    refs=(_README,),
)
def mps_mig_mixed(node: Node) -> Verdict:
    """The device plugin's MPS supports only whole GPUs. It refuses MIG devices, and pods that request them
    stay pending.
    """
    for plugin in node.plugin_processes:
        if shares_by_mps(node.host, plugin):
            return _mixed(node, seen(source(plugin), "shares GPUs with MPS"))
    for process in node.processes:
        if process.name == _MPS_DAEMON:
            return _mixed(node, seen(f"/proc/{process.pid}", _MPS_DAEMON))
    for refusal in _logged(node, _MPS_REFUSAL):
        return _mixed(node, refusal)
    return ok("no device plugin on this node shares GPUs with MPS")


def _mixed(node: Node, answer: Evidence) -> Verdict:
    gpus = node.nvml.inventory.gpus if node.nvml.inventory else ()
    on = [on_gpu(gpu, "MIG is on") for gpu in gpus if gpu.mig_enabled]
    return warn("the device plugin shares GPUs with MPS, which doesn't work with MIG", answer, *on[:8])
