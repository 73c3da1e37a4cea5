"""Checks of the kubelet, the device plugins' sockets, and pods with allocated GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from gpunode.checks import fixes
from gpunode.checks.finding import (
    DISRUPTS_NOTHING,
    RESTARTS_KUBELET,
    RESTARTS_KUBERNETES,
    RESTARTS_PLUGIN,
    Evidence,
    Fix,
)
from gpunode.checks.model import (
    HOST_OR_CONTAINER,
    Verdict,
    cluster_check,
    fail,
    kubelet_check,
    note,
    ok,
    prerequisite_check,
    seen,
    skip,
    warn,
)
from gpunode.checks.units import ENDS_EVICTED, seen_unit, start, stays_stopped
from gpunode.errors import DaemonError, GpunodeError
from gpunode.facts import kubelet
from gpunode.facts.device_plugins import plugin_answers
from gpunode.facts.engines import containerd_role, crio_role, default_handler, docker_role
from gpunode.facts.gpu_use import holders
from gpunode.facts.kubelet import DEVICE_PLUGINS, Disk, Kubelet, sockets_in
from gpunode.facts.node import Node
from gpunode.facts.processes import environment
from gpunode.facts.systemd import read_unit
from gpunode.facts.toolkit import runtime_mode
from gpunode.output.result import many

_ABSENT = "no kubelet is installed on this node"
_SHOW_LOG = fixes.look(
    "crictl ps --all --latest --quiet --name nvidia-device-plugin | "
    "xargs --no-run-if-empty crictl logs --tail 20",
    "Fix what the last lines name: the kubelet then starts the plugin again. If the command prints nothing, "
    "this node has no container of NVIDIA's plugin. Only if no other plugin allocates the GPUs, install "
    "gpunode's on this node, which may restart its container engine (running pods continue):\n"
    "gpunode setup --kubernetes",
)
_PLUGINS = ("nvidia", "gpunode")
_OUR_UNIT = "gpunode-device-plugin.service"


@cluster_check(
    "kubelet-not-running",
    title="The kubelet is running",
    looks_at="processes, units (kubelet, k3s, rke2, k0s, microk8s) and /var/lib/kubelet/config.yaml. A node "
    "without a kubelet, or with one that hasn't joined a cluster, is fine. A running kubelet has 3 "
    "seconds to report what it can allocate (PodResources).",
    fix=fixes.START_KUBELET,
    preflight=("kubernetes",),
    # the kubelet exits at once without its engine's CRI, or with swap
    blocked_by=(
        "pci-no-gpu",
        "memory-cgroup-v1",
        "kubelet-swap-memlock-hugepages",
        "crio-not-running",
        "containerd-config-version",
        "containerd-cri-disabled",
        "containerd-not-restarted",
    ),
    refs=("https://kubernetes.io/docs/setup/production-environment/tools/kubeadm/troubleshooting-kubeadm/",),
)
def kubelet_not_running(node: Node) -> Verdict:
    """Without the kubelet this node starts no new pods, and device plugins can't register its GPUs. Running
    pods continue.
    """
    kubelet = node.kubelet
    if kubelet is None:
        return skip(_ABSENT)
    if kubelet.process is not None:
        if node.kubelet_silence:
            answer = seen(f"/proc/{kubelet.process.pid}", node.kubelet_silence)
            why = "Until the kubelet answers, device plugins can't register GPUs. Running pods continue."
            return warn("the kubelet is running, but doesn't answer", answer, fix=_restart(kubelet), why=why)
        return ok(
            "the kubelet is running", seen(f"/proc/{kubelet.process.pid}/cmdline", kubelet.process.name)
        )
    if not kubelet.joined:
        return skip("the kubelet is installed, but this node hasn't joined a cluster")
    evidence = seen(kubelet.unit or "/proc", "stopped")
    unit = seen_unit(node, kubelet.unit) if kubelet.unit else ()
    fix = start(kubelet.unit.removesuffix(".service"), kubelet=True) if kubelet.unit else None
    reboot = stays_stopped(node, kubelet.unit or "")
    return fail("the kubelet isn't running", evidence, *unit, fix=fix, reboot=reboot)


def _restart(kubelet: Kubelet) -> Fix | None:
    if kubelet.unit is None:
        return None
    unit = kubelet.unit.removesuffix(".service")
    return fixes.restart(unit, RESTARTS_KUBELET if unit == "kubelet" else RESTARTS_KUBERNETES)


@cluster_check(
    "kubelet-device-plugin-dir",
    title="The kubelet accepts device plugins",
    looks_at=f"{DEVICE_PLUGINS}/kubelet.sock; the path is fixed, whatever the kubelet's --root-dir is.",
    fix=fixes.START_KUBELET,
    preflight=("kubernetes",),
    blocked_by=("pci-no-gpu", "kubelet-not-running", "microk8s-paths"),
    refs=("https://kubernetes.io/docs/concepts/extend-kubernetes/compute-storage-net/device-plugins/",),
)
def kubelet_device_plugin_dir(node: Node) -> Verdict:
    """Device plugins register at this socket. While it doesn't answer, no plugin can register GPUs: 'connect:
    no such file or directory'.
    """
    kubelet = node.kubelet
    if kubelet is None or not kubelet.joined:
        return skip(_ABSENT if kubelet is None else "this node hasn't joined a cluster")
    path = f"{DEVICE_PLUGINS}/kubelet.sock"
    state = node.host.socket_state(path)
    if state == "denied":
        return skip(f"needs root to read {path}")
    if state != "listening":
        return fail(
            "the kubelet's device plugin socket doesn't answer", seen(path, state), fix=_restart(kubelet)
        )
    return ok("the kubelet accepts device plugins", seen(path, "listening"))


@cluster_check(
    "plugin-socket-dead",
    title="The device plugin's socket answers",
    looks_at=f"nvidia*.sock and gpunode*.sock in {DEVICE_PLUGINS}: a socket that refuses connections is "
    "dead. With --deep, also whether the plugin answers GetDevicePluginOptions within 2 seconds.",
    fix=replace(
        fixes.RESTART_PLUGIN,
        note="This is gpunode's own plugin. NVIDIA's runs in a pod, and its log says why it has exited:\n"
        + _SHOW_LOG.command,
    ),
    # a plugin without a driver, or without its handler, exits as well
    blocked_by=(
        "pci-no-gpu",
        "kubelet-not-running",
        "kubelet-device-plugin-dir",
        "nvml-hang",
        "containerd-runtime-missing",
        "mig-enabled-no-instances",
        "mig-strategy-mismatch",
    ),
    refs=(
        "https://kubernetes.io/docs/concepts/extend-kubernetes/compute-storage-net/device-plugins/",
        "https://github.com/NVIDIA/k8s-device-plugin/issues/240",
    ),
)
def plugin_socket_dead(node: Node) -> Verdict:
    """The kubelet keeps the resource of a dead plugin with capacity N and allocatable 0: pods that request
    GPUs stay pending until the plugin runs again.
    """
    if node.kubelet is None or not node.kubelet.joined:
        return skip(_ABSENT if node.kubelet is None else "this node hasn't joined a cluster")
    names = [name for name in sockets_in(node.host, DEVICE_PLUGINS) if name.startswith(_PLUGINS)]
    if not names:
        return skip("no device plugin for NVIDIA GPUs has a socket on this node")
    dead = [name for name in names if node.host.socket_state(f"{DEVICE_PLUGINS}/{name}") == "refused"]
    if dead:
        evidence = (seen(f"{DEVICE_PLUGINS}/{name}", "no process listens on it") for name in dead)
        if len(dead) < len(names):
            paths = " ".join(f"{DEVICE_PLUGINS}/{name}" for name in dead)
            summary = "a dead device plugin left its socket behind, but another plugin answers"
            return note(summary, *evidence, fix=Fix(f"rm {paths}"))
        if node.allocatable is not None and node.allocatable.live and any(node.allocatable.nvidia.values()):
            return note(
                "a dead device plugin left its socket behind; the GPUs are allocated without it", *evidence
            )
        fix = restart_plugin(node, _SHOW_LOG)  # a restart may end in the same error
        return fail("a device plugin has exited and left its socket behind", *evidence, fix=fix)
    return _silent(node, names) or ok(f"{many(len(names), 'device plugin socket')} answer")


def _silent(node: Node, names: list[str]) -> Verdict | None:
    """A plugin that listens but doesn't answer; queried only with --deep."""
    for name in names if node.questions.deep else ():
        path = f"{DEVICE_PLUGINS}/{name}"
        if node.host.socket_state(path) == "listening" and plugin_answers(node.host, path) is False:
            answer = seen(path, "no answer to GetDevicePluginOptions within 2 seconds")
            what = "a device plugin is running, but doesn't answer"
            return fail(what, answer, fix=restart_plugin(node), why="Pods that request GPUs can't start.")
    return None


