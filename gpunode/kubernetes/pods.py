"""Reasons why a pod isn't scheduled, doesn't start or fails, from its status, events and log, with a hint.

Pure functions; `commands.verify_kubernetes` queries the API server and waits.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from gpunode.kubernetes.api import one_line
from gpunode.output.typed import StrEnum, as_dict

# Messages are matched as kube-scheduler, kubelet, containerd, CRI-O and admission write them (Kubernetes 1.20
# to 1.36); an unknown one is reported as it is.

DOCTOR = "find out why: gpunode doctor"
_SELECTED = ("didn't match Pod's node affinity", "didn't match node selector", "didn't match Pod's node")
# up to Kubernetes 1.35 with the taint, "untolerated taint {team: ml}"; then "untolerated taint(s)"
_TAINT = re.compile(r"taint \{([^:}\s]+)(?::\s*([^}]*))?\}|untolerated taint\(s\)")
# sentences of plugins that follow the causes: "preemption: ...", "no new claims to deallocate, ..."
_TAIL = re.compile(r"\. (?!\d+ ).*")


class Reason(NamedTuple):
    """`code` is stable; `patience`: seconds that the reason may last before further waiting is pointless."""

    code: str
    message: str
    hint: str = ""
    patience: float = float("inf")


class Aim(NamedTuple):
    """The node and resource that the pod requests: `resources` are the node's allocatable ones by name.

    `capacity` counts unhealthy devices too; `unhealthy` describes those with a known reason. `taints` are
    those of the node that the pod doesn't tolerate, such as ``team=ml:NoSchedule``.
    """

    node: str
    resource: str
    image: str
    resources: Mapping[str, str]
    capacity: Mapping[str, str] = MappingProxyType({})
    unhealthy: tuple[str, ...] = ()
    taints: tuple[str, ...] = ()

    @property
    def available(self) -> int:
        return _count(self.resources, self.resource)

    @property
    def sick(self) -> int:
        """Number of devices that the node has but can't allocate."""
        return max(0, _count(self.capacity, self.resource) - self.available)


def _count(resources: Mapping[str, str], name: str) -> int:
    amount = str(resources.get(name, "0"))
    return int(amount) if amount.isdecimal() else 0


# --- not scheduled --------------------------------------------------------------------------------------


def unschedulable(message: str, aim: Aim) -> Reason:
    """The scheduler's message, reduced to the causes that concern our node: the pod selects no other."""
    text = _TAIL.sub(".", one_line(message))
    causes = [cause for cause in _causes(text) if not any(word in cause for word in _SELECTED)]
    message = f"the pod can't be scheduled on {aim.node}: {', '.join(causes) or text}"
    if any(f"Insufficient {aim.resource}" in cause for cause in causes):
        return _insufficient(aim)
    if match := next(filter(None, map(_TAINT.search, causes)), None):
        taints = aim.taints or ((match[1],) if match[1] else ())
        if aim.taints:
            message = f"the pod can't be scheduled on {aim.node}: it does not tolerate the node's taint"
            message += f" {' and '.join(aim.taints)}"
        return Reason("pending-taint", message, _taint_hint(taints, aim.node), 30)
    if any("unschedulable" in cause for cause in causes):
        return Reason("pending-cordoned", message, f"kubectl uncordon {aim.node}", 30)
    if not causes and text:
        hint = f"compare its label kubernetes.io/hostname: kubectl get node {aim.node} --show-labels"
        return Reason("pending-selector", f"no node has the label that the pod selects: {text}", hint, 30)
    return Reason("pending-unschedulable", message, "see: kubectl describe pod", 60)


def _causes(message: str) -> list[str]:
    """``0/3 nodes are available: 1 Insufficient nvidia.com/gpu, 2 node(s) ...`` without the numbers."""
    listed = message.partition("nodes are available:")[2]
    parts = re.split(r", (?=\d+ )|(?<=\.) (?=\d+ )", listed.strip())
    return [re.sub(r"^\d+ ", "", part).rstrip(".,") for part in parts if part.strip()]


