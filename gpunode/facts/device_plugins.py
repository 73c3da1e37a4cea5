"""Device plugins on this node: their processes, settings and logs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gpunode.daemons.grpc_client import CallError, open_channel, unary_call
from gpunode.errors import DaemonError
from gpunode.facts.processes import Process, environment
from gpunode.facts.workloads import container_of
from gpunode.host import Host

# The toolkit's own container, run by the GPU operator: it configures the engine and may add GPUs through NRI.

# its program since 1.17 and before (cmd/nvidia-ctk-installer)
_PROGRAMS = ("nvidia-ctk-installer", "nvidia-toolkit")
_FLAGS = ("--enable-nri-plugin", "-p")
_TRUE = ("1", "t", "true")


def nri_plugin(host: Host, processes: Sequence[Process]) -> Process | None:
    """The toolkit's process with its NRI plugin enabled; None if there is none, or it is unknown."""
    for process in processes:
        if process.name not in _PROGRAMS or process.uid not in (0, host.uid):
            continue
        flag = next((word for word in process.argv[1:] if word.partition("=")[0] in _FLAGS), None)
        if flag is None:
            flag = f"={environment(host, process.pid).get('ENABLE_NRI_PLUGIN', 'false')}"
        _, equals, value = flag.partition("=")
        if not equals or value.lower() in _TRUE:
            return process
    return None


_DEVICE_PLUGINS_PROGRAMS = ("nvidia-device-plugin", "nvidia_gpu_device_plugin", "nvidia-gpu-device-plugin")
_PODS = ("nvidia-device-plugin", "nvidia-gpu-device-plugin", "gpunode-device-plugin")
_OURS = ("gpunode", "gpunode.light")  # earlier versions ran services as the second
POD_LOGS = "/var/log/pods"
_LOG_BYTES = 64 << 10
_OPTIONS = "/v1beta1.DevicePlugin/GetDevicePluginOptions"
_SECONDS = 2.0  # what the kubelet itself allows


class PluginProcess(NamedTuple):
    """`container` is the id of the container that it runs in, empty for a service of the node."""

    process: Process
    container: str
    environment: Mapping[str, str]

    @property
    def name(self) -> str:
        return "gpunode" if "serve" in self.process.argv else self.process.name

    def setting(self, flag: str, variable: str) -> str:
        """A flag's value, else its environment variable's; empty if neither is given."""
        return self.process.option(flag) or self.environment.get(variable, "")

    def switched(self, flag: str, variable: str) -> bool:
        """A flag without a value is true."""
        word = self.setting(flag, variable) or ("true" if flag in self.process.argv else "")
        return word.lower() in ("true", "1", "t")


class PluginLog(NamedTuple):
    """The end of a plugin container's log. `pod`, `namespace` and `container` are of its directory's name."""

    path: str
    namespace: str
    pod: str
    container: str
    lines: tuple[str, ...]


def status_path(state_dir: str) -> str:
    """The file in which gpunode's plugin writes its status, including its process."""
    return f"{state_dir.rstrip('/')}/status.json"


def plugin_processes(host: Host, processes: Sequence[Process]) -> tuple[PluginProcess, ...]:
    """Every device plugin for NVIDIA GPUs, gpunode's included; reading others' settings needs root.

    Only root can register with the kubelet: a process of another user isn't one.
    """
    return tuple(
        PluginProcess(process, container_of(host, process.pid).id, environment(host, process.pid))
        for process in processes
        if (process.name in _DEVICE_PLUGINS_PROGRAMS or _runs_ours(process.argv, "plugin", "serve"))
        and process.uid in (0, host.uid)
    )


def keeps_nvml_open(argv: tuple[str, ...]) -> bool:
    """Whether this is a service of gpunode that keeps NVML open: a device plugin, or the labels service."""
    return _runs_ours(argv, "plugin", "serve") or ("--watch" in argv and _runs_ours(argv, "labels"))