RESTART_POD = replace(
    fixes.RESTART_PLUGIN_POD,
    note="If the command prints nothing, no pod of NVIDIA's device plugin is ready on this node: see the "
    "error of a container that the command below lists, with crictl logs ID. If it lists none, and kubectl "
    "get daemonsets --all-namespaces no device plugin, gpunode setup --kubernetes installs gpunode's\n"
    "crictl ps --all --name nvidia-device-plugin",
)


def restart_plugin(node: Node, unknown: Fix = RESTART_POD) -> Fix:
    """gpunode's plugin is a service of the node, NVIDIA's is a pod; both use the same socket name. `unknown`
    is the fix if it isn't known which pod."""
    if has_own_plugin(node):
        return fixes.RESTART_PLUGIN
    pods = {(log.namespace, log.pod) for log in node.plugin_logs}
    if len(pods) != 1:
        command, note = (
            text.replace("crictl ", f"{_crictl(node)} ") for text in (unknown.command, unknown.note)
        )
        return replace(unknown, command=command, note=note)
    ((namespace, pod),) = pods
    note = "The DaemonSet starts a new pod. Run kubectl where it can reach the cluster"
    command = f"kubectl delete pod --namespace {namespace} {pod}"
    return Fix(command, needs_root=False, disruptive="restart", disturbs=RESTARTS_PLUGIN, note=note)


