"""Checks of the device plugin: what it has registered with the kubelet, and why it failed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import datetime, timezone

from gpunode.checks import fixes
from gpunode.checks.containerd_config import running_config
from gpunode.checks.finding import RESTARTS_PLUGINS, Evidence, Fix
from gpunode.checks.fixes import set_plugin_variable
from gpunode.checks.kubelet import RESTART_POD, has_own_plugin, restart_plugin
from gpunode.checks.model import Verdict, ago, fail, kubelet_check, note, ok, seen, skip, warn
from gpunode.errors import GpunodeError
from gpunode.facts import tables
from gpunode.facts.device_plugins import (
    POD_LOGS,
    PluginLog,
    PluginProcess,
    all_foreign,
    configuration,
    plugin_logs,
    stage_log,
)
from gpunode.facts.engines import containerd_role
from gpunode.facts.gpu_use import dra_directory
from gpunode.facts.kernel_log import SOURCE, last_load
from gpunode.facts.kubelet import DEVICE_PLUGINS, root_directory
from gpunode.facts.node import Node
from gpunode.facts.toolkit import BY_ENVVAR, BY_MOUNTS, runtime_mode
from gpunode.facts.xids import XidLine, fallen_off, xid

PATIENCE = 1200.0  # a driver container that compiles its module takes up to 20 minutes
_YOUNG_SECONDS = 90.0  # plugins register within seconds of the kubelet's start
# what NVIDIA's plugin logs when it finds no GPUs (cmd/nvidia-device-plugin, internal/rm, factory.go)
_BLIND = (
    *("Incompatible strategy detected", "could not load NVML library", "Detected non-NVML platform"),
    *("nvml init failed", "failed to initialize NVML", "No devices found. Waiting indefinitely"),
    "driver/library version mismatch",
)
# what plugins and their init containers log when they end: klog, logrus and Go's own words
_ERROR = re.compile(r"\b[EF]\d{4} \d\d:|level=(error|fatal)|\bpanic:|\b([Ee]rror|[Ff]ailed|[Uu]nable to)\b")
_HEADER = re.compile(r'^(?:[EFWI]\d{4} \S+ +\d+ \S+\] |time="[^"]*" level=\w+ msg=")"?')
_SHOWN = 200  # characters of a log's line
_HEADLINE = 80  # characters of a log's line in the summary
_NO_CONFIG = "specified config"
_API_SERVER = "/etc/kubernetes/manifests/kube-apiserver.yaml"
_OF_THE_CLUSTER = ("kube-", "calico-", "tigera-", "cilium", "node-feature-discovery_", "metallb-")
_WHOLE = ("nvidia.com/gpu", "nvidia.com/gpu.shared")
_GPU_WORDS = ("gpu", "nvidia", "cuda")  # part of every other vendor's name for a share
_SEEING = "Registered device plugin"
_PLUGIN = "nvidia-device-plugin"
_ASK_OPERATOR = fixes.look(
    "kubectl get pods --all-namespaces --selector app=nvidia-device-plugin-daemonset -o wide",
    "If this node's pod isn't Running, its log names the cause: kubectl logs",
    needs_root=False,
)
_BELOW = (
    *("pci-no-gpu", "driver-lib-mismatch", "nvml-hang", "kubelet-not-running", "kubelet-device-plugin-dir"),
    *("containerd-not-restarted", "containerd-runtime-missing", "containerd-runtime-binary"),
    *("crio-not-running", "crio-runtime-missing", "crio-runtime-path", "toolkit-too-old"),
)


def _starting(node: Node) -> str:
    """Why the node is still starting and the resources can't be judged yet; empty if it isn't."""
    process = node.kubelet.process if node.kubelet else None
    if process is not None and _young(node, process.started):
        return "the kubelet has just started; device plugins have not registered yet"
    if any(_young(node, process.process.started) for process in node.plugin_processes):
        return "a device plugin has just started and has not registered yet"
    stage = busy_stage(node)
    return f"the GPU operator is still starting: its validator is at {stage}" if stage else ""


def _young(node: Node, started: float) -> bool:
    return 0 <= node.host.now() - started < _YOUNG_SECONDS


def busy_stage(node: Node) -> str:
    """The stage at which the GPU operator's validator waits, unless it has waited too long."""
    operator = node.operator
    stage = operator.missing if operator.validators else ""
    log = stage_log(node.host, operator, stage) if stage else None
    return stage if log is not None and node.host.now() - log[2] < PATIENCE else ""


