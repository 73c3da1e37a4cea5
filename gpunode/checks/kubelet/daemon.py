"""The kubelet and the device plugins' sockets."""

from __future__ import annotations

from gpunode.checks import fixes
from gpunode.checks.model import CLUSTER_NODES, Check, Verdict, fail, note, ok, seen, skip, warn
from gpunode.checks.units import seen_unit
from gpunode.facts.kubelet import DEVICE_PLUGINS, Kubelet, sockets_in
from gpunode.facts.node import Node
from gpunode.facts.units import read_unit
from gpunode.result import Fix

_ABSENT = "there is no kubelet on this node"
_PLUGINS = ("nvidia", "gpunode")
_OUR_UNIT = "gpunode-device-plugin.service"


def kubelet_not_running(node: Node) -> Verdict:
    kubelet = node.kubelet
    if kubelet is None:
        return skip(_ABSENT)
    if kubelet.process is not None:
        if node.kubelet_silence:
            told = seen(f"/proc/{kubelet.process.pid}", node.kubelet_silence)
            return warn("the kubelet runs, but doesn't answer", told, fix=_restart(kubelet))
        return ok("the kubelet runs", seen(f"/proc/{kubelet.process.pid}/cmdline", kubelet.process.name))
    if not kubelet.joined:
        return skip("the kubelet is installed, but no cluster has taken this node yet")
    evidence = seen(kubelet.unit or "/proc", "no such process")
    unit = seen_unit(node, kubelet.unit) if kubelet.unit else ()
    return fail("the kubelet isn't running", evidence, *unit, fix=_restart(kubelet))


def _restart(kubelet: Kubelet) -> Fix | None:
    if kubelet.unit is None:
        return None
    return Fix(f"systemctl restart {kubelet.unit.removesuffix('.service')}", True, "restart")


def kubelet_device_plugin_dir(node: Node) -> Verdict:
    kubelet = node.kubelet
    if kubelet is None or not kubelet.joined:
        return skip(_ABSENT if kubelet is None else "no cluster has taken this node yet")
    path = f"{DEVICE_PLUGINS}/kubelet.sock"
    state = node.host.socket_state(path)
    if state == "denied":
        return skip(f"needs root to read {path}")
    if state != "listening":
        return fail(
            "the kubelet's device plugin socket doesn't answer", seen(path, state), fix=_restart(kubelet)
        )
    return ok("the kubelet listens for device plugins", seen(path, "listening"))


def plugin_socket_dead(node: Node) -> Verdict:
    if node.kubelet is None or not node.kubelet.joined:
        return skip(_ABSENT if node.kubelet is None else "no cluster has taken this node yet")
    names = [name for name in sockets_in(node.host, DEVICE_PLUGINS) if name.startswith(_PLUGINS)]
    if not names:
        return skip("no device plugin for NVIDIA GPUs has a socket here")
    dead = [name for name in names if node.host.socket_state(f"{DEVICE_PLUGINS}/{name}") == "refused"]
    if dead:
        evidence = (seen(f"{DEVICE_PLUGINS}/{name}", "nobody listens behind it") for name in dead)
        if len(dead) < len(names):
            paths = " ".join(f"{DEVICE_PLUGINS}/{name}" for name in dead)
            summary = "a device plugin left its socket, another one answers"
            return note(summary, *evidence, fix=Fix(f"rm {paths}"))
        if node.allocatable is not None and node.allocatable.told and any(node.allocatable.nvidia.values()):
            return note("a device plugin left its socket, and GPUs are offered without it", *evidence)
        return fail("a device plugin died and left its socket", *evidence, fix=restart_plugin(node))
    return _silent(node, names) or ok(
        f"{len(names)} device plugin socket{'s' if len(names) > 1 else ''} answer"
    )