def has_own_plugin(node: Node) -> bool:
    return read_unit(node.host, _OUR_UNIT) is not None


# Disk space for images and pods, and what keeps a kubelet from starting.

_PRUNE = Fix(
    "crictl rmi --prune",
    note="It deletes images that no container uses. Pods that need one of them later pull it again",
)
_UNPACKING = "CUDA images take 5 to 25 GB: unpacking one fails with 'no space left on device'."
_LARGE_IMAGE = 10 << 30  # CUDA images take 5 to 25 GB when unpacked
_ROOTS = {
    "containerd": "/var/lib/containerd",
    "k3s": "/var/lib/rancher/k3s",
    "rke2": "/var/lib/rancher/rke2",
    "k0s": "/var/lib/k0s",
    "microk8s": "/var/snap/microk8s/common",
}
# where k3s and rke2 configure their kubelet
_MORE = ("/var/lib/rancher/k3s/agent/etc/kubelet.conf.d", "/var/lib/rancher/rke2/agent/etc/kubelet.conf.d")
_MICROK8S_ARGS = "/var/snap/microk8s/current/args/kubelet"


@prerequisite_check(
    "disk-pressure",
    title="The disks have space for images and pods",
    looks_at="the free bytes and inodes of the file systems that hold the data of the kubelet and the "
    "engines (statvfs(3)), against the kubelet's evictionHard; without a kubelet, a full disk, and "
    "10 GiB for the next image.",
    fix=_PRUNE,
    classes=HOST_OR_CONTAINER,
    refs=("https://kubernetes.io/docs/concepts/scheduling-eviction/node-pressure-eviction/",),
)
def disk_pressure(node: Node) -> Verdict:
    """Below its limits the kubelet evicts pods, deletes images and accepts no new pods (DiskPressure). CUDA
    images take 5 to 25 GB: unpacking one fails with 'no space left on device'.
    """
    places = kubelet.disks(node.host, dict.fromkeys(_disks_in_use(node)))
    if not places:
        return skip("no data directory of an engine or a kubelet can be read")
    limits = _limits(node)
    evicting = [evidence for place in places for evidence in _below(place, limits)]
    if evicting:
        what = f"the kubelet evicts pods: {_shown(evicting[0])}"
        return fail(what, *evicting, fix=_prune(node))
    full = [place for place in places if place.room.left < 64 << 20]
    if full:
        lines = [*map(_disk_evidence, full)]
        return fail(f"a disk is full: {_shown(lines[0])}", *lines, fix=_prune(node), why=_UNPACKING)
    tight = [place for place in places if place.signal == "imagefs" and place.room.left < _LARGE_IMAGE]
    if tight:
        lines = [*map(_disk_evidence, tight)]
        what = f"not enough space for another CUDA image: {_shown(lines[0])}"
        return warn(what, *lines, fix=_prune(node), why=_UNPACKING)
    return ok("the disks have space for images and pods", *map(_disk_evidence, places))