def _insufficient(aim: Aim) -> Reason:
    count = aim.available
    which = f" ({'; '.join(aim.unhealthy)})" if aim.unhealthy else ""
    if count:
        more = f", and {aim.sick} unhealthy{which}" if aim.sick else ""
        return Reason(
            "pending-gpu-in-use",
            f"all {count} {aim.resource} of {aim.node} are in use{more}",
            "see which pods hold them: gpunode plugin status",
            60,
        )
    if aim.sick:
        sick = f"all {aim.sick} {aim.resource} of {aim.node} are unhealthy{which}"
        return Reason("pending-no-gpu", sick, "gpunode plugin status on that node; gpunode doctor", 60)
    domain = aim.resource.partition("/")[0]
    others = [
        name for name, amount in aim.resources.items() if name.startswith(f"{domain}/") and amount != "0"
    ]
    if others:
        hint = f"request what it has: --resource {shlex.quote(sorted(others)[0])}"
    else:
        hint = "does a device plugin run there? gpunode plugin status; gpunode doctor"
    return Reason("pending-no-gpu", f"{aim.node} offers no {aim.resource}", hint, 60)


def _taint_hint(taints: Sequence[str], node: str) -> str:
    """For taints as the node or the scheduler spells them: ``team=ml:NoSchedule``, ``team``."""
    if not taints:
        return f"see its taints: kubectl describe node {node}"
    key = re.split("[=:]", taints[0])[0]
    if key == "node.kubernetes.io/unschedulable":
        return f"kubectl uncordon {node}"
    if key.startswith("node.kubernetes.io/"):
        return f"the node has a problem: kubectl describe node {node}"
    taint = shlex.quote(f"{key}-")
    return f"the test pod tolerates its resource's own taint only: kubectl taint nodes {node} {taint}"


# --- not started ----------------------------------------------------------------------------------------


def waiting(state: Mapping[str, Any], events: Sequence[Mapping[str, Any]], aim: Aim) -> Reason | None:
    """Why a container waits (ContainerStateWaiting); None while it starts normally."""
    reason, message = one_line(state.get("reason")), one_line(state.get("message"))
    if "Image" in reason or reason == "RegistryUnavailable":
        return _image(reason, message, events, aim)
    if reason in ("CreateContainerError", "CreateContainerConfigError", "RunContainerError"):
        return Reason("pending-container", f"{reason}: {message}", start_hint(message, aim), 15)
    return None


def _image(reason: str, message: str, events: Sequence[Mapping[str, Any]], aim: Aim) -> Reason:
    """The kubelet reports the cause in an event; later events only say that it backs off."""
    causes = [one_line(entry.get("message")) for entry in events if entry.get("reason") == "Failed"]
    known = [
        cause
        for cause in (message, *reversed(causes))
        if cause and not cause.startswith(("Back-off", "Error:"))
    ]
    cause = known[0] if known else message
    hint = "is the name right, and can the node reach the registry? --image names a copy of your own"
    if re.search(r"(?i)unauthorized|denied|authentication|403 Forbidden|401", cause):
        hint = "the registry requires a login: copy the image to one without, and name it with --image"
    elif "no match for platform" in cause or "no matching manifest" in cause:
        hint = "there is no such image for this node's processor: name one with --image"
    elif "ErrImageNeverPull" in reason:
        hint = "the image must be on the node already: pull it there"
    return Reason("pending-image", f"{reason}: {aim.image}: {cause}", hint, 45)


def start_hint(message: str, aim: Aim) -> str:
    """The hint for an engine's error when it creates or starts a container."""
    if "unresolvable CDI devices" in message or "CDI device" in message:
        return "the device is missing from the CDI specification: gpunode cdi list; gpunode cdi refresh"
    if "runAsNonRoot" in message or "run as root" in message:
        return f"{aim.image} runs only as root; name another image with --image"
    if "exec format error" in message:
        return "the image is for another processor: name one with --image"
    if "nvidia-container" in message or "nvidia-ctk" in message or "nvidia-cdi-hook" in message:
        return "the NVIDIA Container Toolkit failed: gpunode doctor; gpunode verify"
    if re.search(r"executable file not found|no such file or directory", message):
        return "the runtime's program or the image's is missing: gpunode status runtime"
    return DOCTOR


_HANDLER = re.compile(r"""(?:no runtime for|runtime handler|RuntimeHandler)\s*\\?"?([-a-z0-9]+)\\?"?""")


def event_time(event: Mapping[str, Any]) -> str:
    """RFC 3339 in UTC, which sorts as text; the newer API has eventTime, the older one lastTimestamp."""
    created = as_dict(event.get("metadata")).get("creationTimestamp")
    return str(event.get("lastTimestamp") or event.get("eventTime") or created or "")


