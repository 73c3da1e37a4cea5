"""Pods that hold GPUs: whether they got what the kubelet gave them."""

from __future__ import annotations

from gpunode.checks.fixes import everywhere
from gpunode.checks.model import CLUSTER_NODES, Check, Verdict, note, ok, seen, skip, warn
from gpunode.facts.gpu_ways import holders
from gpunode.facts.node import Node
from gpunode.result import Fix

_CAPABILITIES = "NVIDIA_DRIVER_CAPABILITIES"


def runtimeclass_missing(node: Node) -> Verdict:
    found = holders(node)
    if not found:
        return skip("no running container is known to hold a GPU")
    without = [one for one in found if not one.container.nodes]
    if not without:
        return ok(f"all {len(found)} containers that hold GPUs have device files for them")
    evidence = [
        seen(
            f"/proc/{one.container.pid}/root/dev",
            f"{one.name}: no NVIDIA device file; its handler is {one.handler or 'the default'}",
        )
        for one in without
    ]
    named = [one.name for one in without if one.handler.startswith("nvidia")]
    fix = Fix("gpunode verify --runtime containerd") if named else None
    return warn(f"{len(without)} containers hold GPUs and see none of them", *evidence[:8], fix=fix)


def pod_driver_capabilities(node: Node) -> Verdict:
    from gpunode.facts.processes import environment

    held = holders(node)
    if not held:
        return skip("no running container is known to hold a GPU")
    found = []
    for one in held:
        value = environment(node.host, one.container.pid).get(_CAPABILITIES, "")
        if value and not {"all", "compute"} & set(value.split(",")):
            found.append(seen(f"/proc/{one.container.pid}/environ", f"{one.name}: {_CAPABILITIES}={value}"))
    if found:
        return note(f"{len(found)} containers that hold GPUs asked for no CUDA libraries", *found[:8])
    return ok("whoever holds GPUs has CUDA's libraries")


def hostusers_false(node: Node) -> Verdict:
    from gpunode.facts.toolkit_settings import runtime_mode

    if runtime_mode(node.toolkit_settings, node.toolkit.version) != "legacy":
        return ok("the nvidia runtime works in pods with a user namespace")
    named = {one.id: one for one in node.cri_containers}
    found = []
    for one in node.containers if named else ():
        pod = named.get(one.id)
        path = f"/proc/{one.pid}/uid_map"
        first = (node.host.read_text(path) or "0 0").split()[:2]
        if pod is not None and first != ["0", "0"]:
            found.append(seen(path, f"pod {pod.namespace}/{pod.pod} has user ids from {first[1]} on"))
    if found:
        return note("pods have user namespaces here, which the toolkit's hook can't give GPUs", *found[:4])
    return ok("no pod here has a user namespace")


CHECKS = (
    Check(
        id="hostusers-false",
        title="Pods with a user namespace can have GPUs",
        layer="kubelet",
        severity="info",
        looks_at="pods with a user namespace (/proc/PID/uid_map) where the nvidia runtime is in mode legacy.",
        why=(
            "With hostUsers: false a pod's processes are nobody on the node, and the hook of mode legacy "
            "fails: 'read status from sync socket'. In mode cdi there is no such hook."
        ),
        remedy=everywhere("gpunode toolkit config set nvidia-container-runtime.mode=cdi"),
        classes=CLUSTER_NODES,
        run=hostusers_false,
        blocked_by=("pci-no-gpu", "kubelet-not-running", "toolkit-missing", "toolkit-config-invalid"),
        needs=("kubelet",),
        refs=("https://kubernetes.io/docs/concepts/workloads/pods/user-namespaces/",),
    ),
    Check(
        id="runtimeclass-missing",
        title="Pods that hold GPUs run under the nvidia runtime",
        layer="kubelet",
        severity="warning",
        looks_at=(
            "the containers that hold nvidia.com/... (PodResources), their runtime handlers (CRI) and "
            "whether NVIDIA's files are in their /dev (/proc/PID/root/dev)."
        ),
        why=(
            "Under the default handler a pod gets GPUs on paper only. CUDA programs then say 'CUDA driver "
            "version is insufficient for CUDA runtime version', which is no matter of versions. Their pods "
            "need runtimeClassName: nvidia."
        ),
        remedy=everywhere("gpunode manifests runtime-class | kubectl apply --filename -"),
        classes=CLUSTER_NODES,
        run=runtimeclass_missing,
        blocked_by=("pci-no-gpu", "kubelet-not-running", "containerd-runtime-missing"),
        needs=("kubelet",),
        refs=("https://kubernetes.io/docs/concepts/containers/runtime-class/",),
    ),
    Check(
        id="pod-driver-capabilities",
        title="Pods that hold GPUs asked for CUDA",
        layer="kubelet",
        severity="info",
        looks_at=f"{_CAPABILITIES} in the environment of containers that hold GPUs.",
        why=(
            "The toolkit mounts what this variable names. Without compute (or all) libcuda.so.1 isn't in the "
            "container; programs that only draw or encode don't need it."
        ),
        remedy=everywhere(
            f"kubectl get pods --all-namespaces --output yaml | grep --context 1 {_CAPABILITIES}",
            needs_root=False,
        ),
        classes=CLUSTER_NODES,
        run=pod_driver_capabilities,
        blocked_by=("pci-no-gpu", "kubelet-not-running"),
        needs=("kubelet",),
        refs=(
            "https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/"
            "docker-specialized.html#driver-capabilities",
        ),
    ),
)