def _disks_in_use(node: Node) -> Iterator[tuple[str, str]]:
    """The kubelet's limits apply to its engine's disk; other disks may be as full as they are."""
    joined = node.kubelet is not None and node.kubelet.joined
    if joined:
        yield kubelet.root_directory(node.kubelet), "nodefs"
    if node.containerd is not None and (containerd_role(node).used or not joined):
        process = node.containerd.process
        value = process.option("--root") if process else None
        yield value or _ROOTS.get(node.containerd.manager or "containerd", _ROOTS["containerd"]), "imagefs"
    if node.docker is not None and (docker_role(node).used or not joined):
        yield _reported(lambda: node.docker_info.get("DockerRootDir"), "/var/lib/docker"), "imagefs"
    if node.crio is not None and (crio_role(node).used or not joined):
        usual = "/var/lib/containers/storage"
        yield _reported(lambda: node.crio_config.setting("root"), usual), "imagefs"


def _reported(read: Callable[[], object], usual: str) -> str:
    """The directory that a daemon reports, else its usual one."""
    try:
        answer = read()
    except DaemonError:
        return usual
    return answer if isinstance(answer, str) and answer.startswith("/") else usual


def _limits(node: Node) -> Mapping[str, str]:
    """The kubelet's settings, else its defaults; {} if there are none or they are unknown."""
    known = node.kubelet
    if known is None or known.process is None:
        return {}
    places = [
        kubelet.CONFIG,
        _MICROK8S_ARGS,
        *(path for place in _MORE for path in node.host.glob(place, "*")),
    ]
    value = known.process.option("--config")
    if more := known.process.option("--config-dir"):
        places += node.host.glob(more, "*")
    texts = [node.host.read_text(path) or "" for path in ([value, *places] if value else places)]
    limits = kubelet.eviction_limits(texts, known.process)
    return limits or (kubelet.EVICTION_DEFAULTS if known.process.name == "kubelet" else {})


def _below(place: Disk, limits: Mapping[str, str]) -> Iterator[Evidence]:
    room = place.room
    limit = limits.get(f"{place.signal}.available", "")
    least = kubelet.amount(limit, room.size)
    if least is not None and room.left < least:
        yield seen(
            place.path, f"{_size(room.left)} of {_size(room.size)} free; the kubelet's limit is {limit}"
        )
    limit = limits.get(f"{place.signal}.inodesFree", "")
    least = kubelet.amount(limit, room.inodes)
    if least is not None and room.inodes and room.inodes_left < least:
        yield seen(place.path, f"{room.inodes_left} of {room.inodes} inodes free; the limit is {limit}")


def _disk_evidence(place: Disk) -> Evidence:
    return seen(place.path, f"{_size(place.room.left)} of {_size(place.room.size)} free")


def _shown(disk: Evidence) -> str:
    return f"{disk.source} has {disk.value}"


def _size(number: int) -> str:
    return f"{number / (1 << 30):.1f} GiB"


def _prune(node: Node) -> Fix | None:
    if node.docker is not None and (node.kubelet is None or not node.kubelet.joined):
        note = (
            "It asks first, then deletes images that have no tag and no container. docker system df shows "
            "what else takes space. If this isn't enough, delete also tagged images that have no container, "
            "if they can be pulled again:\ndocker image prune --all"
        )
        return Fix("docker image prune", disturbs=DISRUPTS_NOTHING, note=note)
    return replace(_PRUNE, command=f"{_crictl(node)} rmi --prune")