def _runs_ours(argv: tuple[str, ...], *words: str) -> bool:
    """Whether gpunode runs this command."""
    is_own = any(argument.rpartition("/")[2] in _OURS for argument in argv)
    return is_own and any(argv[start:][: len(words)] == words for start in range(len(argv)))


def plugin_logs(host: Host, *, helpers: bool = False) -> tuple[PluginLog, ...]:
    """The newest log of each plugin container of an existing pod, at most the last 64 KiB; with `helpers`
    also of its init and sidecar containers.

    The kubelet keeps them in /var/log/pods/NAMESPACE_POD_UID/CONTAINER/RESTARTS.log.
    """
    logs = []
    for directory in host.listdir(POD_LOGS):
        if not any(name in directory for name in _PODS):
            continue
        namespace, pod, _ = (*directory.split("_"), "", "")[:3]
        for container in host.listdir(f"{POD_LOGS}/{directory}"):
            place = f"{POD_LOGS}/{directory}/{container}"
            helper = "init" in container or "config" in container or "mps" in container
            path = "" if helper and not helpers else _newest(host, place)
            if path:
                lines = tuple(host.read_tail(path, _LOG_BYTES).splitlines())
                logs.append(PluginLog(path, namespace, pod, container, lines))
    return tuple(logs)


def unit_of(device: str) -> str:
    """The unit behind a device's id, ours and NVIDIA's (``GPU-1::0``) or GKE's (``nvidia0/vgpu1``)."""
    return device.partition("::")[0].partition("/vgpu")[0]


def all_foreign(devices: Iterable[str], units: Iterable[str]) -> bool:
    """Whether the kubelet has devices of a resource, and none is one of these units.

    Then another plugin has registered the resource's name: the kubelet uses the last registration.
    """
    known, own = {unit_of(device) for device in devices}, set(units)
    return bool(known) and bool(own) and known.isdisjoint(own)


def plugin_answers(host: Host, socket: str) -> bool | None:
    """Whether a plugin answers GetDevicePluginOptions within two seconds; None if it must not be queried."""
    if not host.live:
        seen = host.recorded("daemons", socket)
        return seen.get("options") is not None if isinstance(seen, dict) else None
    from google.protobuf.empty_pb2 import Empty

    try:
        with open_channel(host, socket) as channel:
            unary_call(channel, _OPTIONS, Empty(), Empty, _SECONDS)
        answers = True
    except (DaemonError, CallError):
        answers = False
    host.heard("daemons", socket, {"options": {} if answers else None})
    return answers


# Settings of a running device plugin: its file, its MIG strategy, whether it shares GPUs with MPS. The names
# are those of NVIDIA's device plugin (its README, "Configuring the NVIDIA device plugin binary"), which
# gpunode's own uses too.

_STRATEGY = ("MIG_STRATEGY", "GPUNODE_PLUGIN_SERVE_MIG_STRATEGY")
_MPS = r"^sharing:[ \t]*\n(?:[ \t#].*\n|\n)*?[ \t]+mps:"


def configuration(host: Host, plugin: PluginProcess) -> str:
    """The text of its configuration file, as the plugin sees it; empty if it has none."""
    path = plugin.setting("--config-file", "CONFIG_FILE")
    pid = plugin.process.pid
    inside = f"/proc/{pid}/root" if plugin.container or not host.is_own(pid) else ""
    return (host.read_text(f"{inside}{path}") or "") if path.startswith("/") else ""


def mig_strategy(host: Host, plugin: PluginProcess) -> str:
    """From the flag or variable, else from the file; empty for the default, none."""
    strategy = next(filter(None, (plugin.setting("--mig-strategy", name) for name in _STRATEGY)), "")
    match = re.search(r"migStrategy:\s*[\"']?(\w+)", configuration(host, plugin)) if not strategy else None
    return strategy or (match[1] if match else "")


def shares_by_mps(host: Host, plugin: PluginProcess) -> bool:
    """Whether its file has ``sharing.mps``; no flag sets it."""
    return re.search(_MPS, configuration(host, plugin), re.MULTILINE) is not None