def _without_plugin(node: Node) -> Verdict | None:
    """Pods may get GPUs without a plugin: through a runtime class and a variable that names the GPUs."""
    expected = node.plugin_processes or node.plugin_logs or node.operator.pods or has_own_plugin(node)
    if expected or not node.cri_containers:
        return None
    seeing = {container.id for container in node.gpu_containers}
    pods = [
        container
        for container in node.cri_containers
        if container.id in seeing and "exporter" not in container.pod
    ]
    if not pods:
        return None
    names = ", ".join(f"{pod.namespace}/{pod.pod}" for pod in pods[:4])
    where = node.kubelet.endpoint if node.kubelet else "the CRI"
    return note(
        "pods use GPUs without a device plugin on this node, so Kubernetes doesn't count their GPUs",
        seen(where, names),
    )


def _kept_free(node: Node) -> Verdict | None:
    """kubeadm's control plane nodes run no ordinary pods by default, and so no device plugin."""
    pods = node.host.listdir(POD_LOGS) if node.host.is_file(_API_SERVER) else ()
    if not pods or node.plugin_processes or not all(pod.startswith(_OF_THE_CLUSTER) for pod in pods):
        return None
    return note(
        "no device plugin runs on this control plane node, which runs no ordinary pods",
        seen(_API_SERVER, "control plane components run on this node"),
        seen(POD_LOGS, f"{len(pods)} pods, all of them cluster components"),
    )


_MIG = ("mig-enabled-no-instances", "mig-strategy-mismatch")  # either ends NVIDIA's device plugin

_REFS = ("https://github.com/NVIDIA/k8s-device-plugin#prerequisites",)


@kubelet_check(
    "plugin-not-registered",
    title="A device plugin has registered the GPUs",
    looks_at="the resources nvidia.com/... that the running kubelet reports (PodResources), else those in "
    "its checkpoint. No plugin is needed if NVIDIA's DRA driver allocates the GPUs.",
    fix=Fix(
        "gpunode setup --kubernetes",
        disruptive="restart",
        disturbs="configures the kubelet's container engine, and restarts it if needed: running pods "
        "continue",
    ),
    unless=("vfio-host",),
    blocked_by=(
        *_BELOW,
        "toolkit-missing",
        "operator-validations",
        "plugin-socket-dead",
        *_MIG,
        "plugin-mount-mismatch",
        "plugin-cannot-see-nvml",
    ),
    refs=_REFS,
)
def plugin_not_registered(node: Node) -> Verdict:
    """Kubernetes doesn't detect GPUs itself: pods get 'Insufficient nvidia.com/gpu' until a device plugin
    registers them.
    """
    allocatable = node.allocatable
    if allocatable is None:
        return skip("the kubelet doesn't report which devices are registered")
    if allocatable.nvidia:
        return ok(f"registered with the kubelet: {', '.join(sorted(allocatable.nvidia))}")
    if dra_directory(node):
        return skip("NVIDIA's DRA driver allocates the GPUs on this node and needs no device plugin")
    early = _starting(node)
    if early:
        return skip(early)
    names = sorted(allocatable.resources)
    shared = [name for name in names if any(word in name.lower() for word in _GPU_WORDS)]
    if shared:
        return ok(f"GPUs are registered under another name: {', '.join(shared)}")
    plain = _without_plugin(node) or _kept_free(node)
    if plain is not None:
        return plain
    others = ", ".join(sorted(allocatable.resources)) or "none"
    evidence = [seen(allocatable.source, f"no resource nvidia.com/...; the kubelet reports {others}")]
    failed = _last_failure(node)
    if failed is not None:
        return _failing(node, *failed, *evidence)
    for plugin in node.plugin_processes:
        evidence.append(
            seen(f"/proc/{plugin.process.pid}", f"{plugin.name} is running, but has not registered")
        )
    fix = restart_plugin(node) if node.plugin_processes or has_own_plugin(node) else None
    if fix is None and node.operator.pods:  # it deploys its own plugin; a second one would conflict with it
        fix = _ASK_OPERATOR
    return fail("no device plugin has registered GPUs with the kubelet", *evidence, fix=fix)


