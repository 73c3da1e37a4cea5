"""How the device plugin was set up, against the kubelet and the engine that it works with."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from gpunode.checks.fixes import everywhere, tell_plugin
from gpunode.checks.model import CLUSTER_NODES, Check, Verdict, fail, ok, seen, skip, warn
from gpunode.errors import DaemonError, GpunodeError
from gpunode.facts import gates
from gpunode.facts.engines import containerd_role
from gpunode.facts.gpu_ways import dra_directory
from gpunode.facts.kubelet import DEVICE_PLUGINS, root_directory
from gpunode.facts.node import Node
from gpunode.facts.plugin_configuration import configuration
from gpunode.result import Evidence, Fix

if TYPE_CHECKING:
    from gpunode.facts.device_plugins import PluginProcess

_SETTLED_SECONDS = 90.0
_ENVVAR, _MOUNTS, _CRI = "envvar", "volume-mounts", "cdi-cri"
_BY_ENVVAR = "accept-nvidia-visible-devices-envvar-when-unprivileged"
_BY_MOUNTS = "accept-nvidia-visible-devices-as-volume-mounts"
_STRATEGY = "DEVICE_LIST_STRATEGY"
# other vendors' plugins for NVIDIA GPUs, by what their resources begin with
_OTHER_BUILDS = (
    *("aliyun.com/gpu", "volcano.sh/vgpu", "volcano.sh/gpu", "tencent.com/vcuda", "4pd.io/vgpu"),
    *("k8s.amazonaws.com/vgpu", "hami.io/", "rs/gpu", "nvidia-gpu.com/"),
)
_DRA_PROGRAM = "gpu-kubelet-plugin"
_ONE_DRA = Fix(
    "helm upgrade nvidia-dra-driver-gpu nvidia/nvidia-dra-driver-gpu --namespace nvidia-dra-driver-gpu "
    "--reuse-values --set resources.gpus.enabled=false",
    False,
    "restart",
)
_NONE = "no device plugin for NVIDIA GPUs runs here"
_HIDDEN = "needs root to see the device plugin's settings"


def _strategies(node: Node, plugin: PluginProcess) -> tuple[str, ...]:
    """Flag or variable, else its file, else the default, which is envvar."""
    given = plugin.setting("--device-list-strategy", "DEVICE_LIST_STRATEGY")
    if not given:
        found = re.search(
            r"deviceListStrategy:((?:[\s\[\]\"',-]*(?:envvar|volume-mounts|cdi-\w+))+)",
            configuration(node.host, plugin),
        )
        given = ",".join(re.findall(r"envvar|volume-mounts|cdi-\w+", found[1])) if found else ""
    return tuple(filter(None, given.split(","))) or (_ENVVAR,)


def _source(plugin: PluginProcess) -> str:
    return f"{plugin.name}, process {plugin.process.pid}"


def plugin_strategy_mismatch(node: Node) -> Verdict:
    if not node.plugin_processes:
        return skip(_NONE)
    if not all(one.environment for one in node.plugin_processes):
        return skip(_HIDDEN, "unreadable")
    for plugin in node.plugin_processes:
        strategies = _strategies(node, plugin)
        wrong = _refused(node, strategies)
        if wrong is not None:
            told = seen(_source(plugin), f"device list strategy {','.join(strategies)}")
            evidence, command = wrong
            summary = f"nobody acts on the device plugin's strategy {strategies[0]}"
            return fail(summary, told, evidence, fix=Fix(command, True, "restart"))
    return ok("the engine acts on the device plugin's strategy")


def _refused(node: Node, strategies: tuple[str, ...]) -> tuple[Evidence, str] | None:
    """What keeps the only strategy from working, and the command against it; one of several is enough."""
    if len(strategies) != 1:
        return None
    if strategies[0] == _CRI:
        return _engine_refuses(node) or _kubelet_refuses(node)
    key = {_ENVVAR: _BY_ENVVAR, _MOUNTS: _BY_MOUNTS}.get(strategies[0], "")
    settings = node.toolkit_settings
    if not key or not node.toolkit.programs or settings.value(key) is not False:
        return None
    return (
        seen(settings.path, f"{key} = false", settings.line(key)),
        f"gpunode toolkit config set {key}=true"
        if key == _BY_MOUNTS
        else f"gpunode toolkit config set {_BY_MOUNTS}=true && {tell_plugin(f'{_STRATEGY}={_MOUNTS}')}",
    )


def _engine_refuses(node: Node) -> tuple[Evidence, str] | None:
    """containerd without CDI; CRI-O always has it."""
    daemon = node.containerd
    if daemon is None or not containerd_role(node).used:
        return None
    if gates.can("containerd", "cdi", daemon.version) is False:
        return seen(daemon.binary or daemon.socket, ".".join(map(str, daemon.version))), tell_plugin(
            f"{_STRATEGY}={_ENVVAR}"
        )
    try:
        switch = node.cri.config.get("enableCDI")
    except DaemonError:
        return None
    told = seen(f"CRI Status at {daemon.socket}", "enableCDI = false")
    command = f"gpunode configure-runtime --runtime {daemon.manager or 'containerd'} --cdi"
    return (told, command) if switch is False else None


def _kubelet_refuses(node: Node) -> tuple[Evidence, str] | None:
    """One that doesn't know of CDI drops the names without a word."""
    if gates.can("kubelet", "cdi-devices", node.kubelet_version) is not False:
        return None
    release = ".".join(map(str, node.kubelet_version))
    return seen("kubelet", f"{release}, which passes on no CDI names"), tell_plugin(f"{_STRATEGY}={_ENVVAR}")