def event(fields: Mapping[str, Any], aim: Aim) -> Reason | None:
    """A warning about a pod without a container yet; None for one that isn't known to delay it."""
    reason, message = one_line(fields.get("reason")), one_line(fields.get("message"))
    if reason == "FailedScheduling":
        return unschedulable(message, aim)
    if reason == "FailedCreatePodSandBox":
        if match := _HANDLER.search(message):
            hint = f"gpunode configure-runtime --nvidia-runtime-name {match[1]}; or another --runtime-class"
            message = (
                f"the node's engine has no runtime {match[1]!r}, which the RuntimeClass names: {message}"
            )
            return Reason("pending-runtime-handler", message, hint, 30)
        return Reason("pending-sandbox", f"{reason}: {message}", f"kubectl describe node {aim.node}", 60)
    if reason in ("FailedMount", "NetworkNotReady", "FailedPostStartHook"):
        return Reason("pending-node", f"{reason}: {message}", f"kubectl describe node {aim.node}", 60)
    return None


# --- ended badly ----------------------------------------------------------------------------------------

_FAILED = {
    "UnexpectedAdmissionError": "the device plugin refused: see gpunode plugin status, and its log",
    "DeadlineExceeded": "it took longer than --timeout allows; a GPU may hang: gpunode doctor",
    "Evicted": "the node is short of memory or disk: kubectl describe node",
    "OOMKilled": "the pod's memory was too little for the driver; is the node short of memory?",
    "TopologyAffinityError": "the kubelet's topology manager found no fitting NUMA node",
    "NodeShutdown": "the node was shutting down",
}


def failed(reason: str, message: str, aim: Aim) -> Reason:
    """A pod of phase Failed: its own reason, or its container's."""
    reason, message = one_line(reason), one_line(message)
    text = ": ".join(filter(None, (reason, message)))
    if reason.startswith("OutOf"):
        hint = "another pod got the GPU first: gpunode plugin status"
    elif reason in ("StartError", "ContainerCannotRun"):
        hint = start_hint(message, aim)
    else:
        hint = _FAILED.get(reason, DOCTOR)
    return Reason("pod-failed", text or "it failed without a reason", hint)


_LOGGED = (
    (
        "driver version is insufficient",
        "the image's CUDA is newer than the driver takes: gpunode doctor --image {image}",
    ),
    (
        "no CUDA-capable device",
        "the container was given no GPU: gpunode status runtime; is --runtime-class right?",
    ),
    ("system not yet initialized", "systemctl status nvidia-fabricmanager"),
    ("no kernel image is available", "the image is older than this GPU: name a newer one with --image"),
    ("system has unsupported display driver", "reboot, or reload the nvidia modules: gpunode doctor"),
    ("libcuda.so", "the container was given no driver: gpunode status runtime"),
    ("exec format error", "the image is for another processor: name one with --image"),
)


def logged(log: str, aim: Aim) -> Reason:
    """The program's own error; the last line of the log if it is unknown."""
    lines = [one_line(line) for line in log.splitlines() if line.strip()]
    for words, hint in _LOGGED:
        line = next((line for line in lines if words in line), "")
        if line:
            return Reason("vector-add-failed", line, hint.format(image=aim.image))
    return Reason("vector-add-failed", lines[-1] if lines else "its log is empty", DOCTOR)


# --- refused at once ------------------------------------------------------------------------------------


def refused(message: str, namespace: str, runtime_class: str) -> tuple[str, str]:
    """(code, hint) for a pod that the API server rejects; empty where its own message is the best help."""
    if "failed calling webhook" in message or "failed calling policy" in message:
        name = re.search(r'failed calling webhook \\?"([^"\\\\]+)', message)
        hint = f"the webhook {name[1] if name else ''} doesn't answer: find its pod with kubectl get pods -A"
        return "pending-webhook", hint
    if re.search(r"(minimum|maximum) \S+ usage per (Pod|Container)", message):
        return (
            "pending-limits",
            f"see: kubectl -n {namespace} describe limitrange; or name another --namespace",
        )
    if re.search(r'namespaces "[^"]*" not found', message):
        return "pending-namespace", f"kubectl create namespace {namespace}; or name another with --namespace"
    if "exceeded quota" in message or "must specify" in message:
        return "pending-quota", f"see: kubectl -n {namespace} describe quota; another --namespace may be free"
    if "violates PodSecurity" in message or "security context constraint" in message:
        return "pending-pod-security", f"{namespace} forbids such pods: name another with --namespace"
    if "RuntimeClass" in message and "not found" in message:
        return "pending-runtime-class", _class_hint(runtime_class)
    if "error looking up service account" in message:
        return "pending-account", f"{namespace} has no account yet, or lost it: run this again"
    if "is being terminated" in message:
        return "pending-namespace", "name another with --namespace"
    if "denied the request" in message or "denied request" in message:  # webhooks, and admission policies
        return (
            "pending-admission",
            "an admission policy of the cluster rejects it: try another --image or --namespace",
        )
    return "", ""


