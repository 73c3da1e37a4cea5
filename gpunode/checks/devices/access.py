"""Who may open the GPUs' device files, and whether systemd knows those that containers use."""

from __future__ import annotations

from gpunode.checks.devices import remedies
from gpunode.checks.model import Check, Verdict, note, ok, seen, skip, warn
from gpunode.facts import devices
from gpunode.facts.node import Node
from gpunode.host import DeviceNode
from gpunode.result import Evidence

_RW = 0o006
_PARAMS = "/proc/driver/nvidia/params"
_IMEX = "nvidia-imex.service"
_ZEROS = set("0-")
# NVIDIA's DRA driver runs an IMEX daemon in pods, and asks for the node's own to be off
_DRA = ("compute-domain-kubelet-plugin", "compute-domain-daemon")


def dev_perms(node: Node) -> Verdict:
    nodes = _used_by_cuda(node)
    closed = tuple(one for one in nodes if one.mode & _RW != _RW)
    if not nodes:
        return skip("there are no device files")
    if not closed:
        return ok(f"everybody may open the {len(nodes)} device files")
    evidence = [seen(one.path, f"mode {one.mode:04o}") for one in closed[:4]]
    wanted = devices.device_file_mode(node.host)
    if wanted is not None and wanted & _RW != _RW:
        evidence.append(seen(_PARAMS, f"DeviceFileMode {wanted} ({wanted:04o})"))
        words = f"the driver gives {len(closed)} device files to their group alone"
        if node.distribution.family == "suse":
            return note(words, *evidence)  # its packages' way: group video, which the toolkit joins
        option = node.module_options.option("nvidia", "NVreg_DeviceFileMode")
        if option is None:
            return warn(words, *evidence)
        evidence.append(seen(option.source, f"{option.name}={option.value}", option.line))
        return warn(words, *evidence, fix=remedies.change_mode(option.source))
    fix = remedies.open_files(tuple(one.path for one in closed))
    return warn(f"not everybody may open {len(closed)} device files", *evidence, fix=fix)


def _used_by_cuda(node: Node) -> tuple[DeviceNode, ...]:
    """Files that every CUDA program opens. Those in nvidia-caps are root's on purpose."""
    return tuple(one for one in node.device_nodes if devices.needed(one.path))


def dev_char_symlinks(node: Node) -> Verdict:
    """A missing link alone is no fault: most nodes have none, and a runc that takes numbers needs none."""
    from gpunode.facts.systemd_groups import systemd_engines

    engines = systemd_engines(node)
    if not engines:
        return skip("no engine here has systemd make its containers' control groups, or none says so")
    losing = [one for one in engines if one.forgets]
    nodes = _used_by_cuda(node)
    missing = tuple(one for one in nodes if not node.host.exists(f"/dev/char/{one.major}:{one.minor}"))
    if not losing:
        return ok(f"systemd is told which devices the containers of {engines[0].name} use")
    evidence: list[Evidence] = [seen(one.source, one.forgets) for one in losing]
    by_hook = [one for one in losing if one.by_hook]
    if by_hook:
        words = f"GPU containers of {by_hook[0].name} lose their GPUs when systemd is reloaded"
        return warn(words, *evidence, fix=remedies.by_cdi(by_hook[0].old_toolkit))
    if not missing:
        return ok("the links in /dev/char that this runc needs are there", *evidence)
    evidence += [seen(f"/dev/char/{one.major}:{one.minor}", "absent") for one in missing[:4]]
    words = f"GPU containers of {losing[0].name} lose their GPUs when systemd is reloaded"
    return warn(words, *evidence, fix=remedies.make_links(missing))


def imex_channels(node: Node) -> Verdict:
    joined = [
        gpu for gpu in node.conditions if gpu.fabric.state == "completed" and _clustered(gpu.fabric.cluster)
    ]
    if not joined:
        return skip("the GPUs are in no NVLink domain that spans nodes")
    if any(one.name in _DRA for one in node.processes):
        return ok("pods get IMEX channels from their DRA driver")
    state = node.units.get(_IMEX)
    domain = seen(f"NVML, GPU {joined[0].index}", f"NVLink domain {joined[0].fabric.cluster}")
    if state is not None and state.active == "failed":
        return warn("the IMEX daemon has failed", seen(_IMEX, state), domain, fix=remedies.START_IMEX.other)
    channels = node.host.devices(devices.IMEX_CHANNELS)
    closed = [one for one in channels if one.mode & _RW != _RW]
    if closed:
        evidence = [seen(one.path, f"mode {one.mode:04o}") for one in closed[:4]]
        return note(f"{len(closed)} of {len(channels)} IMEX channels are open to some users only", *evidence)
    if channels:
        return ok(f"{len(channels)} IMEX channels are there")
    if node.kubelet is not None and node.kubelet.joined:
        return ok("pods get IMEX channels from their DRA driver")
    return note("no IMEX channel is there", seen(devices.IMEX_CHANNELS, "no channel"), domain)


def _clustered(cluster: str | None) -> bool:
    return bool(cluster) and not set(cluster or "") <= _ZEROS


CHECKS = (
    Check(
        id="dev-perms",
        title="Containers' users may open the device files",
        layer="devices",
        severity="warning",
        looks_at=(
            "the modes of /dev/nvidiactl, /dev/nvidiaN and /dev/nvidia-uvm, and DeviceFileMode in "
            f"{_PARAMS}. Files in /dev/nvidia-caps are root's on purpose."
        ),
        why=(
            "Where only root or a group may open them, a container that runs as another user ends with "
            "'Insufficient Permissions', and the same container works as root."
        ),
        remedy=remedies.OPEN_DEVICES,
        run=dev_perms,
        blocked_by=("module-not-loaded", "dev-nodes-missing", "dev-node-major-stale"),
        refs=("https://github.com/NVIDIA/nvidia-modprobe",),
    ),
    Check(
        id="dev-char-symlinks",
        title="GPU containers survive a reload of systemd",
        layer="devices",
        severity="warning",
        looks_at=(
            "engines that have systemd make control groups: whether their GPUs come by a hook that runc "
            "doesn't know of (the toolkit's legacy mode), or by a runc from 1.1.3 to before 1.1.7, which "
            "passes over devices without a link in /dev/char."
        ),
        why=(
            "'systemctl daemon-reload', which any package's installation may call, lets systemd enforce its "
            "own list of devices. GPUs that aren't on it are gone from running containers: 'Failed to "
            "initialize NVML: Unknown Error'."
        ),
        remedy=remedies.MAKE_LINKS,
        run=dev_char_symlinks,
        blocked_by=("module-not-loaded", "dev-nodes-missing", "dev-node-major-stale"),
        table="version_gates",
        refs=(
            "https://github.com/NVIDIA/nvidia-docker/issues/1730",
            "https://github.com/opencontainers/runc/issues/3708",
        ),
    ),
    Check(
        id="imex-channels",
        title="IMEX channels are there",
        layer="devices",
        severity="warning",
        looks_at=(
            f"{devices.IMEX_CHANNELS} and {_IMEX}, where GPUs are in an NVLink domain that spans nodes."
        ),
        why=(
            "Programs share GPU memory with other nodes through an IMEX channel. Without one, or without its "
            "daemon, they work on this node only."
        ),
        remedy=remedies.MAKE_CHANNEL,
        run=imex_channels,
        blocked_by=("nvml-hang",),
        refs=("https://docs.nvidia.com/multi-node-nvlink-systems/imex-guide/",),
    ),
)
