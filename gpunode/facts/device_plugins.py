"""The device plugins that run on this node: their processes, settings and logs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gpunode.daemons.grpc_unary import unary_call
from gpunode.dataclass import dataclass
from gpunode.facts.processes import Process, environment
from gpunode.facts.workloads import container_of
from gpunode.host import Host

_PROGRAMS = ("nvidia-device-plugin", "nvidia_gpu_device_plugin", "nvidia-gpu-device-plugin")
_PODS = ("nvidia-device-plugin", "nvidia-gpu-device-plugin", "gpunode-device-plugin")
_OURS = ("gpunode", "gpunode.light")
POD_LOGS = "/var/log/pods"
_LOG_BYTES = 64 << 10
_OPTIONS = "/v1beta1.DevicePlugin/GetDevicePluginOptions"
PLUGIN_STATE = "/var/lib/gpunode/plugin"  # where gpunode's own plugin keeps its state by default
_SECONDS = 2.0  # what the kubelet itself allows


@dataclass(frozen=True)
class PluginProcess:
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
        """A flag without a value is on."""
        word = self.setting(flag, variable) or ("true" if flag in self.process.argv else "")
        return word.lower() in ("true", "1", "t")


@dataclass(frozen=True)
class PluginLog:
    """The end of a plugin container's log. `pod`, `namespace` and `container` are of its directory's name."""

    path: str
    namespace: str
    pod: str
    container: str
    lines: tuple[str, ...]


def status_path(state_dir: str) -> str:
    """The file in which gpunode's plugin says what it advertises, and which process it is."""
    return f"{state_dir.rstrip('/')}/status.json"


def plugin_processes(host: Host, processes: Sequence[Process]) -> tuple[PluginProcess, ...]:
    """Every device plugin for NVIDIA GPUs, gpunode's included; settings of others' processes need root.

    Only root can register with the kubelet: a process of another user isn't one."""
    return tuple(
        PluginProcess(one, container_of(host, one.pid)[0], environment(host, one.pid))
        for one in processes
        if (one.name in _PROGRAMS or _is_ours(one.argv)) and one.uid in (0, host.uid)
    )


def _is_ours(argv: tuple[str, ...]) -> bool:
    return _runs_ours(argv, "plugin", "serve")


def keeps_nvml_open(argv: tuple[str, ...]) -> bool:
    """Whether this is a service of gpunode's that has NVML open all day: a device plugin, or one that keeps
    the node's labels."""
    return _is_ours(argv) or ("--watch" in argv and _runs_ours(argv, "labels"))


def _runs_ours(argv: tuple[str, ...], *words: str) -> bool:
    """Whether gpunode is told to do this; what stays has replaced its program by gpunode.light (light.py)."""
    named = any(argument.rpartition("/")[2] in _OURS for argument in argv)
    return named and any(argv[start:][: len(words)] == words for start in range(len(argv)))


def plugin_logs(host: Host, *, helpers: bool = False) -> tuple[PluginLog, ...]:
    """The newest log of each plugin container whose pod is still on this node, at most the last 64 KiB; with
    `helpers` also of its init and side containers.

    The kubelet keeps them in /var/log/pods/NAMESPACE_POD_UID/CONTAINER/RESTARTS.log.
    """
    found = []
    for directory in host.listdir(POD_LOGS):
        if not any(name in directory for name in _PODS):
            continue
        namespace, pod, _ = (*directory.split("_"), "", "")[:3]
        for container in host.listdir(f"{POD_LOGS}/{directory}"):
            place = f"{POD_LOGS}/{directory}/{container}"
            numbered = [name for name in host.listdir(place) if name.removesuffix(".log").isdecimal()]
            helper = "init" in container or "config" in container or "mps" in container
            if not numbered or (helper and not helpers):
                continue
            path = f"{place}/{max(numbered, key=lambda name: int(name.removesuffix('.log')))}"
            found.append(
                PluginLog(
                    path, namespace, pod, container, tuple(host.read_tail(path, _LOG_BYTES).splitlines())
                )
            )
    return tuple(found)


def unit_of(device: str) -> str:
    """The unit behind a device's id, ours and NVIDIA's (``GPU-1::0``) or GKE's (``nvidia0/vgpu1``)."""
    return device.partition("::")[0].partition("/vgpu")[0]


def all_foreign(devices: Iterable[str], units: Iterable[str]) -> bool:
    """Whether the kubelet has devices of a resource, and none is one of these units.

    Then another plugin has registered the resource's name: the kubelet takes the one that registers last.
    """
    known, own = {unit_of(device) for device in devices}, set(units)
    return bool(known) and bool(own) and known.isdisjoint(own)


def plugin_answers(host: Host, socket: str) -> bool | None:
    """Whether a plugin answers GetDevicePluginOptions within two seconds; None where nobody may be asked."""
    if not host.live:
        seen = host.recorded("daemons", socket)
        return seen.get("options") is not None if isinstance(seen, dict) else None
    answers = unary_call(host, socket, _OPTIONS, b"", _SECONDS) is not None
    host.heard("daemons", socket, {"options": {} if answers else None})
    return answers
