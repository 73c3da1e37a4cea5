"""What the device plugin has offered to the kubelet, and why it couldn't."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gpunode.checks import fixes
from gpunode.checks.fixes import everywhere
from gpunode.checks.kubelet.daemon import has_own_plugin, restart_plugin
from gpunode.checks.model import CLUSTER_NODES, Check, Verdict, fail, note, ok, seen, skip, warn
from gpunode.errors import GpunodeError
from gpunode.facts.gpu_ways import dra_directory
from gpunode.facts.kernel_log import SOURCE
from gpunode.facts.node import Node
from gpunode.facts.xid_log import fallen_off, last_load
from gpunode.result import Evidence, Fix

if TYPE_CHECKING:
    from gpunode.facts.device_plugins import PluginLog

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
_NO_CONFIG = "specified config"
_API_SERVER = "/etc/kubernetes/manifests/kube-apiserver.yaml"
_OF_THE_CLUSTER = ("kube-", "calico-", "tigera-", "cilium", "node-feature-discovery_", "metallb-")
_WHOLE = ("nvidia.com/gpu", "nvidia.com/gpu.shared")
_GPU_WORDS = ("gpu", "nvidia", "cuda")  # every other vendor's name for a share of one has one of them
_SEEING = "Registered device plugin"
_PLUGIN = "nvidia-device-plugin"
_DEPLOY = everywhere("gpunode setup --kubernetes", "restart")
_ASK_OPERATOR = Fix("kubectl get pods --all-namespaces --selector app=nvidia-device-plugin-daemonset -o wide")
_BELOW = (
    *("pci-no-gpu", "driver-lib-mismatch", "nvml-hang", "kubelet-not-running", "kubelet-device-plugin-dir"),
    *("containerd-not-restarted", "containerd-runtime-missing", "containerd-runtime-binary"),
    *("crio-not-running", "crio-runtime-missing", "crio-runtime-path", "toolkit-too-old"),
)


def _starting(node: Node) -> str:
    """Why it is too early to judge what is offered; empty if it isn't."""
    process = node.kubelet.process if node.kubelet else None
    if process is not None and _young(node, process.started):
        return "the kubelet has just started, and plugins are about to register"
    if any(_young(node, one.process.started) for one in node.plugin_processes):
        return "a device plugin has just started, and is about to register"
    stage = busy_stage(node)
    return f"the GPU operator is still busy here: its validator is at {stage}" if stage else ""


def _young(node: Node, started: float) -> bool:
    return 0 <= node.host.now() - started < _YOUNG_SECONDS


def busy_stage(node: Node) -> str:
    """The stage at which the GPU operator's validator waits, as long as that takes no longer than usual."""
    from gpunode.facts.gpu_operator import stage_log

    operator = node.operator
    stage = operator.missing if operator.validators else ""
    log = stage_log(node.host, operator, stage) if stage else None
    return stage if log is not None and node.host.now() - log[2] < PATIENCE else ""


def _without_plugin(node: Node) -> Verdict | None:
    """Pods may get GPUs by nobody's leave: a runtime class, and a variable in the pod that names them."""
    meant = node.plugin_processes or node.plugin_logs or node.operator.pods or has_own_plugin(node)
    if meant or not node.cri_containers:
        return None
    seeing = {one.id for one in node.gpu_containers}
    pods = [one for one in node.cri_containers if one.id in seeing and "exporter" not in one.pod]
    if not pods:
        return None
    names = ", ".join(f"{one.namespace}/{one.pod}" for one in pods[:4])
    where = node.kubelet.endpoint if node.kubelet else "the CRI"
    return note(
        "pods use GPUs here without a device plugin, so Kubernetes doesn't count them", seen(where, names)
    )


def _kept_free(node: Node) -> Verdict | None:
    """kubeadm's control plane takes no ordinary pods by default, and so no device plugin either."""
    from gpunode.facts.device_plugins import POD_LOGS

    pods = node.host.listdir(POD_LOGS) if node.host.is_file(_API_SERVER) else ()
    if not pods or node.plugin_processes or not all(pod.startswith(_OF_THE_CLUSTER) for pod in pods):
        return None
    return note(
        "no device plugin is on this node of the control plane, which runs no ordinary pods",
        seen(_API_SERVER, "the control plane is here"),
        seen(POD_LOGS, f"{len(pods)} pods, all of the cluster's own"),
    )