def _crictl(node: Node) -> str:
    """crictl for this node's CRI: a distribution has its own program and socket."""
    daemon = node.containerd
    if daemon is None or not daemon.manager or not containerd_role(node).used:
        return "crictl"
    program = {"k3s": "k3s crictl", "rke2": "/var/lib/rancher/rke2/bin/crictl"}.get(daemon.manager, "crictl")
    return f"{program} --runtime-endpoint unix://{daemon.socket}"


@kubelet_check(
    "kubelet-swap-memlock-hugepages",
    title="Swap doesn't prevent the kubelet from starting",
    looks_at="/proc/swaps and failSwapOn, if a kubelet should be running but isn't.",
    fix=Fix(
        r"swapoff --all && sed -i.bak '/\sswap\s/s/^/# /' /etc/fstab && systemctl restart kubelet",
        disruptive="restart",
        note="The second command keeps swap off after a reboot. If swapoff fails for lack of memory, "
        "first stop what uses it",
        effect=f"starts the kubelet, which {ENDS_EVICTED}",
    ),
    refs=("https://kubernetes.io/docs/concepts/cluster-administration/swap-memory-management/",),
)
def kubelet_swap(node: Node) -> Verdict:
    """The kubelet exits at once if swap is on, unless failSwapOn is false: 'running with swap on is not
    supported'. Swap in /etc/fstab is enabled again at the next boot.
    """
    known = node.kubelet
    if known is None or known.unit != "kubelet.service" or not known.joined:
        return skip("the system has no kubelet of its own")
    lines = (node.host.read_text("/proc/swaps") or "").splitlines()[1:]
    if known.process is not None or not lines:
        return ok("swap doesn't prevent the kubelet from starting")
    try:
        config = node.host.read_text(kubelet.CONFIG) or ""
        flags = node.host.read_text(kubelet.FLAGS) or ""
    except GpunodeError:
        return skip(f"needs root to read {kubelet.CONFIG}", "unreadable")
    if kubelet.setting(config, "failSwapOn") == "false" or "--fail-swap-on=false" in flags:
        return ok("the kubelet is configured to run with swap")
    evidence = [seen("/proc/swaps", line.split()[0]) for line in lines if line.split()]
    what = "swap is on, and this kubelet refuses to start with swap"
    return fail(what, *evidence, reboot=True)  # it would end the running pods, and none could start


# Pods with allocated GPUs: whether they can access them.

_CAPABILITIES = "NVIDIA_DRIVER_CAPABILITIES"
_VERIFY = fixes.look(
    "gpunode verify --on containerd",
    "If this fails too, fix what it reports; if it succeeds, delete the pods, so that their "
    "containers start again",
)


@kubelet_check(
    "runtimeclass-missing",
    title="Pods with allocated GPUs run under the nvidia runtime",
    severity="warning",
    looks_at="the containers with allocated nvidia.com/... devices (PodResources), their runtime handlers "
    "(CRI) and whether NVIDIA's files are in their /dev (/proc/PID/root/dev).",
    fix=Fix(
        "gpunode manifests runtime-class | kubectl apply --filename -",
        needs_root=False,
        note="Run it where kubectl can reach the cluster. Then set runtimeClassName: nvidia in the pod "
        "template of each of these workloads: its new pods get their GPUs",
    ),
    blocked_by=("pci-no-gpu", "kubelet-not-running", "containerd-runtime-missing"),
    refs=("https://kubernetes.io/docs/concepts/containers/runtime-class/",),
)
def runtimeclass_missing(node: Node) -> Verdict:
    """Under the default handler Kubernetes allocates a GPU to a pod, but the container can't access it. CUDA
    programs then fail with the misleading error 'CUDA driver version is insufficient for CUDA runtime
    version'. These pods need runtimeClassName: nvidia.
    """
    holdings = holders(node)
    if not holdings:
        return skip("no running container is known to have an allocated GPU")
    without = [holding for holding in holdings if not holding.container.nodes]
    if not without:
        return ok(f"all {len(holdings)} containers with allocated GPUs have device files for them")
    if node.module is None:
        # without a driver the nvidia runtime has none to add; other runtimes add none with a driver either
        default = default_handler(node) or "nvidia"
        without = [holding for holding in without if not (holding.handler or default).startswith("nvidia")]
        if not without:
            return skip("no driver is loaded, so the nvidia runtime has no device files to add")
    evidence = [
        seen(
            f"/proc/{holding.container.pid}/root/dev",
            f"{holding.name}: no NVIDIA device file; runs under {_handler(holding.handler)}",
        )
        for holding in without
    ]
    nvidia_names = [holding.name for holding in without if holding.handler.startswith("nvidia")]
    fix = _VERIFY if nvidia_names else None
    why = "The nvidia runtime, under which they run, has added no GPU to them." if nvidia_names else ""
    what = f"{many(len(without), 'container')} can't access the GPUs that Kubernetes allocated"
    return warn(what, *evidence[:8], fix=fix, why=why)