def plugin_device_specs(node: Node) -> Verdict:
    from gpunode.facts.toolkit_settings import runtime_mode

    if not node.plugin_processes:
        return skip(_NONE)
    path = f"{root_directory(node.kubelet)}/cpu_manager_state"
    try:
        state = json.loads(node.host.read_text(path) or "{}")
        policy = state.get("policyName") if isinstance(state, dict) else None
    except ValueError:
        policy = None
    if policy != "static":
        return ok("the kubelet's CPU manager leaves running containers alone")
    if not all(one.environment for one in node.plugin_processes):
        return skip(_HIDDEN, "unreadable")
    if runtime_mode(node.toolkit_settings, node.toolkit.version) != "legacy":
        return ok("the toolkit puts device files into what the CPU manager updates")
    for plugin in node.plugin_processes:
        on = plugin.switched("--pass-device-specs", "PASS_DEVICE_SPECS")
        by_cdi = any(one.startswith("cdi-") for one in _strategies(node, plugin))
        if (
            not on
            and not by_cdi
            and not re.search(r"passDeviceSpecs:\s*true", configuration(node.host, plugin))
        ):
            return warn(
                "the device plugin doesn't tell the kubelet of device files, under a static CPU manager",
                seen(path, "policyName static"),
                seen(_source(plugin), "PASS_DEVICE_SPECS isn't set"),
            )
    return ok("the device plugin tells the kubelet of device files")


def plugin_multiple(node: Node) -> Verdict:
    now = node.host.now()
    # while a pod is being replaced, the old one and the new one both run
    settled = [one for one in node.plugin_processes if now - one.process.started > _SETTLED_SECONDS]
    plugins = {one.container or str(one.process.pid): one for one in settled}
    if len(plugins) < 2:
        return ok("one device plugin runs here") if plugins else skip(_NONE)
    names = {one.id: f", pod {one.namespace}/{one.pod}" for one in node.cri_containers}
    evidence = [
        seen(f"/proc/{one.process.pid}", f"{one.name}{names.get(one.container, '')}")
        for one in plugins.values()
    ]
    return warn(f"{len(plugins)} device plugins for NVIDIA GPUs run here", *evidence)


def gpus_offered_twice(node: Node) -> Verdict:
    twice = _beside_dra(node) or _under_two_names(node)
    return twice or ok("GPUs are offered to Kubernetes once")


def _beside_dra(node: Node) -> Verdict | None:
    """NVIDIA's DRA driver and a device plugin each count the same GPUs as theirs to hand out."""
    directory = dra_directory(node)
    driver = next((one for one in node.processes if one.name == _DRA_PROGRAM), None)
    state = node.host.socket_state(f"{directory}/dra.sock") if directory else "absent"
    if driver is None and state != "listening":
        return None
    offered = sorted(node.allocatable.nvidia) if node.allocatable else []
    if not offered and not node.plugin_processes:
        return None
    dra = seen(f"/proc/{driver.pid}", _DRA_PROGRAM) if driver else seen(f"{directory}/dra.sock", state)
    plugins = [seen(f"/proc/{one.process.pid}", one.name) for one in node.plugin_processes]
    evidence = [dra, *plugins]
    if node.allocatable is not None and offered:
        evidence.append(seen(node.allocatable.source, ", ".join(offered)))
    return fail("NVIDIA's DRA driver and a device plugin hand out the same GPUs", *evidence, fix=_ONE_DRA)


def _under_two_names(node: Node) -> Verdict | None:
    """Plugins that offer the same GPUs as different resources don't know of each other's pods."""
    allocatable = node.allocatable
    if allocatable is None or not any(allocatable.nvidia.values()):
        return None
    others = [
        name for name, ids in sorted(allocatable.resources.items()) if ids and name.startswith(_OTHER_BUILDS)
    ]
    if not others:
        return None
    names = ", ".join((*sorted(allocatable.nvidia), *others))
    return fail(
        "two device plugins hand out the same GPUs under different names", seen(allocatable.source, names)
    )


def plugin_mount_mismatch(node: Node) -> Verdict:
    inside = [one for one in node.plugin_processes if one.container]
    if not inside:
        return skip("no device plugin runs in a container here")
    here = node.host.stat(DEVICE_PLUGINS)
    if here is None:
        return skip(f"there is no {DEVICE_PLUGINS}")
    for plugin in inside:
        path = f"/proc/{plugin.process.pid}/root{DEVICE_PLUGINS}"
        try:
            there = node.host.stat(path)
        except GpunodeError:
            return skip("needs root to see what the device plugin sees", "unreadable")
        if there is not None and (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino):
            return fail(
                "the device plugin looks for the kubelet in another directory",
                seen(path, f"not the node's {DEVICE_PLUGINS}{_mounted(node, plugin)}"),
            )
    return ok(f"the device plugin sees the node's {DEVICE_PLUGINS}")