def plugin_not_registered(node: Node) -> Verdict:
    allocatable = node.allocatable
    if allocatable is None:
        return skip("the kubelet doesn't tell which devices were offered to it")
    if allocatable.nvidia:
        return ok(f"offered to the kubelet: {', '.join(sorted(allocatable.nvidia))}")
    if dra_directory(node):
        return skip("GPUs are handed out by NVIDIA's DRA driver here, which needs no device plugin")
    early = _starting(node)
    if early:
        return skip(early)
    names = sorted(allocatable.resources)
    shared = [name for name in names if any(word in name.lower() for word in _GPU_WORDS)]
    if shared:
        return ok(f"GPUs are offered under another name: {', '.join(shared)}")
    plain = _without_plugin(node) or _kept_free(node)
    if plain is not None:
        return plain
    others = ", ".join(sorted(allocatable.resources)) or "none at all"
    evidence = [seen(allocatable.source, f"no resource nvidia.com/...; it knows {others}")]
    failed = _last_failure(node)
    if failed is not None:
        return _failing(*failed, *evidence)
    for plugin in node.plugin_processes:
        evidence.append(seen(f"/proc/{plugin.process.pid}", f"{plugin.name} runs, but has not registered"))
    fix = restart_plugin(node) if node.plugin_processes or has_own_plugin(node) else None
    if fix is None and node.operator.pods:  # it deploys a plugin by itself; a second one would get in its way
        fix = _ASK_OPERATOR
    return fail("no device plugin has offered GPUs to the kubelet", *evidence, fix=fix)


def _last_failure(node: Node) -> tuple[PluginLog, str] | None:
    """The last error that a container of a plugin's pod has logged, init and side containers included: one of
    those keeps the plugin from starting at all."""
    from gpunode.facts.device_plugins import plugin_logs

    found: list[tuple[PluginLog, str]] = []
    for log in plugin_logs(node.host, helpers=True):
        last = max((number for number, line in enumerate(log.lines) if _SEEING in line), default=-1)
        found += [(log, line) for line in log.lines[last + 1 :] if _ERROR.search(line)][-1:]
    return max(found, key=lambda one: one[1].split(" ", 1)[0], default=None)  # lines begin with their time


def _failing(log: PluginLog, line: str, *evidence: Evidence) -> Verdict:
    text = _cause(_HEADER.sub("", message(line)).removesuffix('"'))
    summary = f"the device plugin fails: {text}"
    name = f"{log.namespace} {log.pod} --container {log.container}"
    fix = Fix(f"kubectl logs --namespace {name} --previous", needs_root=False)
    if _NO_CONFIG in text:  # the label names a configuration that the plugin's ConfigMap lacks
        fix = Fix('kubectl label node "$(uname -n)" nvidia.com/device-plugin.config-', needs_root=False)
    return fail(summary, seen(log.path, message(line)), *evidence, fix=fix)


def _cause(text: str) -> str:
    """The end of a long error: Go programs put what went wrong first behind what it led to."""
    parts = text.split(": ")
    while len(parts) > 1 and len(": ".join(parts)) > _SHOWN:
        del parts[0]
    return ": ".join(parts)[:_SHOWN]


