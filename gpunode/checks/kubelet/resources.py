"""Room for images and pods, and what keeps a kubelet from starting at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from gpunode.checks.fixes import everywhere
from gpunode.checks.model import (
    ANY_ENGINE,
    CLUSTER_NODES,
    HOST_OR_CONTAINER,
    Check,
    Verdict,
    fail,
    ok,
    seen,
    skip,
    warn,
)
from gpunode.errors import DaemonError, GpunodeError
from gpunode.facts import kubelet
from gpunode.facts.containerd import dig
from gpunode.facts.engines import containerd_role, crio_role, docker_role
from gpunode.facts.node import Node
from gpunode.result import Evidence, Fix

if TYPE_CHECKING:
    from gpunode.facts.disk import Place

_LARGE_IMAGE = 10 << 30  # CUDA images take 5 to 25 GB when unpacked
_ROOTS = {
    "containerd": "/var/lib/containerd",
    "k3s": "/var/lib/rancher/k3s",
    "rke2": "/var/lib/rancher/rke2",
    "k0s": "/var/lib/k0s",
    "microk8s": "/var/snap/microk8s/common",
}
# where k3s and rke2 tell their kubelet what to do
_MORE = ("/var/lib/rancher/k3s/agent/etc/kubelet.conf.d", "/var/lib/rancher/rke2/agent/etc/kubelet.conf.d")
_MICROK8S_ARGS = "/var/snap/microk8s/current/args/kubelet"


def disk_pressure(node: Node) -> Verdict:
    from gpunode.facts import disk

    places = disk.places(node.host, dict.fromkeys(_wanted(node)))
    if not places:
        return skip("no directory of an engine or a kubelet can be looked at")
    limits = _limits(node)
    evicting = [evidence for place in places for evidence in _below(place, limits)]
    if evicting:
        return fail("the kubelet evicts pods: a disk is full", *evicting, fix=_prune(node))
    full = [one for one in places if one.room.left < 64 << 20]
    if full:
        return fail("a disk is full", *map(_shown, full), fix=_prune(node))
    tight = [one for one in places if one.signal == "imagefs" and one.room.left < _LARGE_IMAGE]
    if tight:
        return warn("there is no room for another CUDA image", *map(_shown, tight), fix=_prune(node))
    return ok("there is room for images and pods", *map(_shown, places))


def _wanted(node: Node) -> Iterator[tuple[str, str]]:
    """The kubelet's limits are for the engine that it uses; what lies beside it may be as full as it is."""
    joined = node.kubelet is not None and node.kubelet.joined
    if joined:
        yield kubelet.root_directory(node.kubelet), "nodefs"
    if node.containerd is not None and (containerd_role(node).used or not joined):
        process = node.containerd.process
        given = process.option("--root") if process else None
        yield given or _ROOTS.get(node.containerd.manager or "containerd", _ROOTS["containerd"]), "imagefs"
    if node.docker is not None and (docker_role(node).used or not joined):
        yield _docker_root(node), "imagefs"
    if node.crio is not None and (crio_role(node).used or not joined):
        yield _crio_root(node), "imagefs"


def _crio_root(node: Node) -> str:
    try:
        told = dig(node.crio_config, "crio", "root")
    except DaemonError:
        told = None
    return told if isinstance(told, str) and told.startswith("/") else "/var/lib/containers/storage"


def _docker_root(node: Node) -> str:
    try:
        told = node.docker_info.get("DockerRootDir")
    except DaemonError:
        told = None
    return told if isinstance(told, str) and told.startswith("/") else "/var/lib/docker"


def _limits(node: Node) -> Mapping[str, str]:
    """What the kubelet was told, else its defaults; {} where there is none, or nobody knows."""
    from gpunode.facts import disk

    known = node.kubelet
    if known is None or known.process is None:
        return {}
    places = [kubelet.CONFIG, _MICROK8S_ARGS, *(one for place in _MORE for one in node.host.glob(place, "*"))]
    given = known.process.option("--config")
    if more := known.process.option("--config-dir"):
        places += node.host.glob(more, "*")
    texts = [node.host.read_text(path) or "" for path in ([given, *places] if given else places)]
    found = disk.limits(texts, known.process)
    return found or (disk.DEFAULTS if known.process.name == "kubelet" else {})


