"""What of the node the plugin's container sees, and what it may write there."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from gpunode.dataclass import dataclass
from gpunode.kubernetes.manifests.common import PLUGIN, Json

if TYPE_CHECKING:
    from gpunode.kubernetes.manifests.daemon_set import PluginSet

# fixed in the kubelet, whatever its --root-dir is; pod-resources follows that
DEVICE_PLUGINS = "/var/lib/kubelet/device-plugins"
POD_RESOURCES = "/var/lib/kubelet/pod-resources"
CONFIG_FILE = "/etc/gpunode/plugin/config.yaml"
_STATE = "/var/lib/gpunode/plugin"
_FEATURES = "/etc/kubernetes/node-feature-discovery/features.d"  # where NFD looks
_CDI = "/var/run/cdi"
_DRIVER_ROOT = "/driver-root"


@dataclass(frozen=True)
class Volume:
    """One of the pod's volumes, and where the container has it."""

    volume: Json
    mounts: tuple[Json, ...]


def volumes(wanted: PluginSet) -> tuple[Volume, ...]:
    """Each is there only if it is used."""
    found = [
        _of_node("device-plugins", DEVICE_PLUGINS, "Directory"),
        _of_node("state", _STATE, "DirectoryOrCreate"),
        Volume({"name": "tmp", "emptyDir": {"sizeLimit": "16Mi"}}, (_mount("tmp", "/tmp"),)),  # noqa: S108
    ]
    if wanted.metrics_port:  # who holds which GPU is told on the page of metrics
        pods = f"{wanted.kubelet_root.rstrip('/')}/pod-resources"
        found.append(_of_node("pod-resources", pods, "Directory", POD_RESOURCES, read_only=True))
    if wanted.config:
        config = str(PurePosixPath(CONFIG_FILE).parent)
        volume = {"name": "config", "configMap": {"name": PLUGIN}}
        found.append(Volume(volume, (_mount("config", config, read_only=True),)))
    if "file" in wanted.labels:
        found.append(_of_node("features", _FEATURES, "DirectoryOrCreate"))
    if wanted.cdi:
        found.append(_of_node("cdi", _CDI, "DirectoryOrCreate"))
        root = _of_node("driver-root", wanted.driver_root, "Directory", _DRIVER_ROOT, read_only=True)
        root.mounts[0]["mountPropagation"] = "HostToContainer"  # a driver container is mounted later
        found.append(root)
    if wanted.mps or wanted.mps_elsewhere:
        found.append(_of_node("mps", wanted.mps_root, "DirectoryOrCreate"))
    if wanted.mps:
        shm = f"{wanted.mps_root}/shm"
        both = _mount("mps-shm", shm), _mount("mps-shm", "/dev/shm")  # noqa: S108
        found.append(Volume(_of_node("mps-shm", shm, "DirectoryOrCreate").volume, both))
    return tuple(found)


def _of_node(name: str, path: str, kind: str, inside: str = "", *, read_only: bool = False) -> Volume:
    volume = {"name": name, "hostPath": {"path": path, "type": kind}}
    return Volume(volume, (_mount(name, inside or path, read_only=read_only),))


def _mount(name: str, path: str, *, read_only: bool = False) -> Json:
    return {"name": name, "mountPath": path, **({"readOnly": True} if read_only else {})}