def allocatable_zero(node: Node) -> Verdict:
    allocatable = node.allocatable
    if allocatable is None or not allocatable.nvidia:
        return skip("no device plugin has offered GPUs to the kubelet")
    counts = {name: len(ids) for name, ids in sorted(allocatable.nvidia.items())}
    told = seen(allocatable.source, ", ".join(f"{name}: {count}" for name, count in counts.items()))
    early = _starting(node)
    if early:
        return skip(early)
    foreign = _foreign(node)
    if foreign is not None:
        return foreign
    fallen = _fallen(node)
    fix = fixes.REBOOT.other if fallen else restart_plugin(node)
    if not any(counts.values()):
        summary = "the kubelet can hand out none of this node's GPUs"
        return fail(summary, told, *fallen, *_last_words(node), fix=fix)
    usual = sum(gpu.driver == "nvidia" for gpu in node.gpus)
    # one that is divided or shared has ids of its own: UUID::3 is the fourth share of one GPU
    ids = {one.partition("::")[0] for some in allocatable.nvidia.values() for one in some}
    parts = any("mig" in name.lower() for name in (*ids, *counts))
    if parts or len(ids) >= usual or _chosen(node):
        return ok(f"{len(ids)} devices can be handed out", told)
    here = seen("/sys/bus/pci/devices", f"{usual} GPUs with the driver nvidia")
    summary = f"the kubelet can hand out {len(ids)} of {usual} GPUs"
    return warn(summary, told, here, *fallen, *_last_words(node), fix=fix)


def _fallen(node: Node) -> tuple[Evidence, ...]:
    """GPUs that fell off the bus since the driver was loaded: a plugin that starts again can't use them."""
    try:
        lines, loaded = fallen_off(node.kernel_log), last_load(node.kernel_log)
    except GpunodeError:
        return ()
    return tuple(seen(SOURCE, line.text) for line in lines if line.seconds >= loaded)[-1:]


def _foreign(node: Node) -> Verdict | None:
    """Another plugin has registered the name of the GPUs' resource for devices of its own."""
    from gpunode.facts.device_plugins import all_foreign

    allocatable, inventory = node.allocatable, node.nvml.inventory
    if allocatable is None or inventory is None or any(not gpu.uuid or gpu.error for gpu in inventory.gpus):
        return None
    gpus = {
        name for gpu in inventory.gpus for name in (gpu.uuid, f"nvidia{gpu.minor}")
    }  # the latter are GKE's
    for name in _WHOLE:
        ids = allocatable.nvidia.get(name, ())
        if any(one.startswith("MIG-") or "/gi" in one for one in ids):
            continue  # this user may not see MIG devices by NVML
        if all_foreign(ids, gpus):
            return fail(
                f"the kubelet offers {name} for devices that are not this node's GPUs",
                seen(allocatable.source, f"{name}: {', '.join(ids[:4])}"),
                seen("NVML", ", ".join(gpu.uuid for gpu in inventory.gpus[:4])),
                fix=Fix("gpunode plugin status"),
            )
    return None


def _chosen(node: Node) -> bool:
    """Whether the plugin was given some of the GPUs only, or nobody can tell."""
    given = [one.environment.get("NVIDIA_VISIBLE_DEVICES", "all") for one in node.plugin_processes]
    return any(value not in ("all", "void", "") for value in given)


def _last_words(node: Node) -> tuple[Evidence, ...]:
    marks = ("unhealthy", "error", "Error", *_BLIND)
    for log in node.plugin_logs:
        lines = [line for line in log.lines if any(mark in line for mark in marks)]
        if lines:
            return (seen(log.path, shown(lines[-1])),)
    return ()


def plugin_cannot_see_nvml(node: Node) -> Verdict:
    if not node.plugin_logs:
        return skip("no pod of NVIDIA's device plugin has a log here")
    if node.allocatable is not None and any(node.allocatable.nvidia.values()):
        return ok("a device plugin has offered GPUs")  # logs of pods that have ended stay for a while
    for log in node.plugin_logs:
        line = _blind_line(log)
        if line is not None:
            evidence, fix = _handler(node, log)
            return fail("the device plugin finds no GPUs", seen(log.path, shown(line)), *evidence, fix=fix)
    return ok("the device plugin's log tells of no trouble with NVML")


def _blind_line(log: PluginLog) -> str | None:
    """The last line that says so, unless it registered after that."""
    found = None
    for line in log.lines:
        if _SEEING in line:
            found = None
        elif any(mark in line for mark in _BLIND):
            found = line
    return found