# Traces of NVIDIA's GPU operator on this node: its pods' logs and its validator's status files. Pods are
# known by the kubelet's log directories, NAMESPACE_POD_UID, which are deleted with the pod. The validator
# writes a file for each stage that it has passed, and removes it when it exits (gpu-operator,
# cmd/nvidia-validator).

VALIDATIONS = "/run/nvidia/validations"
TOOLKIT = "/usr/local/nvidia/toolkit"  # where its toolkit container installs the runtime
STAGES = ("driver", "toolkit", "cuda", "plugin")
_DRIVER_PODS = ("nvidia-driver-daemonset", "nvidia-gpu-driver-")  # of a ClusterPolicy, of an NVIDIADriver
_PARTS = (
    *("nvidia-operator-validator", "nvidia-container-toolkit-daemonset", *_DRIVER_PODS),
    *("gpu-operator", "nvidia-cuda-validator"),
)
_VALIDATOR = _PARTS[0]
_POD_LOG_BYTES = 16 << 10
_FAILURE = re.compile(
    r"error|fail|fatal|unable|could not|cannot|can't|no such|not found|in use|denied|refus", re.IGNORECASE
)


class Operator(NamedTuple):
    """`pods` are the log directories of its pods, `validators` those of its validator's; `ready` the stages
    that have passed."""

    pods: tuple[str, ...]
    validators: tuple[str, ...]
    ready: tuple[str, ...]

    @property
    def drivers(self) -> tuple[str, ...]:
        """Log directories of the pods that install the driver on this node."""
        return tuple(pod for pod in self.pods if any(part in pod for part in _DRIVER_PODS))

    @property
    def missing(self) -> str:
        """The first stage that hasn't passed; empty if all have."""
        return next((stage for stage in STAGES if stage not in self.ready), "")


def find_operator(host: Host) -> Operator:
    """`Unreadable` if this user has no permission to list the kubelet's logs."""
    pods = tuple(name for name in host.listdir(POD_LOGS) if any(part in name for part in _PARTS))
    done = host.listdir(VALIDATIONS) if pods else ()
    ready = tuple(stage for stage in STAGES if f"{stage}-ready" in done)
    return Operator(pods, tuple(name for name in pods if _VALIDATOR in name), ready)


def driver_failure(host: Host, operator: Operator) -> tuple[str, str] | None:
    """Path of the newest log of a container of the driver's pod, init containers included, and the last line
    in it about a failure, or else its last line; None if there is no such log."""
    last: tuple[str, str] | None = None
    for pod in operator.drivers:
        for container in host.listdir(f"{POD_LOGS}/{pod}"):
            path = _newest(host, f"{POD_LOGS}/{pod}/{container}")
            text = host.read_tail(path, _POD_LOG_BYTES) if path else ""
            lines = [line for line in text.splitlines() if line]
            bad = [line for line in lines if _FAILURE.search(line)]
            if bad:
                return path, bad[-1]
            if lines:
                last = path, lines[-1]
    return last


def _newest(host: Host, directory: str) -> str:
    """Path of the log of a container's last start; "" if there is none."""
    numbers = [int(name[:-4]) for name in host.listdir(directory) if name[:-4].isdecimal()]
    return f"{directory}/{max(numbers)}.log" if numbers else ""


def stage_log(host: Host, operator: Operator, stage: str) -> tuple[str, tuple[str, ...], float] | None:
    """The end of the newest log of a stage's container, and when the container was created (seconds since the
    epoch, 0 on a recorded machine); None if it has no log yet."""
    for pod in operator.validators:
        place = f"{POD_LOGS}/{pod}/{stage}-validation"
        path = _newest(host, place)
        if path:
            status = host.stat(place)
            since = status.st_mtime if status is not None and host.live else 0.0
            return path, tuple(host.read_tail(path, _POD_LOG_BYTES).splitlines()), since
    return None
