"""The device plugin as a DaemonSet, with no more leave than what it is asked to do takes.

What each right is for (the chart in NVIDIA/k8s-device-plugin, deployments/helm, has the same, or more):

- the kubelet's device plugin directory, and its PodResources socket: always
- SYS_ADMIN with MIG: without it the runtime refuses NVIDIA_MIG_MONITOR_DEVICES
- the driver's root, read only, and /var/run/cdi with CDI: specifications name the driver's files
- the node's processes and a few capabilities with MPS: daemons serve clients of other users and containers
- privileged with pass-device-specs: the container must see the node's device files
- the account's token with labels onto the Node or a NodeFeature; NFD's directory with labels in a file
"""

from __future__ import annotations

from pathlib import PurePosixPath

from gpunode.dataclass import dataclass
from gpunode.kubernetes.manifests import plugin_volumes
from gpunode.kubernetes.manifests.cluster import PCI_VENDORS, present, resource
from gpunode.kubernetes.manifests.common import NAME, PLUGIN, RESTRICTED, Json, filled, labels, made
from gpunode.kubernetes.manifests.plugin_volumes import CONFIG_FILE, Volume

MONITORED = "NVIDIA_MIG_MONITOR_DEVICES"
# PCI classes under which GPUs appear: stock NFD writes them into its labels, NVIDIA's chart has them left out
_CLASSES = {"nvidia": ("0300", "0302"), "amd": ("0300", "0302", "0380", "1200")}
# what the MPS daemons do: compute modes, clients' credentials and memory, other users' processes
_MPS_CAPABILITIES = (
    *("CHOWN", "DAC_OVERRIDE", "FOWNER", "IPC_LOCK", "KILL", "SETGID", "SETUID"),
    *("SYS_ADMIN", "SYS_NICE", "SYS_PTRACE", "SYS_RESOURCE"),
)


@dataclass(frozen=True)
class PluginSet:
    """What is to run. `arguments` are those of `plugin serve`; `config` is a config file's text, or empty.

    `mig`, `cdi`, `mps` and `device_specs` ask for the rights that those take, and `mps_elsewhere` for a look
    at daemons of somebody else's; what switches them on are the arguments or the file. Paths are the node's.
    `metrics_port` 0 is no port, and no probes; `labels` are the sinks of the node's labels.
    """

    image: str
    vendor: str = "nvidia"
    namespace: str = "kube-system"
    runtime_class: str = "nvidia"
    arguments: tuple[str, ...] = ()
    mig: bool = False
    cdi: bool = False
    mps: bool = False
    mps_elsewhere: bool = False
    device_specs: bool = False
    config: str = ""
    driver_root: str = "/"
    kubelet_root: str = "/var/lib/kubelet"
    mps_root: str = "/run/nvidia/mps"
    metrics_port: int = 0
    labels: tuple[str, ...] = ()
    pull_secret: str = ""


def config_map(wanted: PluginSet) -> Json:
    """The plugin's config file. It notices an edit of it by itself."""
    data = {PurePosixPath(CONFIG_FILE).name: wanted.config}
    return made("v1", "ConfigMap", PLUGIN, "device-plugin", wanted.namespace, data=data)


def daemon_set(wanted: PluginSet) -> Json:
    """The DaemonSet (apps/v1)."""
    selector = {NAME: PLUGIN}
    spec = {
        "selector": {"matchLabels": selector},
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}},
        "template": {"metadata": {"labels": labels("device-plugin")}, "spec": _pod(wanted)},
    }
    return made("apps/v1", "DaemonSet", PLUGIN, "device-plugin", wanted.namespace, spec=spec)


def _pod(wanted: PluginSet) -> Json:
    volumes = plugin_volumes.volumes(wanted)
    key = resource(wanted.vendor)
    return {
        "serviceAccountName": PLUGIN,
        "automountServiceAccountToken": asks_server(wanted),
        "enableServiceLinks": False,
        "priorityClassName": "system-node-critical",
        **filled(runtimeClassName=wanted.runtime_class),
        **filled(imagePullSecrets=[{"name": wanted.pull_secret}] if wanted.pull_secret else []),
        **({"hostPID": True} if wanted.mps else {}),
        "affinity": _affinity(wanted.vendor),
        "tolerations": [{"key": key, "operator": "Exists"}],
        **filled(initContainers=[_shared_memory(wanted)] if wanted.mps else []),
        "containers": [_container(wanted, volumes)],
        "volumes": [one.volume for one in volumes],
    }