def _last_failure(node: Node) -> tuple[PluginLog, str] | None:
    """The last error in the logs of the plugin pod's containers, including init and sidecar containers, which
    can keep the plugin from starting."""
    result: list[tuple[PluginLog, str]] = []
    for log in plugin_logs(node.host, helpers=True):
        last = max((number for number, line in enumerate(log.lines) if _SEEING in line), default=-1)
        result += [(log, line) for line in log.lines[last + 1 :] if _ERROR.search(line)][-1:]
    return max(
        result, key=lambda entry: entry[1].split(" ", 1)[0], default=None
    )  # each line starts with its time


def _failing(node: Node, log: PluginLog, line: str, *evidence: Evidence) -> Verdict:
    text = _cause(_HEADER.sub("", message(line)).removesuffix('"'))
    summary = f"the device plugin fails: {text}"
    name = f"{log.namespace} {log.pod} --container {log.container}"
    fix = fixes.look(
        f"kubectl logs --namespace {name} --previous", "Fix what the last error names", needs_root=False
    )
    if _NO_CONFIG in text:  # the label names a configuration that the plugin's ConfigMap doesn't contain
        fix = Fix(
            'kubectl label node "$(uname -n)" nvidia.com/device-plugin.config-',
            needs_root=False,
            note=f"Without it the plugin uses its default configuration. {fixes.THIS_NODE}",
        )
    return fail(summary, seen(log.path, f"{message(line)}{_age(node, line)}"), *evidence, fix=fix)


def _cause(text: str) -> str:
    """The end of a long error: Go programs print the root cause last. The evidence has the whole line."""
    parts = text.split(": ")
    while len(parts) > 2 and len(": ".join(parts)) > _HEADLINE:
        del parts[0]
    return ": ".join(parts)[:_SHOWN]


_RESTART_POD = RESTART_POD


@kubelet_check(
    "allocatable-zero",
    title="The kubelet can allocate all GPUs of this node",
    looks_at="how many devices of nvidia.com/... the running kubelet counts as healthy (PodResources, else "
    "its checkpoint) against the GPUs on the bus, and whether the device ids belong to this node's "
    "GPUs (NVML): an error if it can allocate none, a warning if it can allocate only some. Shares "
    "and MIG devices may exceed the number of GPUs; a plugin that is configured to register only some "
    "of the GPUs is fine.",
    fix=_RESTART_POD,
    blocked_by=(
        *_BELOW,
        "gpu-lost",
        "gpu-reset-required",
        "pci-gpu-count-mismatch",
        *_MIG,
        "plugin-socket-dead",
        "plugin-cannot-see-nvml",
    ),
    unless=("vfio-host",),
    refs=_REFS,
)
def allocatable_zero(node: Node) -> Verdict:
    """Pods that request more GPUs than the kubelet can allocate stay pending: 'Insufficient nvidia.com/gpu'.
    NVIDIA's plugin marks a GPU unhealthy after some XID errors, all GPUs if NVML loses one, and healthy again
    only when it restarts.
    """
    allocatable = node.allocatable
    if allocatable is None or not allocatable.nvidia:
        return skip("no device plugin has registered GPUs with the kubelet")
    counts = {name: len(ids) for name, ids in sorted(allocatable.nvidia.items())}
    answer = seen(allocatable.source, ", ".join(f"{name}: {count}" for name, count in counts.items()))
    early = _starting(node)
    if early:
        return skip(early)
    foreign = _foreign(node)
    if foreign is not None:
        return foreign
    usual = sum(gpu.driver == "nvidia" for gpu in node.gpus)
    fallen = _fallen(node)
    lines = [seen(SOURCE, line.text) for line in fallen]
    if not any(counts.values()):
        fix = _AFTER_FALLEN if fallen else _restart(node)
        summary = f"the kubelet can allocate none of this node's GPUs{_off_the_bus(fallen)}"
        return fail(summary, answer, *lines, *_last_words(node), fix=fix)
    # partitioned or shared GPUs have their own ids: UUID::3 is the fourth share of a GPU
    ids = {
        device_id.partition("::")[0]
        for resource_ids in allocatable.nvidia.values()
        for device_id in resource_ids
    }
    parts = any("mig" in name.lower() for name in (*ids, *counts))
    if parts or len(ids) >= usual or _selects_gpus(node):
        return ok(f"the kubelet can allocate {len(ids)} devices", answer)
    here = seen("/sys/bus/pci/devices", f"{usual} GPUs with the driver nvidia")
    summary = f"the kubelet can allocate only {len(ids)} of this node's {usual} GPUs{_off_the_bus(fallen)}"
    fix = _AFTER_FALLEN if fallen else _restart(node)
    return warn(summary, answer, here, *lines, *_last_words(node), fix=fix)


