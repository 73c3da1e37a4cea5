"""Pods that don't start or don't pass as API servers describe them, and gpunode's explanations."""

from __future__ import annotations

from typing import Any

GPU = "nvidia.com/gpu"
RUNNING = {"phase": "Running", "containerStatuses": [{"state": {"running": {}}}]}
SUCCEEDED = {"phase": "Succeeded"}
PLACED = [{"type": "PodScheduled", "status": "True"}]


def failed(exit_code: int = 1, reason: str = "Error", message: str = "") -> dict[str, Any]:
    ended = {"exitCode": exit_code, "reason": reason, **({"message": message} if message else {})}
    return {"phase": "Failed", "containerStatuses": [{"state": {"terminated": ended}}]}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"phase": "Pending", "conditions": PLACED, "containerStatuses": [{"state": state}]}


def unscheduled(message: str) -> dict[str, Any]:
    said = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"phase": "Pending", "conditions": [said]}


AVAILABLE = "0/3 nodes are available: "
PENDING: list[tuple[str, dict[str, Any], str, str, str]] = [
    (
        "all GPUs in use",
        unscheduled(
            f"{AVAILABLE}1 Insufficient {GPU}, 2 node(s) didn't match Pod's node affinity/selector."
            " preemption: 0/3 nodes are available: 1 No preemption victims found for incoming pod."
        ),
        "pending-gpu-in-use",
        "all 8 nvidia.com/gpu of gpu-1 are in use",
        "gpunode plugin status",
    ),
    (
        "a taint",
        unscheduled(
            f"{AVAILABLE}1 node(s) had untolerated taint {{team: ml}}, 2 node(s) didn't match Pod's node"
            " affinity/selector. preemption: none"
        ),
        "pending-taint",
        "untolerated taint {team: ml}",
        "kubectl taint nodes gpu-1 team-",
    ),
    (
        "an older scheduler's taint",
        unscheduled(f"{AVAILABLE}1 node(s) had taint {{team: ml}}, that the pod didn't tolerate."),
        "pending-taint",
        "had taint {team: ml}",
        "kubectl taint nodes gpu-1 team-",
    ),
    (
        "a taint that the scheduler of 1.36 doesn't name",
        unscheduled(
            f"{AVAILABLE}1 node(s) had untolerated taint(s), 2 node(s) didn't match Pod's node"
            " affinity/selector. no new claims to deallocate, preemption: 0/3 nodes are available: 3"
            " Preemption is not helpful for scheduling."
        ),
        "pending-taint",
        "the pod can't be scheduled on gpu-1: node(s) had untolerated taint(s)",
        "kubectl describe node gpu-1",
    ),
    (
        "a node that isn't ready",
        unscheduled(f"{AVAILABLE}1 node(s) had untolerated taint {{node.kubernetes.io/not-ready: }}."),
        "pending-taint",
        "not-ready",
        "kubectl describe node gpu-1",
    ),
    (
        "cordoned",
        unscheduled(f"{AVAILABLE}1 node(s) were unschedulable, 2 node(s) didn't match Pod's node affinity."),
        "pending-cordoned",
        "were unschedulable",
        "kubectl uncordon gpu-1",
    ),
    (
        "another hostname",
        unscheduled(f"{AVAILABLE}3 node(s) didn't match Pod's node affinity/selector."),
        "pending-selector",
        "no node has the label",
        "--show-labels",
    ),
    (
        "no such image",
        waiting("ErrImagePull", "failed to pull and unpack image: not found"),
        "pending-image",
        "ErrImagePull: nvcr.io",
        "--image",
    ),
    (
        "a registry's login",
        waiting("ErrImagePull", "pull access denied, repository does not exist or may require authorization"),
        "pending-image",
        "pull access denied",
        "requires a login",
    ),
    (
        "an image for another processor",
        waiting("ErrImagePull", "no match for platform in manifest: not found"),
        "pending-image",
        "no match for platform",
        "processor",
    ),
    (
        "an image that may not be pulled",
        waiting("ErrImageNeverPull", "Container image is not present with pull policy of Never"),
        "pending-image",
        "ErrImageNeverPull",
        "pull it there",
    ),
    (
        "a runtime that fails",
        waiting(
            "CreateContainerError",
            "nvidia-container-cli: initialization error: nvml error: driver not loaded",
        ),
        "pending-container",
        "CreateContainerError: nvidia-container-cli",
        "gpunode doctor",
    ),
    (
        "a CDI device that isn't there",
        waiting(
            "RunContainerError", "CDI device injection failed: unresolvable CDI devices nvidia.com/gpu=0"
        ),
        "pending-container",
        "unresolvable CDI devices",
        "gpunode cdi refresh",
    ),
    (
        "an image of root's",
        waiting("CreateContainerConfigError", "container has runAsNonRoot and image will run as root"),
        "pending-container",
        "runAsNonRoot",
        "runs only as root",
    ),
    (
        "a program for another processor",
        waiting("RunContainerError", "exec /vectorAdd: exec format error"),
        "pending-container",
        "exec format error",
        "for another processor",
    ),
    (
        "a runtime whose program is missing",
        waiting("RunContainerError", 'exec: "/usr/bin/runc": stat /usr/bin/runc: no such file or directory'),
        "pending-container",
        "no such file or directory",
        "gpunode status runtime",
    ),
    (
        "a gate of an admission webhook",
        {
            "phase": "Pending",
            "conditions": [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}],
        },
        "pending-gated",
        "gates new pods",
        "see the gates",
    ),
]
"""(name, the pod's status, code, part of the message, part of the hint)."""
EVENTS: list[tuple[str, str, str, str]] = [
    (
        "FailedCreatePodSandBox",
        "Failed to create pod sandbox: rpc error: code = Unknown desc = failed to get sandbox runtime: no"
        ' runtime for "nvidia" is configured',
        "pending-runtime-handler",
        "gpunode configure-runtime --nvidia-runtime-name nvidia",
    ),
    (
        "FailedCreatePodSandBox",
        "rpc error: failed to find runtime handler nvidia from runtime list map[runc:0xc0]",
        "pending-runtime-handler",
        "gpunode configure-runtime --nvidia-runtime-name nvidia",
    ),
    (
        "FailedCreatePodSandBox",
        "plugin type=calico failed (add): stat /var/lib/calico/nodename: no such file",
        "pending-sandbox",
        "kubectl describe node gpu-1",
    ),
    (
        "FailedMount",
        'MountVolume.SetUp failed for volume "kube-api-access"',
        "pending-node",
        "kubectl describe node gpu-1",
    ),
]
"""(reason, message, code, how the hint begins)."""
FAILED: list[tuple[dict[str, Any], str, str, str, str]] = [
    (
        failed(),
        "Failed to allocate device vector A (error code CUDA driver version is insufficient for"
        " CUDA runtime version)!\n",
        "vector-add-failed",
        "driver version is insufficient",
        "gpunode doctor --image nvcr.io",
    ),
    (
        failed(),
        "Failed to allocate device vector A (error code no CUDA-capable device is detected)!\n",
        "vector-add-failed",
        "no CUDA-capable device",
        "--runtime-class",
    ),
    (failed(), "system not yet initialized\n", "vector-add-failed", "not yet", "nvidia-fabricmanager"),
    (failed(), "what\nnobody knows\n", "vector-add-failed", "nobody knows", "gpunode doctor"),
    (failed(), "", "pod-failed", "Error: exit code 1", "gpunode doctor"),
    (
        {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "Allocate failed"},
        "",
        "pod-failed",
        "UnexpectedAdmissionError: Allocate failed",
        "gpunode plugin status",
    ),
    (
        {"phase": "Failed", "reason": "OutOfnvidia.com/gpu", "message": "Node didn't have enough"},
        "",
        "pod-failed",
        "OutOfnvidia.com/gpu",
        "another pod got the GPU first",
    ),
    (
        {"phase": "Failed", "reason": "DeadlineExceeded", "message": "active on the node longer"},
        "half a line",
        "pod-failed",
        "DeadlineExceeded",
        "--timeout",
    ),
    (
        failed(128, "StartError", "OCI runtime create failed: nvidia-container-cli: ldcache error"),
        "",
        "pod-failed",
        "StartError",
        "Toolkit failed",
    ),
    (SUCCEEDED, "Done\n", "vector-add-silent", "without 'Test PASSED'", "--image"),
]
"""(the pod's status, its log, code, part of the message, part of the hint)."""
