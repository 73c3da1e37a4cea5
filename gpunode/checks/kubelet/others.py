"""microk8s, k0s, cri-dockerd, and kind's nodes beside them."""

from __future__ import annotations

from gpunode.checks.fixes import everywhere
from gpunode.checks.model import Check, Verdict, fail, note, ok, seen, skip, warn
from gpunode.errors import ConfigError, DaemonError
from gpunode.facts.distributions import K0S_DROP_INS
from gpunode.facts.kubelet import DEVICE_PLUGINS, ROOT, SNAP_ROOT
from gpunode.facts.node import Node
from gpunode.result import Fix

_BY_MOUNTS = "accept-nvidia-visible-devices-as-volume-mounts"


def microk8s_paths(node: Node) -> Verdict:
    kubelet = node.kubelet
    if kubelet is None or kubelet.process is None or kubelet.process.name != "kubelite":
        return skip("this node's kubelet isn't microk8s'")
    listens = f"{SNAP_ROOT}/device-plugins/kubelet.sock"
    if node.host.socket_state(listens) != "listening":
        return ok("microk8s' kubelet has its sockets where everybody looks")
    if node.host.realpath(ROOT) == node.host.realpath(SNAP_ROOT):
        return ok(f"{ROOT} leads to microk8s' directory")
    state = node.host.socket_state(f"{DEVICE_PLUGINS}/kubelet.sock")
    if state in ("listening", "denied"):
        return ok(f"a kubelet listens in {DEVICE_PLUGINS}")
    there = "another directory" if node.host.is_dir(ROOT) else "not there"
    aside = f"mv {ROOT} {ROOT}.old && " if node.host.is_dir(ROOT) else ""
    return fail(
        f"{ROOT} doesn't lead to the directory of microk8s' kubelet",
        seen(listens, "the kubelet listens here"),
        seen(ROOT, there),
        fix=Fix(f"{aside}ln -s {SNAP_ROOT} {ROOT}"),
    )


def k0s_dropin(node: Node) -> Verdict:
    from gpunode.facts.distributions import k0s_manages

    daemon = node.containerd
    if daemon is None or daemon.manager != "k0s":
        return skip("this node's containerd isn't k0s'")
    dropins = [path for path in node.host.glob(K0S_DROP_INS, "*.toml") if "nvidia" in _text(node, path)]
    if not dropins:
        return ok(f"nothing for GPUs is in {K0S_DROP_INS}")
    try:
        config = node.containerd_config
    except ConfigError:
        return skip(f"{daemon.config_path} can't be parsed")
    unread = [path for path in dropins if config is not None and path not in config.files]
    if not unread or k0s_manages(node.host, daemon.config_path):
        return ok(f"k0s reads {', '.join(dropins)}")
    return fail(
        f"k0s doesn't read {K0S_DROP_INS}",
        seen(daemon.config_path, "its first line isn't # k0s_managed=true, and it imports no such file", 1),
        *(seen(path, "unread") for path in unread),
    )


def _text(node: Node, path: str) -> str:
    return node.host.read_text(path) or ""


def cri_dockerd(node: Node) -> Verdict:
    kubelet = node.kubelet
    if node.docker is None or kubelet is None or kubelet.engine != "docker":
        return skip("no kubelet uses Docker here")
    try:
        default = node.docker_info.get("DefaultRuntime")
    except DaemonError as error:
        return skip(f"Docker doesn't say what it runs with: {error.message}")
    if not isinstance(default, str) or default.startswith("nvidia"):
        return ok(f"Docker's default runtime is {default}")
    if (node.allocatable and node.allocatable.nvidia) or node.gpu_containers:
        return ok("pods have got GPUs here all the same")
    return warn(
        f"the kubelet uses Docker, whose default runtime is {default}",
        seen(f"{kubelet.endpoint_source}", kubelet.endpoint),
        seen(f"{node.docker.socket} /info", f"DefaultRuntime {default}"),
    )