_AFTER_FALLEN = replace(
    fixes.REBOOT,
    before="First save the driver's report for the vendor: nvidia-bug-report.sh",
    note="If the GPU is missing again after this, power the node off and on; then ask the node's vendor",
)


def _restart(node: Node) -> Fix:
    """Restart the plugin, unless the kernel reports a fault of a GPU since the plugin's last error."""
    logged = _time(_last_error(node)[1])
    since = f"XID after {logged.astimezone(timezone.utc):%Y-%m-%d %H:%M:%S} UTC" if logged else "new XID"
    return replace(
        restart_plugin(node),
        needs_root=True,  # to read the kernel's log
        before="A restart of the plugin marks all GPUs healthy again, whatever their state. Go on only if "
        f"this lists every GPU and no {since}; otherwise, or if the kubelet still counts too few GPUs "
        "afterwards, drain the node and reboot\nnvidia-smi -L; dmesg --time-format iso | grep Xid",
    )


def _fallen(node: Node) -> tuple[XidLine, ...]:
    """GPUs that fell off the bus since the driver was loaded: a plugin can't use them after a restart."""
    lines, loaded = fallen_off(node.readable_log), last_load(node.readable_log)
    return tuple(line for line in lines if line.seconds >= loaded)[-1:]


def _off_the_bus(fallen: tuple[XidLine, ...]) -> str:
    """For the headline: the GPU that the kernel's line names."""
    return f": GPU {fallen[0].address} has fallen off the bus" if fallen else ""


def _foreign(node: Node) -> Verdict | None:
    """Another plugin has registered the GPUs' resource name for its own devices."""
    allocatable, inventory = node.allocatable, node.nvml.inventory
    if allocatable is None or inventory is None or any(not gpu.uuid or gpu.error for gpu in inventory.gpus):
        return None
    gpus = {
        name for gpu in inventory.gpus for name in (gpu.uuid, f"nvidia{gpu.minor}")
    }  # the latter are from GKE
    for name in _WHOLE:
        ids = allocatable.nvidia.get(name, ())
        if any(device_id.startswith("MIG-") or "/gi" in device_id for device_id in ids):
            continue  # this user has no permission to read MIG devices from NVML
        if all_foreign(ids, gpus):
            return fail(
                f"the kubelet counts devices of {name} that are not this node's GPUs",
                seen(allocatable.source, f"{name}: {', '.join(ids[:4])}"),
                seen("NVML", ", ".join(gpu.uuid for gpu in inventory.gpus[:4])),
                fix=fixes.look(
                    "gpunode plugin status",
                    "Keep one plugin that registers this resource and delete the DaemonSet of the other",
                ),
            )
    return None


def _selects_gpus(node: Node) -> bool:
    """Whether the plugin is configured to use only some of the GPUs, or this is unknown."""
    selections = [
        process.environment.get("NVIDIA_VISIBLE_DEVICES", "all") for process in node.plugin_processes
    ]
    return any(value not in ("all", "void", "") for value in selections)


_XID = re.compile(r"\bXid=(\d{1,4})\b")
_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(Z|[+-]\d\d:\d\d) ")


def _last_error(node: Node) -> tuple[str, str]:
    """A log of the plugin, and the last line in it that names an error; both empty without one."""
    marks = ("unhealthy", "error", "Error", *_BLIND)
    for log in node.plugin_logs:
        lines = [line for line in log.lines if any(mark in line for mark in marks)]
        if lines:
            return log.path, lines[-1]
    return "", ""


def _last_words(node: Node) -> tuple[Evidence, ...]:
    path, line = _last_error(node)
    if not line:
        return ()
    code = _XID.search(line)
    meaning = (seen(f"Xid={code[1]}", xid(int(code[1])).meaning or "unknown"),) if code else ()
    return (seen(path, f"{shown(line)}{_age(node, line)}"), *meaning)


def _time(line: str) -> datetime | None:
    """The time that the engine writes before a log line."""
    time = _TIME.match(line)
    try:
        return datetime.fromisoformat(f"{time[1]}{time[2].replace('Z', '+00:00')}") if time else None
    except ValueError:
        return None


def _age(node: Node, line: str) -> str:
    """The age of a log line; empty if its time is unknown."""
    logged = _time(line)
    return f" ({ago(node.host.now() - logged.timestamp())})" if logged else ""