def _handler(name: str) -> str:
    return f"the handler {name}" if name else "the engine's default handler"


@kubelet_check(
    "pod-driver-capabilities",
    title="Pods with allocated GPUs request CUDA",
    severity="info",
    looks_at=f"{_CAPABILITIES} in the environment of containers with allocated GPUs.",
    fix=Fix(
        f"kubectl get pods --all-namespaces --output yaml | grep --context 1 {_CAPABILITIES}",
        needs_root=False,
    ),
    blocked_by=("pci-no-gpu", "kubelet-not-running"),
    refs=(
        "https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/"
        "docker-specialized.html#driver-capabilities",
    ),
)
def pod_driver_capabilities(node: Node) -> Verdict:
    """The toolkit mounts the libraries that this variable names. Without compute (or all), libcuda.so.1 isn't
    in the container. Programs that only use graphics or video don't need it.
    """
    holdings = holders(node)
    if not holdings:
        return skip("no running container is known to have an allocated GPU")
    capabilities = []
    for holding in holdings:
        value = environment(node.host, holding.container.pid).get(_CAPABILITIES, "")
        if value and not {"all", "compute"} & set(value.split(",")):
            capabilities.append(
                seen(f"/proc/{holding.container.pid}/environ", f"{holding.name}: {_CAPABILITIES}={value}")
            )
    if capabilities:
        return note(
            "containers with allocated GPUs don't request CUDA libraries",
            *capabilities[:8],
        )
    return ok("all containers with allocated GPUs request CUDA libraries")


@kubelet_check(
    "hostusers-false",
    title="Pods with a user namespace can use GPUs",
    severity="info",
    looks_at="pods with a user namespace (/proc/PID/uid_map), if the nvidia runtime is in legacy mode.",
    fix=Fix("gpunode toolkit config set nvidia-container-runtime.mode=cdi"),
    blocked_by=("pci-no-gpu", "kubelet-not-running", "toolkit-missing", "toolkit-config-invalid"),
    refs=("https://kubernetes.io/docs/concepts/workloads/pods/user-namespaces/",),
)
def hostusers_false(node: Node) -> Verdict:
    """With hostUsers: false a pod's processes have no privileges on the node, and the hook of legacy mode
    fails: 'read status from sync socket'. Mode cdi doesn't use this hook.
    """
    if runtime_mode(node.toolkit_settings, node.toolkit.version) != "legacy":
        return ok("the nvidia runtime works in pods with a user namespace")
    by_id = {container.id: container for container in node.cri_containers}
    result = []
    for container in node.containers if by_id else ():
        pod = by_id.get(container.id)
        path = f"/proc/{container.pid}/uid_map"
        first = (node.host.read_text(path) or "0 0").split()[:2]
        if pod is not None and first != ["0", "0"]:
            result.append(seen(path, f"pod {pod.namespace}/{pod.pod} has user ids from {first[1]} on"))
    if result:
        return note(
            "pods on this node use user namespaces, where the toolkit's hook can't add GPUs", *result[:4]
        )
    return ok("no pod on this node uses a user namespace")
