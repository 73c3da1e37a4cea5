"""The kubelet of this node, if it has one: whether it runs, and which container engine it uses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from gpunode.daemons.pod_resources import Holding
from gpunode.errors import ConfigError, Unreadable
from gpunode.facts.processes import Process, option_value
from gpunode.facts.registry import DAEMONS
from gpunode.facts.systemd import read_unit
from gpunode.host import Host
from gpunode.host.files import SMALL_BYTES
from gpunode.host.reading import FileSystem

ROOT = "/var/lib/kubelet"
SNAP_ROOT = "/var/snap/microk8s/common/var/lib/kubelet"
CONFIG = "/var/lib/kubelet/config.yaml"
FLAGS = "/var/lib/kubelet/kubeadm-flags.env"
# hard-coded in the kubelet (pkg/kubelet/apis/deviceplugin/v1beta1), whatever its --root-dir is
DEVICE_PLUGINS = "/var/lib/kubelet/device-plugins"
# programs that are a kubelet, and the units that start one
KUBELETS = {"kubelet", "k3s", "k3s-server", "k3s-agent", "kubelite"}
_UNITS = (
    "kubelet.service", "k3s.service", "k3s-agent.service", "rke2-server.service", "rke2-agent.service",
    "k0sworker.service", "k0scontroller.service", "snap.microk8s.daemon-kubelite.service",
)  # fmt: skip
_DEFAULT_ENDPOINT = "/run/containerd/containerd.sock"
# Kubernetes distributions include their own containerd; by the start of the unit's or program's name
_OWN_ENDPOINTS = {
    "k3s": "/run/k3s/containerd/containerd.sock",
    "rke2": "/run/k3s/containerd/containerd.sock",
    "k0s": "/run/k0s/containerd.sock",
    "kubelite": "/var/snap/microk8s/common/run/containerd.sock",
    "snap.microk8s": "/var/snap/microk8s/common/run/containerd.sock",
}
# files that exist once the node has joined a cluster, by the start of the unit's name
_JOINED = {
    "kubelet": "/etc/kubernetes/kubelet.conf",
    "k3s": "/var/lib/rancher/k3s/agent/kubelet.kubeconfig",
    "rke2": "/var/lib/rancher/rke2/agent/kubelet.kubeconfig",
}


class Kubelet(NamedTuple):
    """`unit` is what starts it.

    `endpoint` is the engine's socket path, `endpoint_source` where it is set. `joined` is False on a node
    with a kubelet that hasn't joined a cluster.
    """

    process: Process | None
    unit: str | None
    joined: bool
    endpoint: str
    endpoint_source: str
    cgroup_driver: str | None

    @property
    def engine(self) -> str:
        """docker, containerd, crio, or other: the engine at the endpoint."""
        return next((name for name in DAEMONS if name in self.endpoint), "other")

    @property
    def stopped(self) -> bool:
        """Whether it has its own unit and doesn't run; a distribution's starts with its containerd."""
        return self.joined and self.process is None and self.unit == "kubelet.service"


def find_kubelet(host: Host, processes: Sequence[Process]) -> Kubelet | None:
    """None on a node without an installed or running kubelet."""
    process = next((process for process in processes if process.name in KUBELETS), None)
    unit = next((name for name in _by_likelihood(host, process) if read_unit(host, name) is not None), None)
    config = _config(host, process)
    if process is None and unit is None and config is None:
        return None
    endpoint, source = _endpoint(host, process, unit, config)
    joined = process is not None or config is not None or any(host.stat(path) for path in _JOINED.values())
    driver = _cgroup_driver(host, process, config or "")
    return Kubelet(process, unit, joined, endpoint, source, driver)


def _by_likelihood(host: Host, process: Process | None) -> list[str]:
    """The units, first the one that started the running kubelet, else the one that has joined a cluster."""
    program = process.argv[0] if process else ""
    words = (("k3s", "k3s"), ("/rke2/", "rke2"), ("/k0s/", "k0s"), ("kubelite", "snap."))
    runs = next((start for word, start in words if word in program), "kubelet") if program else ""
    marks = [
        name
        for start, path in _JOINED.items()
        for name in _UNITS
        if name.startswith(start) and host.stat(path)
    ]
    return sorted(_UNITS, key=lambda name: (not (runs and name.startswith(runs)), name not in marks))


def _cgroup_driver(host: Host, process: Process | None, config: str) -> str | None:
    """Its flag, else the last file of its drop-in directory that sets it, else its file."""
    flag = process.option("--cgroup-driver") if process else None
    place = process.option("--config-dir") if process and not flag else None
    files = sorted(host.glob(place, "*.conf"), reverse=True) if place else ()
    later = [setting(host.read_text(path) or "", "cgroupDriver") for path in files]
    return flag or next(filter(None, later), setting(config, "cgroupDriver"))


def _config(host: Host, process: Process | None) -> str | None:
    """The kubelet's file.

    It isn't needed for a running kubelet whose arguments set its engine. A running kubelet reads only the
    files that its arguments name: kubeadm's may be left over from another one.
    """
    if process is not None and not _kubeadms(process):
        return None
    try:
        return host.read_text(_config_path(process))
    except Unreadable:
        if process is None or not process.option("--container-runtime-endpoint"):
            raise
        return None


def _kubeadms(process: Process) -> bool:
    """Whether a running kubelet may be kubeadm's; k3s', rke2's and microk8s' are found elsewhere."""
    elsewhere = process.option("--config-dir") is not None and process.option("--config") is None
    return process.name == "kubelet" and not elsewhere


def _config_path(process: Process | None) -> str:
    return (process.option("--config") if process else None) or CONFIG


def _endpoint(host: Host, process: Process | None, unit: str | None, config: str | None) -> tuple[str, str]:
    """The engine's socket: flag of the running process, kubeadm's flags, the config file, the default."""
    if process is not None:
        flag = process.option("--container-runtime-endpoint")
        if flag:
            return socket_of(flag), f"/proc/{process.pid}/cmdline"
    text = host.read_text(FLAGS, SMALL_BYTES) or "" if process is None or _kubeadms(process) else ""
    flags = text.partition("=")[2].strip().strip('"').split()
    flag = option_value(tuple(flags), "--container-runtime-endpoint")
    if flag:
        return socket_of(flag), FLAGS
    configured = setting(config or "", "containerRuntimeEndpoint")
    if configured:
        return socket_of(configured), _config_path(process)
    for name in filter(None, (process.name if process else None, unit)):
        for start, endpoint in _OWN_ENDPOINTS.items():
            if name.startswith(start):
                return endpoint, f"the default of {name}"
    return _DEFAULT_ENDPOINT, "the kubelet's default"


def setting(config: str, key: str) -> str | None:
    """A top-level scalar of a KubeletConfiguration, in YAML or JSON; None if it isn't set."""
    match = re.search(rf"""^[ \t]*["']?{key}["']?[ \t]*:[ \t]*["']?([^"'\s,#]+)""", config, re.MULTILINE)
    return match[1] if match else None