@kubelet_check(
    "plugin-cannot-see-nvml",
    title="The device plugin can access the GPUs",
    looks_at="the end of the newest log of NVIDIA's device plugin in /var/log/pods, and the runtime handler "
    "of its pod (CRI). A registration that the log shows after the error makes it fine.",
    fix=_RESTART_POD,
    blocked_by=(*_BELOW, *_MIG),
    refs=_REFS,
)
def plugin_cannot_see_nvml(node: Node) -> Verdict:
    """The plugin's pod gets the driver's libraries from the nvidia runtime. Under another runtime it can't
    load NVML and registers no GPUs; its log only suggests checking the toolkit's setup.
    """
    if not node.plugin_logs:
        return skip("no pod of NVIDIA's device plugin has a log on this node")
    if node.allocatable is not None and any(node.allocatable.nvidia.values()):
        return ok("a device plugin has registered GPUs")  # logs of finished pods remain for a while
    for log in node.plugin_logs:
        line = _nvml_error_line(log)
        if line is not None:
            evidence, fix = _handler(node, log)
            last = seen(log.path, f"{shown(line)}{_age(node, line)}")
            return fail("the device plugin finds no GPUs", last, *evidence, fix=fix)
    return ok("the device plugin's log shows no NVML errors")


def _nvml_error_line(log: PluginLog) -> str | None:
    """The last line with such an error, unless a registration follows it."""
    result = None
    for line in log.lines:
        if _SEEING in line:
            result = None
        elif any(mark in line for mark in _BLIND):
            result = line
    return result


def _handler(node: Node, log: PluginLog) -> tuple[tuple[Evidence, ...], Fix | None]:
    """Runtime handler of the pod, if the engine reports it: without nvidia it gets no libraries."""
    pods = [container for container in node.cri_containers if container.pod == log.pod]
    plugin_pods = [pod for pod in pods if _PLUGIN in pod.name or _PLUGIN in pod.pod]
    if not plugin_pods or plugin_pods[0].handler.startswith("nvidia"):
        return (), None
    handler_text = (
        f"the handler {plugin_pods[0].handler}" if plugin_pods[0].handler else "the default handler"
    )
    where = node.kubelet.endpoint if node.kubelet else "the CRI"
    owner = log.pod.rpartition("-")[0]
    patch = '{"spec":{"template":{"spec":{"runtimeClassName":"nvidia"}}}}'
    command = f"kubectl --namespace {log.namespace} patch daemonset {owner} --patch '{patch}'"
    before = f"{fixes.EVERY_NODE}: all need the nvidia runtime, and the cluster the RuntimeClass nvidia"
    fix = Fix(command, needs_root=False, disruptive="restart", disturbs=RESTARTS_PLUGINS, before=before)
    return (seen(where, f"pod {log.pod} runs under {handler_text}"),), fix


def message(line: str) -> str:
    """Message of a CRI log line, without time and stream."""
    words = line.split(" ", 3)
    return (words[3] if len(words) == 4 and words[1] in ("stdout", "stderr") else line).strip()


def shown(line: str) -> str:
    """The message, cut to a maximum length."""
    return message(line)[:_SHOWN]


# The device plugin's configuration against the kubelet and the engine.

_SETTLED_SECONDS = 90.0
_ENVVAR, _MOUNTS, _CRI = "envvar", "volume-mounts", "cdi-cri"
_STRATEGY = "DEVICE_LIST_STRATEGY"
# prefixes of the resources of other vendors' plugins for NVIDIA GPUs
_OTHER_BUILDS = (
    *("aliyun.com/gpu", "volcano.sh/vgpu", "volcano.sh/gpu", "tencent.com/vcuda", "4pd.io/vgpu"),
    *("k8s.amazonaws.com/vgpu", "hami.io/", "rs/gpu", "nvidia-gpu.com/"),
)
_DRA_PROGRAM = "gpu-kubelet-plugin"
_ONE_DRA = Fix(
    "helm upgrade nvidia-dra-driver-gpu nvidia/nvidia-dra-driver-gpu --namespace nvidia-dra-driver-gpu "
    "--reuse-values --set resources.gpus.enabled=false",
    needs_root=False,
    disruptive="restart",
    disturbs="restarts the DRA driver on all nodes of the cluster: running pods continue",
    before="First decide which of the two allocates GPUs. This leaves them to the device plugin, on every "
    "node of the cluster: new pods that claim GPUs through the DRA driver stay pending",
)
_NONE = "no device plugin for NVIDIA GPUs runs on this node"
_HIDDEN = "needs root to read the device plugin's settings"