def _silent(node: Node, names: list[str]) -> Verdict | None:
    """A plugin that listens and answers nothing; it is only asked where that was asked for."""
    from gpunode.facts.device_plugins import plugin_answers

    for name in names if node.questions.deep else ():
        path = f"{DEVICE_PLUGINS}/{name}"
        if node.host.socket_state(path) == "listening" and plugin_answers(node.host, path) is False:
            told = seen(path, "no answer to GetDevicePluginOptions within 2 seconds")
            return fail("a device plugin listens, but doesn't answer", told, fix=restart_plugin(node))
    return None


def restart_plugin(node: Node) -> Fix:
    """gpunode's plugin is a service of the node, NVIDIA's a pod; their sockets have the same name."""
    return fixes.RESTART_PLUGIN.other if has_own_plugin(node) else fixes.RESTART_PLUGIN_POD


def has_own_plugin(node: Node) -> bool:
    return read_unit(node.host, _OUR_UNIT) is not None


CHECKS = (
    Check(
        id="kubelet-not-running",
        title="The kubelet runs",
        layer="kubelet",
        severity="error",
        looks_at=(
            "processes, units (kubelet, k3s, rke2, k0s, microk8s) and /var/lib/kubelet/config.yaml. None at "
            "all, or one that no cluster has taken yet, is fine. A running one has 3 seconds to "
            "answer what it can hand out (PodResources)."
        ),
        why="Without the kubelet this node runs no pods and no device plugin can offer its GPUs.",
        remedy=fixes.START_KUBELET,
        classes=CLUSTER_NODES,
        run=kubelet_not_running,
        preflight=("kubernetes",),
        # without its engine's CRI, or with swap, the kubelet ends at once
        blocked_by=(
            *("pci-no-gpu", "memory-cgroup-v1", "kubelet-swap-memlock-hugepages", "crio-not-running"),
            *("containerd-config-version", "containerd-cri-disabled", "containerd-not-restarted"),
        ),
        refs=(
            "https://kubernetes.io/docs/setup/production-environment/tools/kubeadm/troubleshooting-kubeadm/",
        ),
    ),
    Check(
        id="kubelet-device-plugin-dir",
        title="The kubelet listens for device plugins",
        layer="kubelet",
        severity="error",
        looks_at=f"{DEVICE_PLUGINS}/kubelet.sock; the path is fixed, whatever the kubelet's --root-dir is.",
        why=(
            "Device plugins register at this socket. While it doesn't answer, no plugin can offer GPUs: "
            "'connect: no such file or directory'."
        ),
        remedy=fixes.START_KUBELET,
        classes=CLUSTER_NODES,
        run=kubelet_device_plugin_dir,
        preflight=("kubernetes",),
        blocked_by=("pci-no-gpu", "kubelet-not-running", "microk8s-paths"),
        refs=("https://kubernetes.io/docs/concepts/extend-kubernetes/compute-storage-net/device-plugins/",),
    ),
    Check(
        id="plugin-socket-dead",
        title="The device plugin's socket answers",
        layer="kubelet",
        severity="error",
        looks_at=(
            f"nvidia*.sock and gpunode*.sock in {DEVICE_PLUGINS}; one that refuses connections is dead. With "
            "--deep also whether the plugin answers GetDevicePluginOptions within 2 seconds."
        ),
        why=(
            "The kubelet keeps the resource of a dead plugin at capacity N and allocatable 0: pods that ask "
            "for GPUs stay pending until the plugin runs again."
        ),
        remedy=fixes.RESTART_PLUGIN,
        classes=CLUSTER_NODES,
        run=plugin_socket_dead,
        # a plugin without a driver, or without its handler, ends as well
        blocked_by=(
            *("pci-no-gpu", "kubelet-not-running", "kubelet-device-plugin-dir"),
            *("nvml-hang", "containerd-runtime-missing", "mig-enabled-no-instances", "mig-strategy-mismatch"),
        ),
        refs=(
            "https://kubernetes.io/docs/concepts/extend-kubernetes/compute-storage-net/device-plugins/",
            "https://github.com/NVIDIA/k8s-device-plugin/issues/240",
        ),
    ),
)