def socket_of(endpoint: str) -> str:
    """The path in ``unix:///run/x.sock``."""
    return endpoint.removeprefix("unix://")


def sockets_in(host: Host, directory: str) -> tuple[str, ...]:
    """Names of the unix sockets that device plugins created in the kubelet's directory; not kubelet.sock."""
    names: set[str] = set(host.listdir(directory))
    if not host.live:
        recorded = host.recording.get("sockets", {})
        names |= {path.rpartition("/")[2] for path in recorded if path.rpartition("/")[0] == directory}
    return tuple(sorted(name for name in names if name.endswith(".sock") and name != "kubelet.sock"))


def pod_resources_socket(kubelet: Kubelet | None) -> str:
    """Path of the PodResources socket: unlike device plugins' sockets it follows the kubelet's --root-dir."""
    return f"{root_directory(kubelet)}/pod-resources/kubelet.sock"


def root_directory(kubelet: Kubelet | None) -> str:
    """The kubelet's --root-dir. Those of microk8s (kubelite) are in a separate file."""
    process = kubelet.process if kubelet else None
    if process is None:
        return ROOT
    value = process.option("--root-dir") or process.option("--kubelet-root-dir")
    return value or (SNAP_ROOT if process.name == "kubelite" else ROOT)


# The kubelet's checkpoint of devices: what it could allocate and which pods have which devices.
# ``kubelet_internal_checkpoint`` in the device plugin directory, JSON with a checksum (Kubernetes,
# pkg/kubelet/cm/devicemanager/checkpoint). It contains only UIDs of pods; the kubelet's log directories,
# called NAMESPACE_NAME_UID, provide their names.

NAME = "kubelet_internal_checkpoint"
_LOGS = "/var/log/pods"


class Checkpoint(NamedTuple):
    """`healthy` is what the kubelet last counted as allocatable, by resource.

    `holdings` may include pods that have ended: the kubelet removes those at its next allocation.
    """

    healthy: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    holdings: tuple[Holding, ...] = ()