def _strategies(node: Node, plugin: PluginProcess) -> tuple[str, ...]:
    """Strategies from the flag or variable, else from its file, else the default envvar."""
    value = plugin.setting("--device-list-strategy", "DEVICE_LIST_STRATEGY")
    if not value:
        match = re.search(
            r"deviceListStrategy:((?:[\s\[\]\"',-]*(?:envvar|volume-mounts|cdi-\w+))+)",
            configuration(node.host, plugin),
        )
        value = ",".join(re.findall(r"envvar|volume-mounts|cdi-\w+", match[1])) if match else ""
    return tuple(filter(None, value.split(","))) or (_ENVVAR,)


def source(plugin: PluginProcess) -> str:
    return f"{plugin.name}, process {plugin.process.pid}"


_PLUGIN_SETTINGS_BELOW = ("pci-no-gpu", "kubelet-not-running")

_PLUGIN_SETTINGS_REFS = (
    "https://github.com/NVIDIA/k8s-device-plugin#configuring-the-nvidia-device-plugin-binary",
)


@kubelet_check(
    "plugin-strategy-mismatch",
    title="The engine supports the device plugin's device list strategy",
    looks_at="the running plugin's DEVICE_LIST_STRATEGY (flag, variable or file) against the engine's CDI "
    f"(containerd's release and CRI Status), the kubelet's release, and {BY_ENVVAR} and "
    f"{BY_MOUNTS} in the toolkit's config.toml.",
    fix=fixes.configure("containerd", "--cdi"),
    table=tables.TABLE,
    blocked_by=(
        *_PLUGIN_SETTINGS_BELOW,
        "toolkit-config-invalid",
        "containerd-not-restarted",
        "containerd-runtime-missing",
    ),
    refs=_PLUGIN_SETTINGS_REFS,
)
def plugin_strategy_mismatch(node: Node) -> Verdict:
    """The plugin passes GPUs by variable, mount or CDI name, and the engine or the toolkit must support that
    strategy. If neither does, pods start without GPUs.
    """
    if not node.plugin_processes:
        return skip(_NONE)
    if not all(process.environment for process in node.plugin_processes):
        return skip(_HIDDEN, "unreadable")
    for plugin in node.plugin_processes:
        strategies = _strategies(node, plugin)
        wrong = _refused(node, strategies)
        if wrong is not None:
            answer = seen(source(plugin), f"device list strategy {','.join(strategies)}")
            evidence, fix = wrong
            what = f"neither engine nor toolkit supports the device plugin's strategy {strategies[0]}"
            fix = replace(fix, note="Then delete the pods that started without GPUs: they get none later")
            return fail(f"pods start without GPUs: {what}", answer, evidence, fix=fix)
    return ok("the engine supports the device plugin's device list strategy")


def _refused(node: Node, strategies: tuple[str, ...]) -> tuple[Evidence, Fix] | None:
    """Why the only strategy doesn't work, and how to fix it; one working strategy is enough."""
    if len(strategies) != 1:
        return None
    if strategies[0] == _CRI:
        return _engine_refuses(node) or _kubelet_refuses(node)
    key = {_ENVVAR: BY_ENVVAR, _MOUNTS: BY_MOUNTS}.get(strategies[0], "")
    settings = node.toolkit_settings
    if not key or not node.toolkit.programs or settings.value(key) is not False:
        return None
    allow = f"gpunode toolkit config set {BY_MOUNTS}=true"
    fix = Fix(allow, disruptive="restart")
    if key != BY_MOUNTS:
        change = set_plugin_variable(f"{_STRATEGY}={_MOUNTS}").after(allow)
        fix = replace(change, before=fixes.MOUNTS_EVERYWHERE)
    return seen(settings.path, f"{key} = false", settings.line(key)), fix


def _engine_refuses(node: Node) -> tuple[Evidence, Fix] | None:
    """containerd without CDI; CRI-O always supports it."""
    daemon = node.containerd
    if daemon is None or not containerd_role(node).used:
        return None
    if tables.can("containerd", "cdi", daemon.version) is False:
        return seen(daemon.binary or daemon.socket, ".".join(map(str, daemon.version))), set_plugin_variable(
            f"{_STRATEGY}={_ENVVAR}"
        )
    switch = running_config(node).get("enableCDI")
    answer = seen(f"CRI Status at {daemon.socket}", "enableCDI = false")
    fix = fixes.configure(daemon.manager or "containerd", "--cdi")
    return (answer, fix) if switch is False else None