def _mounted(node: Node, plugin: PluginProcess) -> str:
    """What is mounted there instead (proc_pid_mountinfo(5): the 4th field is the path, the 5th the place)."""
    for line in (node.host.read_text(f"/proc/{plugin.process.pid}/mountinfo") or "").splitlines():
        fields = line.split()
        if len(fields) > 4 and fields[4] == DEVICE_PLUGINS:
            return f", but {fields[3]}"
    return ""


_BELOW = ("pci-no-gpu", "kubelet-not-running")
_REFS = ("https://github.com/NVIDIA/k8s-device-plugin#configuring-the-nvidia-device-plugin-binary",)
CHECKS = (
    Check(
        id="plugin-mount-mismatch",
        title="The device plugin sees the kubelet's directory",
        layer="kubelet",
        severity="error",
        looks_at=f"whether {DEVICE_PLUGINS} inside the plugin's container is the node's own.",
        why=(
            "The kubelet looks for plugins in this directory alone, whatever its --root-dir is. A plugin "
            "whose hostPath names another one never registers."
        ),
        remedy=everywhere(
            "kubectl get daemonsets --all-namespaces --output yaml | grep --context 3 device-plugins"
        ),
        classes=CLUSTER_NODES,
        run=plugin_mount_mismatch,
        blocked_by=_BELOW,
        needs=("kubelet",),
        refs=_REFS,
    ),
    Check(
        id="plugin-strategy-mismatch",
        title="The engine acts on the device plugin's strategy",
        layer="kubelet",
        severity="error",
        looks_at=(
            "the running plugin's DEVICE_LIST_STRATEGY (flag, variable or file) against the engine's CDI "
            f"(containerd's release and CRI Status), the kubelet's release, and {_BY_ENVVAR} and "
            f"{_BY_MOUNTS} of the toolkit's config.toml."
        ),
        why=(
            "The plugin names GPUs by variable, mount or CDI name, and somebody has to act on that. If "
            "nobody does, pods start and see no GPU."
        ),
        remedy=everywhere("gpunode configure-runtime --runtime containerd --cdi", "restart"),
        classes=CLUSTER_NODES,
        run=plugin_strategy_mismatch,
        table=gates.TABLE,
        blocked_by=(
            *_BELOW,
            "toolkit-config-invalid",
            "containerd-not-restarted",
            "containerd-runtime-missing",
        ),
        needs=("kubelet",),
        refs=_REFS,
    ),
    Check(
        id="plugin-device-specs",
        title="The device plugin suits a static CPU manager",
        layer="kubelet",
        severity="warning",
        looks_at=(
            "policyName in the kubelet's cpu_manager_state, and the plugin's PASS_DEVICE_SPECS, where "
            "the nvidia runtime is in mode legacy and GPUs don't come by CDI."
        ),
        why=(
            "A static CPU manager updates running containers. Device files that the kubelet wasn't told of "
            "are lost by it: 'Failed to initialize NVML: Unknown Error'."
        ),
        remedy=everywhere(tell_plugin("PASS_DEVICE_SPECS=true"), "restart"),
        classes=CLUSTER_NODES,
        run=plugin_device_specs,
        blocked_by=_BELOW,
        needs=("kubelet",),
        refs=("https://github.com/NVIDIA/k8s-device-plugin#setting-other-helm-chart-values",),
    ),
    Check(
        id="gpus-offered-twice",
        title="GPUs are offered to Kubernetes once",
        layer="kubelet",
        severity="error",
        looks_at=(
            "NVIDIA's DRA driver for GPUs (its process, and its socket in the kubelet's plugins directory) "
            "beside a device plugin, and resources of other vendors' plugins for NVIDIA GPUs beside "
            "nvidia.com/... (PodResources)."
        ),
        why=(
            "Each of the two counts every GPU as its own and neither sees the other's pods, so that "
            "Kubernetes hands one GPU to two pods."
        ),
        remedy=everywhere("kubectl get daemonsets --all-namespaces | grep --ignore-case device-plugin"),
        classes=CLUSTER_NODES,
        run=gpus_offered_twice,
        blocked_by=_BELOW,
        needs=("kubelet",),
        refs=("https://github.com/NVIDIA/k8s-dra-driver-gpu",),
    ),
    Check(
        id="plugin-multiple",
        title="One device plugin runs",
        layer="kubelet",
        severity="warning",
        looks_at="running programs that are device plugins for NVIDIA GPUs, each container counted once.",
        why=(
            "Two plugins that offer the same resource take it from each other whenever one of them starts, "
            "and the kubelet may hand out a GPU twice."
        ),
        remedy=everywhere("kubectl get daemonsets --all-namespaces | grep --ignore-case device-plugin"),
        classes=CLUSTER_NODES,
        run=plugin_multiple,
        blocked_by=_BELOW,
        needs=("kubelet",),
        refs=_REFS,
    ),
)