def _below(place: Place, limits: Mapping[str, str]) -> Iterator[Evidence]:
    from gpunode.facts import disk

    room = place.room
    limit = limits.get(f"{place.signal}.available", "")
    least = disk.amount(limit, room.size)
    if least is not None and room.left < least:
        yield seen(
            place.path, f"{_size(room.left)} of {_size(room.size)} left, the kubelet's limit is {limit}"
        )
    limit = limits.get(f"{place.signal}.inodesFree", "")
    least = disk.amount(limit, room.inodes)
    if least is not None and room.inodes and room.inodes_left < least:
        yield seen(place.path, f"{room.inodes_left} of {room.inodes} inodes left, the limit is {limit}")


def _shown(place: Place) -> Evidence:
    return seen(place.path, f"{_size(place.room.left)} of {_size(place.room.size)} left")


def _size(number: int) -> str:
    return f"{number / (1 << 30):.1f} GiB"


def _prune(node: Node) -> Fix | None:
    if node.docker is not None and (node.kubelet is None or not node.kubelet.joined):
        return Fix("docker system prune", True)
    daemon = node.containerd
    if daemon is None or not daemon.manager or not containerd_role(node).used:
        return None
    program = {"k3s": "k3s crictl", "rke2": "/var/lib/rancher/rke2/bin/crictl"}.get(daemon.manager, "crictl")
    return Fix(f"{program} --runtime-endpoint unix://{daemon.socket} rmi --prune", True)


def kubelet_swap(node: Node) -> Verdict:
    known = node.kubelet
    if known is None or known.unit != "kubelet.service" or not known.joined:
        return skip("no kubelet of the system's is here")
    lines = (node.host.read_text("/proc/swaps") or "").splitlines()[1:]
    if known.process is not None or not lines:
        return ok("swap keeps no kubelet from running")
    try:
        config = node.host.read_text(kubelet.CONFIG) or ""
        flags = node.host.read_text(kubelet.FLAGS) or ""
    except GpunodeError:
        return skip(f"needs root to read {kubelet.CONFIG}", "unreadable")
    if kubelet.setting(config, "failSwapOn") == "false" or "--fail-swap-on=false" in flags:
        return ok("the kubelet was told to run with swap")
    evidence = [seen("/proc/swaps", line.split()[0]) for line in lines if line.split()]
    return fail("swap is on, and this kubelet refuses to start with it", *evidence)


CHECKS = (
    Check(
        id="disk-pressure",
        title="There is room for images and pods",
        layer="kubelet",
        severity="error",
        looks_at=(
            "what is left, in bytes and inodes, where the kubelet and the engines keep their data "
            "(statvfs(3)), against the kubelet's evictionHard; without a kubelet, a full disk, and 10 GiB "
            "for the next image."
        ),
        why=(
            "Below its limits a kubelet evicts pods, deletes images and takes no new pods (DiskPressure). "
            "CUDA images take 5 to 25 GB: 'no space left on device' while one is unpacked."
        ),
        remedy=everywhere("crictl rmi --prune"),
        run=disk_pressure,
        classes=HOST_OR_CONTAINER,
        blocked_by=("pci-no-gpu",),
        preflight=ANY_ENGINE,
        refs=("https://kubernetes.io/docs/concepts/scheduling-eviction/node-pressure-eviction/",),
    ),
    Check(
        id="kubelet-swap-memlock-hugepages",
        title="Swap doesn't keep the kubelet from starting",
        layer="kubelet",
        severity="error",
        looks_at="/proc/swaps and failSwapOn, where a kubelet should run and doesn't.",
        why=(
            "A kubelet stops at once where swap is on, unless failSwapOn is false: 'running with swap on is "
            "not supported'. Swap that /etc/fstab names comes back at the next boot."
        ),
        remedy=everywhere("swapoff --all && systemctl restart kubelet", "restart"),
        classes=CLUSTER_NODES,
        run=kubelet_swap,
        blocked_by=("pci-no-gpu",),
        needs=("kubelet",),
        refs=("https://kubernetes.io/docs/concepts/cluster-administration/swap-memory-management/",),
    ),
)