def _affinity(vendor: str) -> Json:
    """Nodes with such a GPU, as NFD's labels say in any of its settings, or the one that a person gives."""
    pci = PCI_VENDORS[vendor]
    names = (pci, *(f"{one}_{pci}" for one in _CLASSES[vendor]))
    keys = (*(f"feature.node.kubernetes.io/pci-{name}.present" for name in names), present(vendor))
    terms = [{"matchExpressions": [{"key": key, "operator": "In", "values": ["true"]}]} for key in keys]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


def _container(wanted: PluginSet, volumes: tuple[Volume, ...]) -> Json:
    return {
        "name": "device-plugin",
        "image": wanted.image,
        "imagePullPolicy": pull_policy(wanted.image),
        "command": ["gpunode"],
        "args": list(_arguments(wanted)),
        **filled(env=_environment(wanted)),
        **_served(wanted.metrics_port),
        "resources": _resources(wanted),
        "securityContext": _security(wanted),
        "volumeMounts": [mount for one in volumes for mount in one.mounts],
    }


def pull_policy(image: str) -> str:
    """A bare name is an image that the node has: nobody fetches a stranger's of that name."""
    return "IfNotPresent" if "/" in image else "Never"


def _arguments(wanted: PluginSet) -> tuple[str, ...]:
    return (
        *("plugin", "serve"),
        *((f"--vendor={wanted.vendor}",) if wanted.vendor != "nvidia" else ()),
        *((f"--config-file={CONFIG_FILE}",) if wanted.config else ()),
        *wanted.arguments,
        *((f"--listen=:{wanted.metrics_port}",) if wanted.metrics_port else ()),
    )


def asks_server(wanted: PluginSet) -> bool:
    """Whether anything that it does goes through the API server."""
    return not {"node", "node-feature"}.isdisjoint(wanted.labels)


def _environment(wanted: PluginSet) -> list[Json]:
    told = [{"name": name, "value": value} for name, value in _of_runtime(wanted).items()]
    fields = {"NODE_NAME": "spec.nodeName", "POD_NAME": "metadata.name"} if asks_server(wanted) else {}
    return told + [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()
    ]


def _of_runtime(wanted: PluginSet) -> dict[str, str]:
    """What NVIDIA's runtime gives the container: NVML's library, with MPS its programs, and every GPU."""
    if wanted.vendor != "nvidia":
        return {}
    monitored = {MONITORED: "all"} if wanted.mig else {}
    parts = "compute,utility" if wanted.mps else "utility"
    return {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": parts, **monitored}


def _served(port: int) -> Json:
    if not port:
        return {}
    return {
        "ports": [{"name": "metrics", "containerPort": port}],
        # the plugin waits for driver and kubelet by itself: only one that hangs is started anew
        "livenessProbe": {
            "httpGet": {"path": "/healthz", "port": "metrics"},
            "initialDelaySeconds": 10,
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
        "readinessProbe": {
            "httpGet": {"path": "/readyz", "port": "metrics"},
            "periodSeconds": 10,
            "timeoutSeconds": 5,
        },
    }


def _resources(wanted: PluginSet) -> Json:
    """As the systemd unit has it; MPS servers take what their clients need, and so are given no limit."""
    requests = {"cpu": "10m", "memory": "64Mi"}
    return {"requests": requests} if wanted.mps else {"requests": requests, "limits": {"memory": "256Mi"}}


def _security(wanted: PluginSet) -> Json:
    if wanted.device_specs:
        return {"privileged": True, "readOnlyRootFilesystem": True, "runAsUser": 0}
    added = _MPS_CAPABILITIES if wanted.mps else ("SYS_ADMIN",) if wanted.mig else ()
    capabilities: Json = {"drop": ["ALL"], **filled(add=list(added))}
    return RESTRICTED | {"capabilities": capabilities, "runAsUser": 0}  # the sockets are root's


def _shared_memory(wanted: PluginSet) -> Json:
    """MPS's clients of every user meet the server in this directory; the kubelet makes it for root alone."""
    return {
        "name": "shared-memory",
        "image": wanted.image,
        "imagePullPolicy": pull_policy(wanted.image),
        "command": ["chmod", "1777", f"{wanted.mps_root}/shm"],
        "securityContext": RESTRICTED | {"runAsUser": 0},
        "volumeMounts": [{"name": "mps-shm", "mountPath": f"{wanted.mps_root}/shm"}],
    }