def _handler(node: Node, log: PluginLog) -> tuple[tuple[Evidence, ...], Fix | None]:
    """Which runtime handler the pod runs under, if the engine tells: without nvidia it gets no libraries."""
    pods = [one for one in node.cri_containers if one.pod == log.pod]
    named = [one for one in pods if _PLUGIN in one.name or _PLUGIN in one.pod]
    if not named or named[0].handler.startswith("nvidia"):
        return (), None
    shown = named[0].handler or "the default one"
    where = node.kubelet.endpoint if node.kubelet else "the CRI"
    owner = log.pod.rpartition("-")[0]
    patch = '{"spec":{"template":{"spec":{"runtimeClassName":"nvidia"}}}}'
    command = f"kubectl --namespace {log.namespace} patch daemonset {owner} --patch '{patch}'"
    return (seen(where, f"pod {log.pod} runs under the handler {shown}"),), Fix(command, False, "restart")


def message(line: str) -> str:
    """A CRI log's line without time and stream."""
    words = line.split(" ", 3)
    return (words[3] if len(words) == 4 and words[1] in ("stdout", "stderr") else line).strip()


def shown(line: str) -> str:
    """The same, cut."""
    return message(line)[:_SHOWN]


_MIG = ("mig-enabled-no-instances", "mig-strategy-mismatch")  # either ends NVIDIA's device plugin
_REFS = ("https://github.com/NVIDIA/k8s-device-plugin#prerequisites",)
CHECKS = (
    Check(
        id="plugin-cannot-see-nvml",
        title="The device plugin finds the GPUs",
        layer="kubelet",
        severity="error",
        looks_at=(
            "the end of the newest log of NVIDIA's device plugin in /var/log/pods, and the runtime handler "
            "of its pod (CRI). A log that tells of a registration after the error is fine."
        ),
        why=(
            "The plugin's pod gets the driver's libraries from the nvidia runtime. Under another one it "
            "can't load NVML, offers no GPUs and only asks whether the toolkit is set up."
        ),
        remedy=everywhere(fixes.RESTART_PLUGIN_POD.command, "restart"),
        classes=CLUSTER_NODES,
        run=plugin_cannot_see_nvml,
        blocked_by=(*_BELOW, *_MIG),
        needs=("kubelet",),
        refs=_REFS,
    ),
    Check(
        id="plugin-not-registered",
        title="A device plugin has offered the GPUs",
        layer="kubelet",
        severity="error",
        looks_at=(
            "the resources nvidia.com/... that the running kubelet knows (PodResources), else those in its "
            "checkpoint. Where NVIDIA's DRA driver hands out GPUs none is needed."
        ),
        why="Kubernetes knows no GPUs by itself: 'Insufficient nvidia.com/gpu' until a plugin offers them.",
        remedy=_DEPLOY,
        classes=CLUSTER_NODES,
        run=plugin_not_registered,
        unless=("vfio-host",),
        blocked_by=(
            *(*_BELOW, "toolkit-missing", "operator-validations", "plugin-socket-dead"),
            *(*_MIG, "plugin-mount-mismatch", "plugin-cannot-see-nvml"),
        ),
        needs=("kubelet",),
        refs=_REFS,
    ),
    Check(
        id="allocatable-zero",
        title="The kubelet can hand out every GPU",
        layer="kubelet",
        severity="error",
        looks_at=(
            "how many devices of nvidia.com/... the running kubelet counts as healthy (PodResources, else "
            "its checkpoint) against the GPUs on the bus, and whether their ids are those of this node's "
            "GPUs (NVML). Shares and MIG devices may be more; a plugin that was given some of the GPUs only "
            "is fine."
        ),
        why=(
            "Pods that ask for GPUs stay pending: 'Insufficient nvidia.com/gpu'. A plugin calls a GPU "
            "unhealthy after an XID error and reports it as healthy only after a restart."
        ),
        remedy=everywhere(fixes.RESTART_PLUGIN_POD.command, "restart"),
        classes=CLUSTER_NODES,
        run=allocatable_zero,
        blocked_by=(
            *(*_BELOW, "gpu-lost", "gpu-reset-required", "pci-gpu-count-mismatch"),
            *(*_MIG, "plugin-socket-dead", "plugin-cannot-see-nvml"),
        ),
        needs=("kubelet",),
        unless=("vfio-host",),
        refs=_REFS,
    ),
)