def _class_hint(name: str) -> str:
    return f"gpunode manifests runtime-class --nvidia-runtime-name {name} | kubectl apply --filename -"


def missing_class(name: str) -> str:
    """The hint for a missing RuntimeClass."""
    return f"{_class_hint(name)}; or without one: --runtime-class="


PASSED = "Test PASSED"  # what NVIDIA's vectorAdd sample prints
_GONE = Reason("pod-deleted", "another client deletes the pod", "run this again")


class Phase(StrEnum):
    """A pod's phase, and Gone for one that is deleted."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    GONE = "Gone"


class PodState(NamedTuple):
    """`reason`: why the pod doesn't progress, or failed; None while it progresses."""

    phase: Phase
    reason: Reason | None = None

    @property
    def ended(self) -> bool:
        return self.phase in (Phase.SUCCEEDED, Phase.FAILED, Phase.GONE)


def state(pod: Mapping[str, Any], events: Sequence[Mapping[str, Any]], aim: Aim) -> PodState:
    """A pod's state; parts of a wrong type are ignored. `events` oldest first."""
    status = as_dict(pod.get("status"))
    phase = str(status.get("phase") or "Pending")
    if phase == Phase.SUCCEEDED:
        return PodState(Phase.SUCCEEDED)
    if phase == Phase.FAILED:
        return PodState(Phase.FAILED, _failure(status, aim))
    if as_dict(pod.get("metadata")).get("deletionTimestamp"):
        return PodState(Phase.GONE, _GONE)
    if phase == Phase.RUNNING:
        return PodState(Phase.RUNNING)
    return PodState(Phase.PENDING, _hindrance(status, events, aim))


def _failure(status: Mapping[str, Any], aim: Aim) -> Reason:
    if status.get("reason"):
        return failed(str(status["reason"]), str(status.get("message") or ""), aim)
    for container in _maps(status.get("containerStatuses")):
        ended = as_dict(as_dict(container.get("state")).get("terminated"))
        if ended:
            text = str(ended.get("message") or f"exit code {ended.get('exitCode')}")
            return failed(str(ended.get("reason") or "Error"), text, aim)
    return failed("", str(status.get("message") or ""), aim)


def _hindrance(status: Mapping[str, Any], events: Sequence[Mapping[str, Any]], aim: Aim) -> Reason | None:
    """By the container's own state, then the scheduler's condition, then the last known warning."""
    for container in _maps(status.get("containerStatuses")):
        hindrance = waiting(as_dict(as_dict(container.get("state")).get("waiting")), events, aim)
        if hindrance is not None:
            return hindrance
    for condition in _maps(status.get("conditions")):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            if condition.get("reason") == "SchedulingGated":
                gates = "an admission webhook of the cluster gates new pods"
                return Reason("pending-gated", gates, "see the gates: kubectl describe pod", 60)
            return unschedulable(str(condition.get("message") or ""), aim)
    scheduled = any(
        condition.get("type") == "PodScheduled" and condition.get("status") == "True"
        for condition in _maps(status.get("conditions"))
    )
    for warning in reversed([warning for warning in events if warning.get("type") == "Warning"]):
        if scheduled and warning.get("reason") == "FailedScheduling":
            continue  # from before it was scheduled
        if (reason := event(warning, aim)) is not None:
            return reason
    return None


def verdict(pod_state: PodState, log: str, aim: Aim) -> Reason | None:
    """None if it passed: it succeeded, and its log contains the pass message. A shell may hide that the
    program failed."""
    if pod_state.phase is Phase.SUCCEEDED:
        if PASSED in log:
            return None
        text = f"the pod succeeded without {PASSED!r} in its log"
        return Reason("vector-add-silent", text, "is it a vector-add sample? --image names another")
    reason = pod_state.reason
    by_program = reason is None or reason.message.startswith(("Error", "Completed"))
    if pod_state.phase is Phase.FAILED and log.strip() and by_program:
        return logged(log, aim)  # which has the best reason
    return reason


def allocation(pod: Mapping[str, Any]) -> str:
    """What allocated the GPU: ``device plugin``, or the scheduler's claim for it (Kubernetes 1.34,
    DRAExtendedResource: status.extendedResourceClaimStatus)."""
    claim = as_dict(as_dict(pod.get("status")).get("extendedResourceClaimStatus")).get("resourceClaimName")
    return f"resource claim {one_line(claim)}" if claim else "device plugin"


def _maps(value: Any) -> list[dict[str, Any]]:
    return [element for element in value if isinstance(element, dict)] if isinstance(value, list) else []