def _kubelet_refuses(node: Node) -> tuple[Evidence, Fix] | None:
    """A kubelet without CDI support silently drops the names."""
    if tables.can("kubelet", "cdi-devices", node.kubelet_version) is not False:
        return None
    release = ".".join(map(str, node.kubelet_version))
    return seen("kubelet", f"{release}, which doesn't pass CDI names to the engine"), set_plugin_variable(
        f"{_STRATEGY}={_ENVVAR}"
    )


@kubelet_check(
    "plugin-device-specs",
    title="The device plugin works with the static CPU manager",
    severity="warning",
    looks_at="policyName in the kubelet's cpu_manager_state and the plugin's PASS_DEVICE_SPECS, if the "
    "nvidia runtime is in legacy mode and containers don't get GPUs through CDI.",
    fix=replace(set_plugin_variable("PASS_DEVICE_SPECS=true"), needs_root=False),
    blocked_by=_PLUGIN_SETTINGS_BELOW,
    refs=("https://github.com/NVIDIA/k8s-device-plugin#setting-other-helm-chart-values",),
)
def plugin_device_specs(node: Node) -> Verdict:
    """The static CPU manager updates running containers. Such an update removes device files that the plugin
    didn't report to the kubelet: 'Failed to initialize NVML: Unknown Error'.
    """
    if not node.plugin_processes:
        return skip(_NONE)
    path = f"{root_directory(node.kubelet)}/cpu_manager_state"
    try:
        state = json.loads(node.host.read_text(path) or "{}")
        policy = state.get("policyName") if isinstance(state, dict) else None
    except ValueError:
        policy = None
    if policy != "static":
        return ok("the kubelet's CPU manager doesn't update running containers")
    if not all(process.environment for process in node.plugin_processes):
        return skip(_HIDDEN, "unreadable")
    if runtime_mode(node.toolkit_settings, node.toolkit.version) != "legacy":
        return ok("the toolkit adds device files in a way that survives the CPU manager's updates")
    for plugin in node.plugin_processes:
        on = plugin.switched("--pass-device-specs", "PASS_DEVICE_SPECS")
        by_cdi = any(strategy.startswith("cdi-") for strategy in _strategies(node, plugin))
        if (
            not on
            and not by_cdi
            and not re.search(r"passDeviceSpecs:\s*true", configuration(node.host, plugin))
        ):
            return warn(
                "the device plugin doesn't report device files to the kubelet, which uses the static CPU "
                "manager",
                seen(path, "policyName static"),
                seen(source(plugin), "PASS_DEVICE_SPECS isn't set"),
            )
    return ok("the device plugin reports device files to the kubelet")


_SHOW_PLUGINS = fixes.keep_one_plugin("NVIDIA GPUs")


@kubelet_check(
    "plugin-multiple",
    title="Only one device plugin runs",
    severity="warning",
    looks_at="running device plugins for NVIDIA GPUs, each container counted once.",
    fix=_SHOW_PLUGINS,
    blocked_by=_PLUGIN_SETTINGS_BELOW,
    refs=_PLUGIN_SETTINGS_REFS,
)
def plugin_multiple(node: Node) -> Verdict:
    """Two plugins that register the same resource replace each other each time one of them starts, and the
    kubelet may allocate a GPU twice.
    """
    now = node.host.now()
    # while a pod is replaced, the old and the new one both run
    processes = [
        process for process in node.plugin_processes if now - process.process.started > _SETTLED_SECONDS
    ]
    plugins = {process.container or str(process.process.pid): process for process in processes}
    if len(plugins) < 2:
        return ok("one device plugin runs on this node") if plugins else skip(_NONE)
    names = {
        container.id: f", pod {container.namespace}/{container.pod}" for container in node.cri_containers
    }
    evidence = [
        seen(f"/proc/{plugin.process.pid}", f"{plugin.name}{names.get(plugin.container, '')}")
        for plugin in plugins.values()
    ]
    return warn(f"{len(plugins)} device plugins for NVIDIA GPUs run on this node", *evidence)