def read_checkpoint(host: Host, directory: str) -> Checkpoint | None:
    """None if there is no such file. `Unreadable`, or `ConfigError` if a kubelet can't have written it."""
    path = f"{directory}/{NAME}"
    text = host.read_text(path)
    if text is None:
        return None
    try:
        data = json.loads(text)["Data"]
        registered = {
            str(name): tuple(sorted(_strings(ids)))
            for name, ids in (data.get("RegisteredDevices") or {}).items()
        }
        entries = tuple(_entry(item) for item in data.get("PodDeviceEntries") or ())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not a checkpoint of the kubelet: {error!r}", hint="the kubelet rewrites it by itself"
        ) from error
    return Checkpoint(registered, _with_pod_names(host, entries))


def _entry(item: Mapping[str, Any]) -> Holding:
    """DeviceIDs is NUMA node to ids since Kubernetes 1.20, and was a plain list before."""
    ids = item.get("DeviceIDs") or ()
    if isinstance(ids, Mapping):
        ids = [device_id for group in ids.values() for device_id in group or ()]
    return Holding(
        "",
        "",
        str(item["ContainerName"]),
        str(item["ResourceName"]),
        tuple(sorted(_strings(ids))),
        str(item["PodUID"]),
    )


def _strings(ids: Any) -> list[str]:
    if not isinstance(ids, list | tuple) or not all(isinstance(device_id, str) for device_id in ids):
        raise TypeError("device ids that are not strings")
    return list(ids)


def _with_pod_names(host: Host, entries: tuple[Holding, ...]) -> tuple[Holding, ...]:
    """With namespace and name of the pods whose logs exist."""
    if not entries:
        return entries
    known = {}
    for name in host.listdir(_LOGS):
        namespace, _, rest = name.partition("_")
        pod, _, uid = rest.rpartition("_")
        known[uid] = (namespace, pod)
    result = []
    for entry in entries:
        namespace, pod = known.get(entry.pod_uid, ("", ""))
        result.append(entry._replace(namespace=namespace, pod=pod))
    return tuple(result)


# Free space of the file systems that hold images and pods, and the limits below which the kubelet evicts
# pods.

# the kubelet's defaults (pkg/kubelet/apis/config/v1beta1/defaults.go)
EVICTION_DEFAULTS = {"nodefs.available": "10%", "imagefs.available": "15%", "nodefs.inodesFree": "5%"}
_BYTES = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "K": 10**3, "M": 10**6}
_BYTES |= {"k": 10**3, "G": 10**9, "T": 10**12}


class Disk(NamedTuple):
    """A directory and its file system; `signal` is nodefs or imagefs."""

    path: str
    signal: str
    room: FileSystem


def disks(host: Host, desired: Iterable[tuple[str, str]]) -> tuple[Disk, ...]:
    """`desired` are directories and their signals; those that don't exist are left out."""
    candidates = ((path, signal, host.file_system(path)) for path, signal in desired)
    return tuple(
        Disk(path, signal, room) for path, signal, room in candidates if room is not None and room.size
    )


def eviction_limits(texts: Iterable[str], process: Process | None) -> Mapping[str, str]:
    """evictionHard of a KubeletConfiguration, or --eviction-hard; {} if neither is set. The flag takes
    precedence."""
    limits: dict[str, str] = {}
    for text in texts:
        limits.update(parse_eviction_hard(text))
    flag = process.option("--eviction-hard") if process else None
    return parse_flag(flag) if flag else limits


def parse_eviction_hard(text: str) -> dict[str, str]:
    """From YAML, JSON, or a file of flags (microk8s' args/kubelet)."""
    flag = re.search(r"""--eviction-hard[= ]["']?([^"'\n]+)""", text)
    if flag:
        return parse_flag(flag[1])
    start = re.search(r"""["']?evictionHard["']?[ \t]*:[ \t]*(\{[^}]*\}|\n(?:[ \t]+\S.*(?:\n|$))*)""", text)
    if not start:
        return {}
    pairs = re.findall(r"""["']?([a-zA-Z]+\.[a-zA-Z]+)["']?[ \t]*:[ \t]*["']?([0-9][\w.%]*)""", start[1])
    return dict(pairs)


def parse_flag(text: str) -> dict[str, str]:
    """``nodefs.available<10%,imagefs.available<15%``."""
    pairs = (part.partition("<") for part in text.split(","))
    return {key.strip(): value.strip() for key, less, value in pairs if less}


def amount(limit: str, whole: int) -> int | None:
    """A limit in absolute numbers: ``10%`` of `whole`, or ``1Gi``; None if it is neither."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)(%|[KMGT]i?|k)?", limit, re.ASCII)
    if not match:
        return None
    number, unit = float(match[1]), match[2] or ""
    return int(whole * number / 100) if unit == "%" else int(number * _BYTES[unit])