def kind_nested(node: Node) -> Verdict:
    if node.docker is None:
        return skip("Docker isn't installed on this node")
    nodes = [(one, name) for one, name, image in node.docker_containers if image.startswith("kindest/node")]
    if not nodes:
        return ok("no node of a kind cluster runs here")
    if not node.plugin_processes:
        return ok("no device plugin runs in the kind cluster")
    seeing = {one.id for one in node.gpu_containers}
    blind = [name for one, name in nodes if one not in seeing]
    settings = node.toolkit_settings
    if len(blind) < len(nodes) or settings.value(_BY_MOUNTS) is True:
        return ok("nodes of a kind cluster can get GPUs here")
    return note(
        f"{len(blind)} nodes of a kind cluster run here without GPUs",
        seen(f"{node.docker.socket} /containers", ", ".join(blind[:8])),
        seen(settings.path, f"{_BY_MOUNTS} isn't true"),
    )


CHECKS = (
    Check(
        id="microk8s-paths",
        title="Device plugins find microk8s' kubelet",
        layer="kubelet",
        severity="error",
        looks_at=f"where microk8s' kubelet listens for device plugins, and whether {ROOT} leads there.",
        why=(
            f"Device plugins mount {DEVICE_PLUGINS}. microk8s links it to its own directory only if nothing "
            "was there when it was installed, such as what an earlier kubelet left."
        ),
        remedy=everywhere(f"mv {ROOT} {ROOT}.old && ln -s {SNAP_ROOT} {ROOT}"),
        run=microk8s_paths,
        preflight=("kubernetes",),
        blocked_by=("pci-no-gpu", "kubelet-not-running"),
        needs=("kubelet",),
        refs=("https://microk8s.io/docs/addon-gpu",),
    ),
    Check(
        id="k0s-dropin",
        title="k0s reads its drop-in files",
        layer="kubelet",
        severity="error",
        looks_at=f"files for GPUs in {K0S_DROP_INS}, and whether /etc/k0s/containerd.toml is k0s' own.",
        why=(
            "k0s imports the drop-in files only into a containerd.toml that it writes itself, which the mark "
            "in the first line tells. In anybody else's they are never read."
        ),
        remedy=everywhere(
            "mv /etc/k0s/containerd.toml /etc/k0s/containerd.toml.old && k0s stop && k0s start", "restart"
        ),
        run=k0s_dropin,
        blocked_by=("pci-no-gpu", "containerd-not-restarted"),
        needs=("kubelet", "containerd"),
        refs=("https://docs.k0sproject.io/stable/runtime/",),
    ),
    Check(
        id="cri-dockerd",
        title="Pods under cri-dockerd get the nvidia runtime",
        layer="kubelet",
        severity="warning",
        looks_at=(
            "Docker's default runtime (/info) where the kubelet's endpoint is cri-dockerd, no device plugin "
            "has offered GPUs and no container with GPUs runs."
        ),
        why=(
            "cri-dockerd starts pods under Docker's default runtime unless they name another one. Under runc "
            "they see no GPU, whatever the device plugin gave them."
        ),
        remedy=everywhere("gpunode configure-runtime --runtime docker --set-as-default", "restart"),
        run=cri_dockerd,
        blocked_by=("pci-no-gpu", "kubelet-not-running", "docker-not-running", "docker-runtime-missing"),
        needs=("kubelet",),
        refs=("https://github.com/Mirantis/cri-dockerd",),
    ),
    Check(
        id="kind-nested",
        title="Nodes of a kind cluster can have GPUs",
        layer="kubelet",
        severity="info",
        looks_at=(
            "running containers of kindest/node (Docker) where a device plugin runs, whether they have GPUs, "
            f"and {_BY_MOUNTS} of the toolkit's config.toml."
        ),
        why=(
            "A kind node is a container and gets GPUs only by a mount that names them, which the toolkit has "
            "to be told to look at."
        ),
        remedy=everywhere(f"gpunode toolkit config set {_BY_MOUNTS}=true"),
        run=kind_nested,
        blocked_by=("pci-no-gpu", "docker-not-running", "toolkit-missing", "toolkit-config-invalid"),
        needs=("docker",),
        refs=("https://kind.sigs.k8s.io/",),
    ),
)