@kubelet_check(
    "gpus-offered-twice",
    title="GPUs are advertised to Kubernetes only once",
    looks_at="NVIDIA's DRA driver for GPUs (its process, and its socket in the kubelet's plugins directory) "
    "beside a device plugin, and NVIDIA GPUs registered by other vendors' plugins beside "
    "nvidia.com/... (PodResources).",
    fix=_SHOW_PLUGINS,
    blocked_by=_PLUGIN_SETTINGS_BELOW,
    refs=("https://github.com/NVIDIA/k8s-dra-driver-gpu",),
)
def gpus_offered_twice(node: Node) -> Verdict:
    """Both count every GPU and don't know of each other's pods, so Kubernetes may allocate one GPU to two
    pods.
    """
    twice = _beside_dra(node) or _under_two_names(node)
    return twice or ok("GPUs are advertised to Kubernetes only once")


def _beside_dra(node: Node) -> Verdict | None:
    """NVIDIA's DRA driver and a device plugin both allocate the same GPUs."""
    directory = dra_directory(node)
    driver = next((process for process in node.processes if process.name == _DRA_PROGRAM), None)
    state = node.host.socket_state(f"{directory}/dra.sock") if directory else "absent"
    if driver is None and state != "listening":
        return None
    offered = sorted(node.allocatable.nvidia) if node.allocatable else []
    if not offered and not node.plugin_processes:
        return None
    dra = seen(f"/proc/{driver.pid}", _DRA_PROGRAM) if driver else seen(f"{directory}/dra.sock", state)
    plugins = [seen(f"/proc/{process.process.pid}", process.name) for process in node.plugin_processes]
    evidence = [dra, *plugins]
    if node.allocatable is not None and offered:
        evidence.append(seen(node.allocatable.source, ", ".join(offered)))
    return fail("NVIDIA's DRA driver and a device plugin allocate the same GPUs", *evidence, fix=_ONE_DRA)


def _under_two_names(node: Node) -> Verdict | None:
    """Plugins that register the same GPUs as different resources don't know of each other's pods."""
    allocatable = node.allocatable
    if allocatable is None or not any(allocatable.nvidia.values()):
        return None
    others = [
        name for name, ids in sorted(allocatable.resources.items()) if ids and name.startswith(_OTHER_BUILDS)
    ]
    if not others:
        return None
    names = (*sorted(allocatable.nvidia), *others)
    return fail(
        "two device plugins allocate the same GPUs under different names",
        seen(allocatable.source, ", ".join(names)),
        fix=fixes.keep_one_plugin(" and ".join((", ".join(names[:-1]), names[-1]))),
    )


@kubelet_check(
    "plugin-mount-mismatch",
    title="The device plugin mounts the kubelet's directory",
    looks_at=f"whether {DEVICE_PLUGINS} in the plugin's container is the node's directory.",
    fix=fixes.look(
        "kubectl get daemonsets --all-namespaces --output yaml | grep --context 3 device-plugins",
        "With kubectl edit daemonset, set the hostPath of the plugin's volume to "
        f"{DEVICE_PLUGINS}. {fixes.EVERY_NODE}",
        needs_root=False,
    ),
    blocked_by=_PLUGIN_SETTINGS_BELOW,
    refs=_PLUGIN_SETTINGS_REFS,
)
def plugin_mount_mismatch(node: Node) -> Verdict:
    """The kubelet finds plugins only in this directory, whatever its --root-dir is. A plugin with another
    hostPath never registers.
    """
    inside = [process for process in node.plugin_processes if process.container]
    if not inside:
        return skip("no device plugin runs in a container on this node")
    here = node.host.stat(DEVICE_PLUGINS)
    if here is None:
        return skip(f"{DEVICE_PLUGINS} doesn't exist")
    for plugin in inside:
        path = f"/proc/{plugin.process.pid}/root{DEVICE_PLUGINS}"
        try:
            there = node.host.stat(path)
        except GpunodeError:
            return skip("needs root to read the device plugin's mounts", "unreadable")
        if there is not None and (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino):
            return fail(
                "the device plugin uses another directory than the kubelet's",
                seen(path, f"not the node's {DEVICE_PLUGINS}{_mounted(node, plugin)}"),
            )
    return ok(f"the device plugin mounts the node's {DEVICE_PLUGINS}")


def _mounted(node: Node, plugin: PluginProcess) -> str:
    """What is mounted instead (proc_pid_mountinfo(5): the 4th field is the source path, the 5th the mount
    point)."""
    for line in (node.host.read_text(f"/proc/{plugin.process.pid}/mountinfo") or "").splitlines():
        fields = line.split()
        if len(fields) > 4 and fields[4] == DEVICE_PLUGINS:
            return f", but {fields[3]}"
    return ""
